"""Engine 1: rematerialisation without a plan. The backward pass runs the function again; nothing is traced."""
