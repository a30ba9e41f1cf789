"""Text that files, processes and tokenizers can take."""

from __future__ import annotations


def is_valid_text(text: str) -> bool:
    """False for NUL and for lone surrogates (`\\ud800` in JSON), which break tokenizers."""
    if "\0" in text:
        return False
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
