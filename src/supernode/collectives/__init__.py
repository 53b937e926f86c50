"""Which messages a collective is made of; costed by the fabric, executed by training.

`message` holds the nouns. `group` lets one group reduce and scatter; `grid` lifts that to groups within groups and to
tori; `tree` and `exchange` hold the rest. `outline` says the same of symmetric cases in a few numbers. `interpret`
carries a schedule out on arrays. `transport` reads what the collective library of a card generation does with them, and
`collective_time` tells how long one takes there. May import schema, numpy, and the ground floor.
"""
