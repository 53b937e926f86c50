"""What published measurements say about the forecast: tables with their sources, split once, and the error on them.

May import planning, hardware, schema, numpy, and the ground floor.
"""
