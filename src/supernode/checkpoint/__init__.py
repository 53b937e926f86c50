"""Save, verify, load and reshard a run's state.

May import schema, xxhash; torch in `state` alone, and the ground floor.
"""
