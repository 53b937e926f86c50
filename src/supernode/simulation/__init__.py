"""The same in virtual time: a backend like any other, and one training step event by event.

May import all of the thinking wing, and the ground floor.
"""
