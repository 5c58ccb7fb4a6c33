"""Engine 2: traces a function once, schedules the trace, and runs the schedule as two Python functions."""
