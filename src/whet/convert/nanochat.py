"""nanochat checkpoints and tokenizers as those of transformers.

transformers' NanoChat has the architecture of the first releases: embedding, norm, blocks of attention (rotary
positions with negative angles, then normalised queries and keys) and relu², norm, head with logits capped at 15.
Checkpoints of February 2026 have value embeddings, lambdas and windows, too: `whet.model.nanochat` has them. Tensors
that came later (smear, backout) are refused by their names.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whet.convert.foreign_checkpoint import ConversionNotes, TargetTensor, load_pt, malformed_file_errors
from whet.core.errors import WhetError, first_line
from whet.core.files import read_json, user_path
from whet.exporting.nanochat import (
    EPS,
    LOGIT_SOFTCAP,
    ROPE_THETA,
    has_vocabulary_rows,
    nanochat_logits,
    to_hf_name,
    window_sizes,
)
from whet.tokenizer.named_templates import NAMED_TEMPLATES, set_named_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class NanochatCheckpoint:
    """The checkpoint of a step in a folder, by default of the newest."""

    def __init__(self, folder: Path, config: Path | None = None, step: int | None = None) -> None:
        path = _model_file(folder, step)
        self.files, self.notes = [path], ConversionNotes()
        meta = config or path.with_name(path.name.replace("model_", "meta_")).with_suffix(".json")
        content = load_pt(path)
        with malformed_file_errors(path, "the state dict"):
            self._tensors = {name.removeprefix("_orig_mod."): tensor for name, tensor in content.items()}
            others = [name for name, tensor in self._tensors.items() if not isinstance(tensor, Tensor)]
        if others:
            raise WhetError(f"{path}: {others[0]} is not a tensor. Give a checkpoint that nanochat wrote")
        unknown = [name for name in self._tensors if to_hf_name(name) is None]
        if unknown:
            raise WhetError(
                f"{path}: whet has no model with the tensor {unknown[0]}: it supports nanochat up to February 2026, "
                "with value embeddings, lambdas and windows, without smear and backout"
            )
        with malformed_file_errors(meta, "model_config"):
            self._sizes = read_json(meta)["model_config"]
            self.config = self._build_config(window_sizes(self._sizes))
            padding = len(self._tensors["transformer.wte.weight"]) - self.config.vocab_size
        if padding < 0:
            raise WhetError(
                f"{meta}: vocab_size is {self.config.vocab_size:,}, {-padding:,} more than the tensors have"
            )
        if padding:
            self.notes.left_out["rows of padding"] = f"{padding} in each table of tokens; nanochat ignores them"
        self.notes.assumed += [
            f"rope_theta {ROPE_THETA:g}, as in the releases with these tensors",
            f"norm epsilon {EPS:g}",
        ]
        self.dtype = torch.bfloat16
        for tensor in self._tensors.values():
            self.dtype = torch.promote_types(self.dtype, tensor.dtype)

    def _build_config(self, windows: Sequence[int | None]) -> Any:
        sizes, tensors = self._sizes, self._tensors
        common: dict[str, Any] = {
            "vocab_size": sizes["vocab_size"],
            "hidden_size": tensors["transformer.wte.weight"].shape[1],
            "intermediate_size": tensors["transformer.h.0.mlp.c_fc.weight"].shape[0],
            "num_hidden_layers": sizes["n_layer"],
            "num_attention_heads": sizes["n_head"],
            "num_key_value_heads": sizes["n_kv_head"],
            "max_position_embeddings": sizes["sequence_len"],
            "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
            "final_logit_softcapping": LOGIT_SOFTCAP,
            "rms_norm_eps": EPS,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        if "resid_lambdas" not in tensors and not any(windows):
            from transformers import NanoChatConfig

            return NanoChatConfig(**common)
        from whet.model.nanochat import WindowedNanoChatConfig, register_nanochat

        register_nanochat()
        return WindowedNanoChatConfig(
            **common,
            layer_types=["sliding_attention" if window else "full_attention" for window in windows],
            sliding_window=next((window + 1 for window in windows if window), None),
        )

    def targets(self) -> list[TargetTensor]:
        rows = self.config.vocab_size

        def build(name: str) -> Tensor:
            tensor = self._tensors[name]
            return tensor[:rows] if has_vocabulary_rows(name) else tensor

        return [
            TargetTensor(str(to_hf_name(name)), (f"{self.files[0].name}:{name}",), lambda name=name: build(name))  # type: ignore[misc]
            for name in self._tensors
        ]

    def logits(self, ids: Sequence[int]) -> Tensor:
        return nanochat_logits(self._tensors, self._sizes, ids)


def _model_file(folder: Path, step: int | None) -> Path:
    if not folder.is_dir():
        raise WhetError(f"{folder}: no such folder")
    found = {int(m[1]): path for path in folder.iterdir() if (m := re.fullmatch(r"model_(\d+)\.pt", path.name))}
    if not found:
        raise WhetError(
            f"{folder}: no file model_NNNNNN.pt. Give the folder of one model, such as chatsft_checkpoints/d20"
        )
    if step is not None and step not in found:
        raise WhetError(f"--step {step}: {folder} has the steps {', '.join(map(str, sorted(found)))}. Give one of them")
    return found[max(found) if step is None else step]


# nanochat's tokenizer as one of transformers.
#
# `tokenizer/tokenizer.pkl` is a pickled `tiktoken.Encoding`: a pattern that splits text, the rank of each token's bytes
# and the ids of special tokens. Unpickling runs code that the file names. whet reads it with an unpickler that knows
# one name, tiktoken's Encoding, and gives it a class that only keeps the state; a file with any other name is refused.

_FILE = "tokenizer.pkl"
_MAX_BYTES = 2**28
_BOS = "<|bos|>"


def find_tokenizer_pickle(checkpoint: Path, given: Path | None) -> Path | None:
    """`given` or the file in it, if it is nanochat's pickle; without `given`, the one beside the checkpoints' folder:
    BASE/tokenizer/tokenizer.pkl for BASE/chatsft_checkpoints/d20."""
    if given is None:
        found = checkpoint.resolve().parent.parent / "tokenizer" / _FILE
        return found if found.is_file() else None
    place = user_path(given)
    if place.is_dir():
        return place / _FILE if (place / _FILE).is_file() and not (place / "tokenizer.json").exists() else None
    return place if place.suffix == ".pkl" else None


class _EncodingState:
    """Stands for tiktoken.Encoding: keeps what the pickle says about it."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("tiktoken.core", "Encoding"), ("tiktoken", "Encoding")):
            return _EncodingState
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a tokenizer")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("persistent ids are not allowed in a tokenizer")


