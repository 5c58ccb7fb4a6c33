"""Tiles: stretches of a trace that are independent by rows run slice by slice, so that no whole intermediate exists."""
