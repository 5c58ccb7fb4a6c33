"""Engine 1: a region is recomputed by running its function again. Nothing is traced."""
