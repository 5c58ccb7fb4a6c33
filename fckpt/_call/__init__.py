"""What the result of a call depends on: arguments, captured tensors, modules, generator states and settings."""
