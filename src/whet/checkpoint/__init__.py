"""Saving a run, continuing it, and shipping what it made."""
