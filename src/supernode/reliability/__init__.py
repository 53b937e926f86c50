"""How reliable is a machine, and what of its time is of use? Rates of parts into MTBF, availability and goodput.

A thinking room: it may import `simulation/` and all below it, and no torch.
"""
