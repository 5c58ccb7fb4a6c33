"""What all solvers share: the rules of memory, profiles, starts, minimum cuts, bisection."""
