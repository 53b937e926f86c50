"""Who computes what: degrees, the cut over stages, the order of passes, the plan of one job.

May import what is below it in the thinking wing: `scheduling`, `forecast` and down; numpy.
"""
