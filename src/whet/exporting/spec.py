"""What an export is: dtype and its tolerances, export spec, format interface, certificate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from whet.core.errors import WhetError
from whet.exporting.trained_model import TrainedModel

# In which numbers an export is written, and how much of a difference their rounding explains.


@dataclass(frozen=True, slots=True)
class ExportDtype:
    """A type of numbers, by the name that `--dtype` has for it."""

    name: str
    torch_name: str
    bytes_each: float
    difference: float
    """Largest difference of a logit, relative to the largest logit, that rounding explains."""
    kl: float
    """Largest mean Kullback-Leibler divergence, in nats, that rounding explains."""
    agreement: float
    """Smallest part of positions where both models would say the same next token."""

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.torch_name)


EXPORT_DTYPES = {
    numbers.name: numbers
    for numbers in (
        ExportDtype("f64", "float64", 8, 1e-4, 1e-6, 0.99),
        ExportDtype("f32", "float32", 4, 1e-3, 1e-5, 0.99),
        ExportDtype("bf16", "bfloat16", 2, 0.1, 0.05, 0.9),
        ExportDtype("f16", "float16", 2, 0.05, 0.02, 0.9),
        ExportDtype("q8_0", "float32", 34 / 32, 0.15, 0.05, 0.9),
    )
}
_DTYPES_OF_KIND = {
    "merged": ("f64", "f32", "bf16", "f16"),
    "gguf": ("f32", "bf16", "f16", "q8_0"),
    "megatron": ("f32", "bf16", "f16"),
}
_NAME_OF_TORCH_DTYPE = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


EXACT = "exact"


def choose_dtype(kind: str, asked: str | None, computed_in: torch.dtype, kept_in: torch.dtype) -> ExportDtype:
    """What was asked for, else what training computed in: 16-bit runs ship 16 bits, though their trained weights may be
    kept in 32. `exact` are the ones they are kept in."""
    if kind == "adapter":
        if asked is not None:
            raise WhetError(f"--dtype: {asked}, but an adapter is shipped in the numbers that it was trained in")
        return export_dtype_of(computed_in)
    known = _DTYPES_OF_KIND[kind]
    if asked == EXACT:
        asked, computed_in = None, kept_in
    if asked is not None and asked not in known:
        raise WhetError(f"--dtype: {asked} does not exist for --to {kind}; it can be {', '.join((*known, EXACT))}")
    name = asked or _NAME_OF_TORCH_DTYPE[computed_in]
    return EXPORT_DTYPES[name if name in known else "f32"]


def export_dtype_of(dtype: torch.dtype) -> ExportDtype:
    return EXPORT_DTYPES[_NAME_OF_TORCH_DTYPE[dtype]]


# The certificate: what was compared between the trained model and what was exported, and what came of it.

_ROWS_AT_ONCE = 64


class ExportMismatchError(WhetError):
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
class ExportFindings:
    """What the look at an export brought to light, on the way to its certificate."""

    reasons: list[str] = field(default_factory=list)
    difference: float | None = None
    kl: float | None = None
    agreement: float | None = None
    same_ids: bool = False
    stops: bool = False

    def blame(self, reason: str) -> None:
        self.reasons.append(reason)


def compare_logits(found: Tensor, wanted: Tensor, numbers: ExportDtype, findings: ExportFindings) -> None:
    """[N, V] each, of the exported and of the trained model."""
    if found.shape != wanted.shape:
        findings.blame(f"it knows {found.shape[-1]} tokens and the trained model {wanted.shape[-1]}")
        return
    if not bool(found.isfinite().all()):
        findings.blame(f"its logits are not numbers: weights may be too large for {numbers.name}")
        return
    findings.difference = max(
        (a - b).abs().max().item() for a, b in zip(found.split(_ROWS_AT_ONCE), wanted.split(_ROWS_AT_ONCE), strict=True)
    )
    findings.agreement = (found.argmax(dim=-1) == wanted.argmax(dim=-1)).double().mean().item()
    kl = sum(
        _kl_divergence(a, b) for a, b in zip(wanted.split(_ROWS_AT_ONCE), found.split(_ROWS_AT_ONCE), strict=True)
    ) / len(wanted)
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


def _kl_divergence(p: Tensor, q: Tensor) -> float:
    """Summed over rows."""
    log_p, log_q = (torch.log_softmax(logits.double(), dim=-1) for logits in (p, q))
    return float((log_p.exp() * (log_p - log_q)).sum())


# What is asked of an export.

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """How the trained model is spoken to."""

    tokenizer: PreTrainedTokenizerFast
    stops: Sequence[int]
    """Every id that ends an answer; they go into the generation settings, so that whoever loads the export gets a model
    that stops."""
    end_of_turn: int | None
    generation: dict[str, Any]
    """The base model's other settings for generating."""


@dataclass(frozen=True, slots=True)
class ExportSpec:
    """One export: what, and in which form."""

    trained: TrainedModel
    speech: GenerationSettings
    numbers: ExportDtype
    step: int
    shard_size: int = 5 * 10**9
    tensor_parallel: int = 1
    trust_remote_code: bool = False
    name: str = "whet"


class ExportFormat(Protocol):
    """A form that a model can be exported in."""

    @property
    def loaded_by(self) -> str:
        """Whose code reads it back."""

    def size(self, order: ExportSpec) -> int:
        """Bytes on the disk, about; refuses what cannot be exported in this form."""

    def write(self, order: ExportSpec, folder: Path) -> None:
        """Into an empty folder."""

    def look(
        self, order: ExportSpec, folder: Path, probes: Sequence[Sequence[int]], findings: ExportFindings
    ) -> Tensor | None:
        """Load it back as its users will; gives the logits on `probes` and blames what else is not as it should be."""
