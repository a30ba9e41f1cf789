"""Runs at hand: list, show, compare, logs, stop, cancel, resume, rename, delete. Run folders are the truth."""
