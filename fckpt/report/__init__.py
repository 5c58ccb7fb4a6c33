"""Tables and pictures of a plan, from `Graph`, `Schedule` and `Timeline`."""
