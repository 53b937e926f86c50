"""The terminal: reads, makes one call, shows.

May import all that loads no torch; calls the doing wing through `control` alone.
"""
