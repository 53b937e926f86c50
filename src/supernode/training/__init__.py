"""A plan made real: mesh, stages, tensor and data parallel, the step, the rank's life.

May import schema, models, checkpoint, torch, and the ground floor.
"""
