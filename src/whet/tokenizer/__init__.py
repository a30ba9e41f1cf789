"""Tokenizers: chat templates, turn markers, SentencePiece, bytes per token.

`whet.model.load.tokenizer` loads the tokenizer of a model.
"""
