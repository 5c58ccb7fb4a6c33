"""Solvers: `(Graph, budget) -> Schedule`, one file per family."""
