"""The planned engine: traces a function once, schedules the trace, and runs the schedule as two Python functions."""
