"""Reference models that do not know they are parallel.

May import schema, torch, and the ground floor.
"""
