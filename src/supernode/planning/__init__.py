"""Who computes what: degrees, the cut over stages, the order of passes, the plan of one job.

May import schema, hardware, fabric, collectives, numpy, and the ground floor.
"""
