"""Checkpoints of a run: saving, loading, retention."""
