"""The hall: SuperNode and its verbs, the drive loop, the journal, reports.

May import all rooms, and the ground floor.
"""
