"""Where processes live.

May import schema, and the ground floor.
"""
