"""Starts runs under torchrun and restarts them after a crash; knows a run by its command and its folder only."""
