"""Repair and local search on editable schedules."""
