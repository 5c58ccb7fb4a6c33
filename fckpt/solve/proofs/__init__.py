"""Lower bounds on peak and time, and the integer programs that prove them."""
