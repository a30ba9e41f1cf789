"""Formats: how a record of a file becomes a conversation."""
