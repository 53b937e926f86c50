"""A plan made real: the step, its data and optimizer, saving, the rank's life.

May import what is below it in the doing wing: `parallel` and down; torch. `backends` starts it in the ranks.
"""
