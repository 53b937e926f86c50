"""What there is: cards, links, nodes, switches, supplies and cooling, each number with its source.

May import `schema`, `registry`, `units`, `errors` and numpy (inside functions where it is slow to load).
"""
