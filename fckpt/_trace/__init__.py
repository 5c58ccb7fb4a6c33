"""From a captured graph, or a Python function, to a `Graph` of its forward and backward pass."""
