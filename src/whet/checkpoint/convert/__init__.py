"""Checkpoints of other programs as plain model folders: every tensor accounted for, the result compared."""
