"""The backend "fckpt" of `torch.compile`: Inductor's kernels under a budget."""
