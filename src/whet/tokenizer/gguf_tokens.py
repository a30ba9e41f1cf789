"""Special tokens of a tokenizer that transformers read from a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_GGUF_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def set_gguf_special_tokens(tokenizer: PreTrainedTokenizerFast, fields: dict[str, Any]) -> None:
    """Take the special tokens from the ids in the file (`GGUFReader.fields`): transformers 5.17 makes the bos token of
    some files their eos token, and drops the pad token."""
    for kind, key in _GGUF_KEYS.items():
        field = fields.get(f"tokenizer.ggml.{key}_token_id")
        token = None if field is None else tokenizer.convert_ids_to_tokens(int(field.contents()))
        setattr(tokenizer, f"{kind}_token", token)
