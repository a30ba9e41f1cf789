"""RUN/validation.npy: the loss of every validation conversation at each evaluation, so that two runs can be compared
conversation by conversation. Nothing in training depends on it.

A structured array with one row a conversation: `conversation`, the hash of its ids and loss mask; `tokens`, how many
are supervised; and for each evaluation the sum of their losses, as `step-000100`. It is replaced as a whole.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whet.core.console import warn
from whet.core.errors import WhetError, describe_error
from whet.core.files import atomic_write

if TYPE_CHECKING:
    from numpy.typing import NDArray

VALIDATION_LOSSES = "validation.npy"
_MAX_EVALUATIONS, _MAX_BYTES = 50, 2**26
_STEP = re.compile(r"step-(\d{6,18})")


@dataclass(frozen=True, slots=True)
class ConversationLosses:
    """The losses of one evaluation, sorted by conversation."""

    conversations: NDArray[np.uint64]
    """Hashes; equal conversations, and the parts of a split one, are one."""
    tokens: NDArray[np.int64]
    nats: NDArray[np.float64]
    """The sum of −log p of the tokens."""

    @classmethod
    def from_documents(
        cls, hashes: NDArray[np.uint64], tokens: NDArray[np.float64] | NDArray[np.int64], nats: NDArray[np.float64]
    ) -> ConversationLosses:
        """Join the documents of each conversation, without those that have nothing to learn."""
        kept = tokens > 0
        conversations, index = np.unique(hashes[kept], return_inverse=True)
        count, total = np.zeros(len(conversations), dtype=np.int64), np.zeros(len(conversations))
        np.add.at(count, index, tokens[kept].astype(np.int64))
        np.add.at(total, index, nats[kept])
        return cls(conversations, count, total)

    @property
    def loss(self) -> float:
        """Per token: val_loss."""
        return float(self.nats.sum() / self.tokens.sum())


def read_validation_losses(folder: Path) -> dict[int, ConversationLosses]:
    """The losses of a run by step; a WhetError if the file is damaged, none if there is no file."""
    file = folder / VALIDATION_LOSSES
    if not file.exists():
        return {}
    try:
        array = np.load(file, allow_pickle=False)
        conversations, tokens = array["conversation"], array["tokens"]
        steps = {int(match[1]): name for name in array.dtype.names if (match := _STEP.fullmatch(name))}
        if array.ndim != 1 or (conversations.dtype, tokens.dtype) != (np.uint64, np.int64) or not (tokens > 0).all():
            raise ValueError("other columns than those of validation losses")
        found = {step: ConversationLosses(conversations, tokens, array[name]) for step, name in sorted(steps.items())}
        if not all(each.nats.dtype == np.float64 and np.isfinite(each.nats).all() for each in found.values()):
            raise ValueError("a loss is not a number")
        return found
    except Exception as error:  # a damaged header can raise almost anything
        raise WhetError(
            f"{file}: cannot be read ({describe_error(error)}). Delete it: the run's next evaluation writes it again"
        ) from None


def add_validation_losses(folder: Path, step: int, measured: ConversationLosses) -> None:
    """Add an evaluation. Later ones are dropped, and so are those of other conversations (eval.rows)."""
    found = _read_or_set_aside(folder)
    kept = {at: each for at, each in found.items() if at < step and _has_same_rows(each, measured)}
    _write(folder, _limit(kept | {step: measured}))


def truncate_validation_losses(folder: Path, step: int) -> None:
    """Drop evaluations after `step`: the run continues from there."""
    found = _read_or_set_aside(folder)
    kept = {at: each for at, each in found.items() if at <= step}
    if len(kept) < len(found):
        _write(folder, kept)


def _read_or_set_aside(folder: Path) -> dict[int, ConversationLosses]:
    try:
        return read_validation_losses(folder)
    except WhetError:
        file = folder / VALIDATION_LOSSES
        away = file.with_name(f"damaged-{file.name}")
        file.replace(away)
        warn(
            f"{file}: damaged. It is kept as {away.name}; the losses of earlier evaluations are missing in the new one"
        )
        return {}


def _has_same_rows(one: ConversationLosses, other: ConversationLosses) -> bool:
    return np.array_equal(one.conversations, other.conversations) and np.array_equal(one.tokens, other.tokens)


def _limit(losses: dict[int, ConversationLosses]) -> dict[int, ConversationLosses]:
    """The newest evaluations and the best one, as many as the file may have."""
    rows = len(next(iter(losses.values())).tokens)
    count = max(2, min(_MAX_EVALUATIONS, _MAX_BYTES // max(1, 8 * rows)))
    best = min(losses, key=lambda step: (losses[step].loss, step)) if rows else 0
    newest = sorted(losses)[-count:]
    kept = newest if best in newest or best not in losses else [best, *newest[1:]]
    return {step: losses[step] for step in kept}


def _write(folder: Path, losses: dict[int, ConversationLosses]) -> None:
    if not losses:
        (folder / VALIDATION_LOSSES).unlink(missing_ok=True)
        return
    first = next(iter(losses.values()))
    columns = [("conversation", np.uint64), ("tokens", np.int64), *((f"step-{at:06d}", np.float64) for at in losses)]
    array = np.empty(len(first.tokens), dtype=columns)
    array["conversation"], array["tokens"] = first.conversations, first.tokens
    for at, each in losses.items():
        array[f"step-{at:06d}"] = each.nats
    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    atomic_write(folder / VALIDATION_LOSSES, content.getvalue())
