"""What an export is: dtype and tolerances, generation settings, the request of one export, the interface of a format,
the certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from whet.core.errors import WhetError
from whet.exporting.trained_model import TrainedModel
from whet.model.effect import WeightEffect

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class ExportDtype:
    """A dtype by its name in --dtype, and how far rounding to it may move the predictions."""

    name: str
    torch_name: str
    bytes_per_weight: float
    max_logit_difference: float
    """Relative to the largest logit."""
    max_kl: float
    """Mean Kullback-Leibler divergence per position, in nats."""
    min_same_next_token: float
    """Fraction of positions."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.torch_name)


EXPORT_DTYPES = {
    dtype.name: dtype
    for dtype in (
        ExportDtype("f64", "float64", 8, 1e-4, 1e-6, 0.99),
        ExportDtype("f32", "float32", 4, 1e-3, 1e-5, 0.99),
        ExportDtype("bf16", "bfloat16", 2, 0.1, 0.05, 0.9),
        ExportDtype("f16", "float16", 2, 0.05, 0.02, 0.9),
        ExportDtype("q8_0", "float32", 34 / 32, 0.15, 0.05, 0.9),
    )
}
EXACT = "exact"
_DTYPES_OF_KIND = {
    "merged": ("f64", "f32", "bf16", "f16"),
    "gguf": ("f32", "bf16", "f16", "q8_0"),
    "megatron": ("f32", "bf16", "f16"),
}
_NAME_OF_TORCH_DTYPE = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def choose_dtype(kind: str, requested: str | None, compute: torch.dtype, weights: torch.dtype) -> ExportDtype:
    """The requested dtype, or by default the one that training computed in: a bf16 run with fp32 master weights exports
    bf16. `exact` is the dtype of the trained weights."""
    if kind == "adapter":
        if requested is not None:
            raise WhetError(
                f"--dtype: {requested}, but an adapter is exported in the dtype it was trained in. Leave --dtype out"
            )
        return export_dtype_of(compute)
    supported = _DTYPES_OF_KIND[kind]
    if requested == EXACT:
        requested, compute = None, weights
    if requested is not None and requested not in supported:
        raise WhetError(
            f"--dtype: {requested} does not exist for --to {kind}. Use one of {', '.join((*supported, EXACT))}"
        )
    name = requested or _NAME_OF_TORCH_DTYPE[compute]
    return EXPORT_DTYPES[name if name in supported else "f32"]


def export_dtype_of(dtype: torch.dtype) -> ExportDtype:
    """The tolerances of bf16 for dtypes without a name, such as fp8."""
    return EXPORT_DTYPES[_NAME_OF_TORCH_DTYPE.get(dtype, "bf16")]


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """The tokenizer of the trained model, and what ends its answers."""

    tokenizer: PreTrainedTokenizerFast
    stop_ids: Sequence[int]
    """eos_token_id of the exported generation config."""
    end_of_turn_id: int | None
    base_config: dict[str, Any]
    """The generation config of the base model."""

    @property
    def end_of_answer_id(self) -> int | None:
        """The token that the model was trained to end an answer with."""
        return self.end_of_turn_id if self.end_of_turn_id is not None else next(iter(self.stop_ids), None)


@dataclass(frozen=True, slots=True)
class ExportSpec:
    """One export: the trained model, and how to write it."""

    model: TrainedModel
    generation: GenerationSettings
    dtype: ExportDtype
    step: int
    shard_size: int = 5 * 10**9
    tensor_parallel: int = 1
    trust_remote_code: bool = False
    name: str = "whet"
    run_effect: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What the run knows of each weight, and an export does not show: whether it got a gradient, which experts did."""


@dataclass(slots=True)
class ExportFindings:
    """Results of comparing a reloaded export with the trained model; the certificate is made from them."""

    reasons: list[str] = field(default_factory=list)
    """Why the export is not verified."""
    max_logit_difference: float | None = None
    kl: float | None = None
    same_next_token: float | None = None
    same_ids: bool = False
    stops: bool = False
    effect: list[WeightEffect] = field(default_factory=list)
    """On every trained weight."""


class ExportFormat(Protocol):
    """A format that models can be exported to."""

    @property
    def loaded_by(self) -> str:
        """The library that loads the export back."""

    def require_supported(self, spec: ExportSpec) -> None:
        """Raise if this model cannot be exported in this format."""

    def estimate_bytes(self, spec: ExportSpec) -> int:
        """Approximate size on disk."""

    def write(self, spec: ExportSpec, folder: Path) -> None:
        """Write to an empty folder."""

    def load_and_verify(
        self, spec: ExportSpec, folder: Path, probes: Sequence[Sequence[int]], findings: ExportFindings
    ) -> Tensor | None:
        """Load the export as its users do. Returns its logits on `probes`, and adds to `findings` what is wrong with
        the rest: dtypes, tokenizer, template, stop tokens. None if it does not load."""


class ExportMismatchError(WhetError):
    """The exported model is not the trained one."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """certificate.json: the comparison of an export with the trained model."""

    kind: str
    step: int
    verified: bool
    reasons: list[str]
    """Why it is not verified."""
    dtype: str
    loaded_by: str
    """The library that loaded the export for the comparison."""
    conversations: int
    tokens: int
    max_logit_difference: float | None
    """None if the export does not load or its logits are not finite."""
    kl: float | None
    """Mean over positions of Σ p log(p/q), in nats; p: trained model, q: export."""
    same_next_token: float | None
    """Fraction of positions where both models predict the same next token."""
    same_ids: bool
    """The reloaded chat template and tokenizer give the same token ids."""
    stops: bool
    """The reloaded model stops at the end of its turn."""
    files: dict[str, str]
    quantize: str | None = None
    """The quantization of the base model during training; the comparison is with the quantized model."""
    effect: dict[str, Any] = field(default_factory=dict)
    """What training changed: a summary, and `modules`, a list of all trained weights."""

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}
