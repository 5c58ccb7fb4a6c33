"""Lower bounds and certificates: how good a schedule can be at best."""
