"""Chains of stages: what dynamic programs over chains and repeated blocks share."""
