"""What is asked of an export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from whet.checkpoint.export.certificate import Findings
from whet.checkpoint.export.numbers import Numbers
from whet.checkpoint.export.trained import Trained

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Speech:
    """How the trained model is spoken to."""

    tokenizer: PreTrainedTokenizerFast
    stops: Sequence[int]
    """Every id that ends an answer; they go into the generation settings, so that whoever loads the export gets a model
    that stops."""
    end_of_turn: int | None
    generation: dict[str, Any]
    """The base model's other settings for generating."""


@dataclass(frozen=True, slots=True)
class Order:
    """One export: what, and in which form."""

    trained: Trained
    speech: Speech
    numbers: Numbers
    step: int
    shard_size: int = 5 * 10**9
    tensor_parallel: int = 1
    trust_remote_code: bool = False
    name: str = "whet"


class Kind(Protocol):
    """A form that a model can be exported in."""

    @property
    def loaded_by(self) -> str:
        """Whose code reads it back."""

    def size(self, order: Order) -> int:
        """Bytes on the disk, about; refuses what cannot be exported in this form."""

    def write(self, order: Order, folder: Path) -> None:
        """Into an empty folder."""

    def look(self, order: Order, folder: Path, probes: Sequence[Sequence[int]], findings: Findings) -> Tensor | None:
        """Load it back as its users will; gives the logits on `probes` and blames what else is not as it should be."""
