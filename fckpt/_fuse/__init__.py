"""Kernels of several operations: consecutive computations of a schedule become one compiled kernel."""
