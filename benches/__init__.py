"""Measurements of fckpt, one script a table. `python -m benches` lists them."""
