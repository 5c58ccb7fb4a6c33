"""Tables and pictures of a plan, and a progress line."""
