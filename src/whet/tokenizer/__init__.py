"""Tokenizers: chat templates, turn markers, SentencePiece, bytes per token. A model's is loaded by `whet.model.load.tokenizer`."""
