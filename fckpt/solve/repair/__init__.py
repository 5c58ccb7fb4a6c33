"""Improving a feasible or infeasible schedule move by move."""
