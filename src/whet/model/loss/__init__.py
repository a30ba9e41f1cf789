"""The training loss: the output head, linear cross-entropy over supervised positions, and the module that wraps the model."""
