"""The certificate: what was compared between the trained model and what was exported, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whet.checkpoint.export.numbers import Numbers
from whet.core.errors import WhetError

_ROWS = 64


class NotTheSameError(WhetError):
    """What was exported is not what was trained."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was compared between the trained model and the exported folder."""

    kind: str
    step: int
    verified: bool
    reasons: list[str]
    """Why it is not verified."""
    dtype: str
    loaded_by: str
    """Whose code read the export for the comparison."""
    conversations: int
    tokens: int
    max_logit_difference: float | None
    """None if it could not be measured: there are numbers that are none, or nothing that loads."""
    kl: float | None
    """Mean over positions of Σ p log(p/q), in nats; p: trained, q: exported."""
    same_next_token: float | None
    """The part of positions at which both would say the same next token."""
    same_ids: bool
    """The chat template and the tokenizer, loaded back, give the same ids."""
    stops: bool
    """Loaded back, an answer ends at the end of its turn."""
    files: dict[str, str]
    quantize: str | None = None
    """What the base was kept in while training: its numbers are those that were compared, not the original's."""

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class Findings:
    """What the look at an export brought to light, on the way to its certificate."""

    reasons: list[str] = field(default_factory=list)
    difference: float | None = None
    kl: float | None = None
    agreement: float | None = None
    same_ids: bool = False
    stops: bool = False

    def blame(self, reason: str) -> None:
        self.reasons.append(reason)


def compare_logits(found: Tensor, wanted: Tensor, numbers: Numbers, findings: Findings) -> None:
    """[N, V] each, of the exported and of the trained model."""
    if found.shape != wanted.shape:
        findings.blame(f"it knows {found.shape[-1]} tokens and the trained model {wanted.shape[-1]}")
        return
    if not bool(found.isfinite().all()):
        findings.blame(f"its logits are not numbers: weights may be too large for {numbers.name}")
        return
    findings.difference = max(
        (a - b).abs().max().item() for a, b in zip(found.split(_ROWS), wanted.split(_ROWS), strict=True)
    )
    findings.agreement = (found.argmax(dim=-1) == wanted.argmax(dim=-1)).double().mean().item()
    kl = sum(_kl(a, b) for a, b in zip(wanted.split(_ROWS), found.split(_ROWS), strict=True)) / len(wanted)
    findings.kl = max(0.0, kl)  # rounding can make it a little less than nothing
    allowed = numbers.difference * max(1.0, wanted.abs().max().item())
    if findings.difference > allowed:
        findings.blame(
            f"its logits differ by {findings.difference:.3g} where rounding to {numbers.name} explains {allowed:.3g}"
        )
    elif findings.agreement < numbers.agreement:
        findings.blame(f"its next token is the trained model's in {findings.agreement:.1%} of places only")
    elif findings.kl > numbers.kl:
        findings.blame(f"its predictions are {findings.kl:.3g} nats away from the trained model's")


def _kl(p: Tensor, q: Tensor) -> float:
    """Summed over rows."""
    log_p, log_q = (torch.log_softmax(logits.double(), dim=-1) for logits in (p, q))
    return float((log_p.exp() * (log_p - log_q)).sum())
