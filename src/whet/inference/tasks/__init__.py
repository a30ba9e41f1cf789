"""Evaluation tasks: examples, scorers, and scoring over all ranks."""
