"""Where processes live.

May import schema, and the ground floor; in the ranks themselves, `training` and `probing`.
"""
