"""Configurations of other programs → recipes: `whet import config`."""
