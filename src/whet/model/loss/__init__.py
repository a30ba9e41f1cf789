"""The training loss: the output head, linear cross-entropy at supervised positions, and the root module."""
