"""The registry of models: names, versions and aliases in a folder of small JSON files."""
