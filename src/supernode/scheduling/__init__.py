"""What runs where and when; pure: events in, commands out.

May import schema, hardware, fabric, numpy, and the ground floor.
"""
