"""The networks that the benches train, and two tables of them with sizes and data."""
