"""Shared by solvers: rules of a graph, profiles, starts, cuts, minimum cuts, stages of exact programs, bisection."""
