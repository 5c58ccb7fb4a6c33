"""Engine 2: a function is traced once, and each call runs the two functions lowered from a schedule."""
