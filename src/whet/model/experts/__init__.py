"""Mixtures of experts: one implementation in transformers' experts registry that computes adapters, too."""
