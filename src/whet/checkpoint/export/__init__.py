"""Exports: files that others can load, loaded back and compared before they are called done."""
