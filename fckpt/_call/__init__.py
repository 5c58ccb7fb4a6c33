"""What a call depends on besides its function: arguments, captured tensors, modules, generator states, settings."""
