"""From a Python function to a graph of torch calls, and the guards under which that graph stands for the function."""
