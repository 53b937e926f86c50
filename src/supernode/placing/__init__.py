"""Where do ranks lie, and where is the model cut? Orders of the axes over tiers, shares of a torus, stages of one time.

May import what is below it: `planning` and down; no torch. `search` asks it where a plan is to lie.
"""
