"""Who computes what: memory per card, seconds per step, the cut over stages.

May import schema, hardware, fabric, collectives, numpy, and the ground floor.
"""
