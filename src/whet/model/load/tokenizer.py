"""Loads a model's tokenizer and generation settings, and hashes the files that define them. Does not import torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.core.errors import WhetError, os_error
from whet.core.files import hash_file, hash_json, user_path
from whet.core.hub import is_hub_name, reach_hub
from whet.model.config import ModelConfig
from whet.model.load.random_models import config_folder, is_random_model
from whet.model.load.weight_files import load_error, locate_model
from whet.tokenizer.convert_sentencepiece import to_fast_tokenizer
from whet.tokenizer.named_templates import TurnMarkers, is_template_token, set_marker_template

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerFast


def locate_tokenizer(config: ModelConfig) -> str:
    """The folder, file or hub id of the tokenizer: model.tokenizer, or the model's own. Models with random weights use
    SmolLM2's tokenizer unless their folder has one."""
    if config.tokenizer is not None:
        return str(user_path(config.tokenizer))
    if not is_random_model(config.path):
        return locate_model(config.path)
    folder = config_folder(config.path)
    if folder is not None and any((folder / name).exists() for name in _TOKENIZER_FILES):
        return str(folder)
    return locate_model("builtin:smollm2")


def load_tokenizer(config: ModelConfig, turns: TurnMarkers | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of model.tokenizer or model.path; with `turns`, its chat template wraps turns in these markers."""
    from transformers import AutoTokenizer

    pieces = sentencepiece_file(config)
    if pieces is not None:
        return _add_tokens(to_fast_tokenizer(pieces, turns), config.add_tokens)
    where = locate_tokenizer(config)
    folder, key = Path(where), _config_key(config)
    if not folder.exists() and is_hub_name(where):
        reach_hub(where)
    if folder.is_dir() and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise WhetError(
            f"{key}: the folder has no tokenizer ({' or '.join(_TOKENIZER_FILES)}). Copy the "
            "tokenizer files of its base model into it"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            where, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # the tokenizers library raises Exception itself
        raise load_error(config.tokenizer or config.path, "tokenizer", error) from None
    _add_tokens(tokenizer, config.add_tokens)
    if turns is not None:
        set_marker_template(tokenizer, turns)
    return tokenizer


def _add_tokens(tokenizer: PreTrainedTokenizerFast, tokens: list[str]) -> PreTrainedTokenizerFast:
    """Add each text as one token, also inside words. The markers of a named template may be there already."""
    from tokenizers import AddedToken

    known = tokenizer.get_vocab()
    for token in tokens:
        if token in known and not is_template_token(token):
            raise WhetError(
                f"model.add_tokens: {token!r} is a token already, number {known[token]}. Remove it; to train its row "
                "with an adapter, add it to adapter.tokens"
            )
    new = [token for token in tokens if token not in known]
    if new:
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=is_template_token(text)) for text in new])
    return tokenizer


def sentencepiece_file(config: ModelConfig) -> Path | None:
    """The SentencePiece model to convert: model.tokenizer if it is a `.model` file, or the folder's tokenizer.model if
    it has no other tokenizer file."""
    folder = Path(locate_tokenizer(config))
    if config.tokenizer is not None and not folder.is_dir():
        if not folder.is_file() or folder.suffix != ".model":
            raise WhetError(f"{_config_key(config)}: no such folder or .model file in {Path.cwd()}. Give one of them")
        return folder
    found = [name for name in _TOKENIZER_FILES if (folder / name).exists()]
    return folder / "tokenizer.model" if found == ["tokenizer.model"] else None


def _config_key(config: ModelConfig) -> str:
    return f"model.path: {config.path}" if config.tokenizer is None else f"model.tokenizer: {config.tokenizer}"


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def load_generation_settings(config: ModelConfig) -> dict[str, Any]:
    """The settings of generation_config.json (temperature and the like); empty without one."""
    found = _read_generation_config(config)
    if found is None:
        return {}
    return {key: value for key, value in found.to_diff_dict().items() if key != "transformers_version"}


def stop_ids(config: ModelConfig) -> list[int]:
    """eos_token_id of generation_config.json as a list; empty without one."""
    found = _read_generation_config(config)
    ids = None if found is None else found.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _read_generation_config(config: ModelConfig) -> GenerationConfig | None:
    """generation_config.json; None without one, and with model.tokenizer, because its ids are another tokenizer's."""
    from transformers import GenerationConfig

    if config.tokenizer is not None:
        return None
    place = locate_tokenizer(config)
    try:
        found = GenerationConfig.from_pretrained(place, revision=config.revision)
        ids = found.eos_token_id if isinstance(found.eos_token_id, list) else [found.eos_token_id]
        if not all(number is None or isinstance(number, int) for number in ids):
            raise WhetError(
                f"model.path: {config.path}: eos_token_id in generation_config.json is {found.eos_token_id!r}. It must "
                "be the number of a token, or a list of them"
            )
        return found
    except OSError as error:  # transformers raises it for a missing file, and for one that is not JSON
        if (known := os_error(error, "reading generation_config.json", place)) is not None:
            raise known from None
        if (Path(place) / "generation_config.json").exists():
            raise load_error(config.path, "generation settings", error) from None
        return None
    except ValueError as error:  # settings that contradict each other
        raise load_error(config.path, "generation settings", error) from None


_DEFINING_FILES = (
    "tokenizer*", "*.model", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "additional_chat_templates/*", "generation_config.json",
)  # fmt: skip
"""Files that define tokens, chat templates and stop tokens."""


def tokenizer_files(config: ModelConfig) -> dict[str, Path] | None:
    """The files that define the tokenizer, by name; None if it is not on this machine yet."""
    place = Path(locate_tokenizer(config))
    if place.is_file():
        return {place.name: place}
    if not place.is_dir():
        return None
    found = {path for pattern in _DEFINING_FILES for path in place.glob(pattern) if path.is_file()}
    return {str(path.relative_to(place)): path for path in sorted(found)}


def tokenizer_hashes(config: ModelConfig) -> dict[str, str] | None:
    """Hashes of these files. The model type is included, because transformers pre-tokenizes by it: with the same
    tokenizer.json, a Qwen2 folder gives other ids than a Llama folder."""
    files = tokenizer_files(config)
    if files is None:
        return None
    try:
        described = json.loads((Path(locate_tokenizer(config)) / "config.json").read_text())
        kind = {"model_type": str(described["model_type"])}
    except (OSError, ValueError, LookupError, TypeError):  # missing, or loading will report it
        kind = {}
    added = {"add_tokens": hash_json(config.add_tokens)} if config.add_tokens else {}
    return {name: hash_file(path) for name, path in files.items()} | kind | added
