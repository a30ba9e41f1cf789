"""From a configuration to a run: the only package that puts the parts together."""
