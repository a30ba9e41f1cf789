"""Formats: how a record of a file becomes a conversation or a document."""