def read_encoding(file: Path) -> dict[str, Any]:
    """`pat_str`, `mergeable_ranks` and `special_tokens` of a pickled tiktoken.Encoding; nothing of it is executed."""
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise WhetError(f"{file}: larger than any tokenizer ({_MAX_BYTES >> 20} MiB)")
        content = _RestrictedUnpickler(io.BytesIO(file.read_bytes())).load()
    except OSError as error:
        raise WhetError(f"{file}: cannot read ({error.strerror}). Copy nanochat's tokenizer folder") from None
    except WhetError:
        raise
    except Exception as error:  # a damaged or forged pickle can raise almost anything
        raise WhetError(
            f"{file}: not a tokenizer of nanochat ({first_line(error)}). Give its tokenizer.pkl, or a folder with a "
            "tokenizer.json"
        ) from None
    state = content.state if isinstance(content, _EncodingState) else None
    if not isinstance(state, dict) or not _is_encoding(state):
        raise WhetError(f"{file}: not a pickled tiktoken.Encoding with a pattern, ranks and special tokens")
    return state


def _is_encoding(state: dict[str, Any]) -> bool:
    ranks, special = state.get("mergeable_ranks"), state.get("special_tokens")
    return (
        isinstance(state.get("pat_str"), str)
        and isinstance(ranks, dict)
        and all(isinstance(key, bytes) and key and type(value) is int and value >= 0 for key, value in ranks.items())
        and all(bytes([byte]) in ranks for byte in range(256))
        and isinstance(special, dict)
        and all(isinstance(key, str) and type(value) is int for key, value in special.items())
        and sorted([*ranks.values(), *special.values()]) == list(range(len(ranks) + len(special)))
    )


def load_nanochat_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """The tokenizer with nanochat's chat template; the end of an answer is its EOS."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    encoding = read_encoding(file)
    ranks, special = encoding["mergeable_ranks"], encoding["special_tokens"]
    missing = [token for token in (_BOS, *NAMED_TEMPLATES["nanochat"].tokens) if token not in special]
    if missing:
        raise WhetError(
            f"{file}: it has no token {missing[0]}, so it is not nanochat's. Give the model's own tokenizer"
        )
    letters = _byte_letters()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    merges = [(names[left], names[right]) for left, right in _merges(ranks)]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(encoding["pat_str"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    tokens = [AddedToken(token, normalized=False, special=True) for token in sorted(special, key=special.__getitem__)]
    backend.add_special_tokens(tokens)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A", pair=f"{_BOS} $A {_BOS} $B", special_tokens=[(_BOS, special[_BOS])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=_BOS, eos_token=NAMED_TEMPLATES["nanochat"].end_of_turn,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.name_or_path = str(file)
    if {token: tokenizer.convert_tokens_to_ids(token) for token in special} != special:
        raise WhetError(f"{file}: its special tokens are not the last ids, which is not nanochat's tokenizer")
    set_named_template(tokenizer, "nanochat")
    return tokenizer


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every way to join two tokens to a third, by its rank: tiktoken joins the pair whose result ranks first."""
    return [
        (token[:cut], token[cut:])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]


def _byte_letters() -> list[str]:
    """The printable letter that byte-level tokenizers of the tokenizers library write for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
