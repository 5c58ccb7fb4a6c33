"""Chains of stages, shared by solvers that use dynamic programming over chains, and by solvers for repeated blocks."""
