"""Conversation → token ids and loss mask."""
