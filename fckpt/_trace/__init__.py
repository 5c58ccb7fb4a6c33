"""Tracing of a captured graph or a Python function: a `Graph` of its forward and backward pass."""
