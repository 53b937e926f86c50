"""The terminal: reads, makes one call, shows.

May import control, schema, and the ground floor.
"""
