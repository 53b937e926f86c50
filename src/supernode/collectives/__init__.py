"""Which messages a collective is made of; costed by the fabric, executed by training.

`message` holds the nouns. `group` lets one group reduce and scatter; `grid` lifts that to groups within groups and to
tori; `tree` and `exchange` hold the rest. `outline` says the same of symmetric cases in a few numbers. `interpret`
carries a schedule out on arrays. May import schema, numpy, and the ground floor.
"""
