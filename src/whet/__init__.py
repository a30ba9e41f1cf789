"""whet fine-tunes language models on conversations."""

__version__ = "0.1.0"
