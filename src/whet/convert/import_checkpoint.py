"""`whet import checkpoint`: a checkpoint of another program becomes a Hugging Face model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whet.convert.converter import convert_checkpoint
from whet.convert.dcp import DcpCheckpoint
from whet.convert.foreign_checkpoint import ForeignCheckpoint
from whet.convert.nanochat import NanochatCheckpoint
from whet.convert.neox import NeoXCheckpoint
from whet.core.console import info, silence_libraries, warn
from whet.core.errors import WhetError
from whet.model.config import ModelConfig
from whet.model.load.tokenizer import load_tokenizer


def import_checkpoint(
    kind: str, folder: Path, out: Path, config: Path | None, tokenizer: Path | None, average_norms: bool
) -> dict[str, Any]:
    """Write `out` from a checkpoint of `kind`; nothing is there if that fails."""
    silence_libraries()
    folder, out = folder.expanduser(), out.expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WhetError(f"--out {out}: this is not an empty folder. Give another one")
    if config is not None and not config.is_file():
        raise WhetError(f"--config {config}: no such file")
    if average_norms and kind != "neox":
        raise WhetError(f"--average-norms: only GPT-NeoX's ranks have norms of their own, not {kind}'s. Leave it out")
    words = None if tokenizer is None else load_tokenizer(ModelConfig(path=str(tokenizer), tokenizer=str(tokenizer)))
    checkpoint = _open_checkpoint(kind, folder, config, average_norms)
    if words is not None:
        _set_special_tokens(checkpoint, words, tokenizer)
    certificate = convert_checkpoint(kind, folder, checkpoint, words, out)
    _print_certificate(certificate, out, has_words=words is not None)
    return {"imported": str(out), "certificate": certificate}


def _open_checkpoint(kind: str, folder: Path, config: Path | None, average_norms: bool) -> ForeignCheckpoint:
    if kind == "neox":
        return NeoXCheckpoint(folder, config, average_norms)
    return NanochatCheckpoint(folder, config) if kind == "nanochat" else DcpCheckpoint(folder, config)


def _set_special_tokens(checkpoint: ForeignCheckpoint, tokenizer: Any, place: Path | None) -> None:
    rows = checkpoint.config.get_text_config().vocab_size
    if len(tokenizer) > rows:
        raise WhetError(
            f"--tokenizer {place}: it knows {len(tokenizer):,} tokens, and the checkpoint has {rows:,} rows. They do "
            "not belong together"
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(tokenizer, name) is not None:
            setattr(checkpoint.config, name, getattr(tokenizer, name))


def _print_certificate(certificate: dict[str, Any], out: Path, has_words: bool) -> None:
    if certificate["averaged"]:
        worst = max(certificate["averaged"].values())
        warn(f"{len(certificate['averaged'])} norms differed between ranks, by up to {worst:.3g}, and were averaged")
    if not has_words:
        warn("no --tokenizer was given: the folder has none, and training asks for model.tokenizer")
    how = (
        f"largest difference of a logit {certificate['max_logit_difference']:.1e}"
        if certificate["compared"] == "logits"
        else f"{certificate['tensors']} tensors are equal bit by bit"
    )
    info(f"imported to {out}: {len(certificate['mapped'])} tensors, loaded back and compared: {how}")
