"""How cards are joined and how long bytes take between them.

May import schema, hardware, numpy, scipy, and the ground floor.
"""
