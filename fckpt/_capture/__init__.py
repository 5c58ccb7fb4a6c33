"""Capture of a Python function as a graph of torch calls, with the guards under which the graph is valid."""
