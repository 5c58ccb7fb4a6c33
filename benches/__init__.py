"""Measurements of fckpt, one script a table. `python -m benches` lists them."""

import sys

# `python -m benches.NAME` would define the bench, and end without a word.
if any(argument.startswith("benches.") for argument in sys.orig_argv[1:3]):
    sys.exit("use: python -m benches NAME ...")
