"""Tokenizers: loading, chat templates, special tokens, SentencePiece, bytes per token."""
