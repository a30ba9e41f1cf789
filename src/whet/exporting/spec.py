"""What an export is: generation settings, the request of one export, the interface of a format, the certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from whet.core.errors import WhetError
from whet.exporting.dtypes import ExportDtype
from whet.exporting.trained_model import TrainedModel
from whet.model.weight_effect import WeightEffect

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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
    base_folder: Path | None = None
    """Of an image-text checkpoint: what text does not reach, such as the vision tower, is copied from here."""
    calibration: Sequence[Sequence[int]] = ()
    """Token ids of training conversations, for the importance matrix of llama.cpp's quantizer; none: no such matrix."""
    compares_in_fp32: bool = False
    """Whether logits of models in 16 bits are computed in fp32 for the comparison."""


@dataclass(slots=True)
class ExportFindings:
    """Results of comparing a reloaded export with the trained model; the certificate is made from them."""

    reasons: list[str] = field(default_factory=list)
    """Why the export is not verified."""
    max_logit_difference: float | None = None
    kl: float | None = None
    same_next_token: float | None = None
    same_ids: bool = False
    same_template: bool | None = None
    stops: bool = False
    details: dict[str, Any] = field(default_factory=dict)
    """What only some formats have, by its key in the certificate."""
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
    same_template: bool | None
    """The export's chat template is the one used in training."""
    stops: bool
    """The reloaded model stops at the end of its turn."""
    files: dict[str, str]
    quantize: str | None = None
    """The quantization of the base model during training; the comparison is with the quantized model."""
    effect: dict[str, Any] = field(default_factory=dict)
    """What training changed: a summary, and `modules`, a list of all trained weights."""
    details: dict[str, Any] = field(default_factory=dict)
    """For GGUF: `tensors` by type, those that `fell_back` to another, the `importance_matrix`, task `scores`."""

    def as_dict(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self.__slots__ if name != "details"}
        return found | self.details
