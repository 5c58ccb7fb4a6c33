"""Shared by all solvers: rules of a graph, memory profiles, starts, cuts, minimum cuts and bisection."""
