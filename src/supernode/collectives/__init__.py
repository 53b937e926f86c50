"""Which messages a collective is made of; costed by the fabric, executed by training.

May import schema, and the ground floor.
"""
