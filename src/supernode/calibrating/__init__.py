"""What this computer gives its ranks: what to measure, and which few numbers follow from it.

`control.calibrate` has it measured. May import planning, forecast, workload, hardware, schema, and the ground floor.
"""
