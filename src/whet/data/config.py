"""The knobs of the data side."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from whet.core.config import Section, impossible


class Source(Section):
    """Where conversations come from."""

    path: str = Field(description="A JSONL file of conversations, or a built-in generator such as builtin:orders.")
    split: Literal["train", "held-out"] = Field(
        default="train", description="Of a built-in generator: which of its two disjoint halves."
    )
    max_samples: int | None = Field(default=None, ge=1, description="Take at most this many, from the start.")

    def identity(self) -> tuple[str, str]:
        """The same for two ways to write the same path."""
        return (self.path, self.split) if self.path.startswith("builtin:") else (str(Path(self.path).resolve()), "")


class Validation(Section):
    """Conversations kept apart from training, to measure on."""

    alternatives = (("sources", "fraction"),)

    sources: list[Source] | None = Field(default=None, min_length=1, description="Where they come from.")
    fraction: float | None = Field(
        default=None, gt=0, lt=1, description="Or: this part of the training conversations, drawn by run.seed."
    )


class DataConfig(Section):
    """What to train on."""

    sources: list[Source] = Field(min_length=1, description="Where the training conversations come from.")
    validation: Validation | None = Field(default=None, description="What to measure on.")
    train_on: Literal["assistant", "last", "all"] = Field(
        default="assistant",
        description="Which tokens are learned: all assistant turns, the last one only, or every token.",
    )
    max_length: int = Field(default=4096, ge=2, description="The longest conversation, in tokens.")
    too_long: Literal["drop", "truncate", "error"] = Field(
        default="drop",
        description="What happens to a longer one: left out, cut to its first tokens, or an error. It is counted.",
    )
    on_bad: Literal["error", "skip"] = Field(
        default="error", description="A line that cannot be used: stop and name it, or leave it out and count it."
    )
    packing: Literal["best-fit", "none"] = Field(
        default="best-fit", description="How conversations share rows; they never see each other."
    )

    @model_validator(mode="after")
    def _no_overlap(self) -> DataConfig:
        held = (self.validation.sources or []) if self.validation else []
        train = {source.identity() for source in self.sources}
        for source in held:
            if source.identity() in train:
                raise impossible(
                    "validation",
                    f"{source.path} is a training source too, so the validation would measure memory. "
                    "Name another file, or use validation.fraction",
                )
        return self
