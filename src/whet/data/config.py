"""The knobs of the data side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from whet.core.config import Section, config_error

Format = Literal[
    "auto", "messages", "sharegpt", "alpaca", "prompt-completion", "marked", "text", "gsm8k", "multiple-choice",
    "tokens",
]  # fmt: skip
_Pair = Annotated[tuple[int, int], Field(strict=False)]


class MaskRules(Section):
    """Of a .bin file: which tokens are not learned, by id. The rules are GPT-NeoX's; a token that is masked is no
    target."""

    pairs: list[_Pair] | None = Field(
        default=None,
        description="[[a, b], …]: from a to its b, both included, nothing is learned; [7, 7] is from each odd 7 to the "
        "next. NeoX's loss_mask_pairs writes them in one list: [7, 7].",
    )
    individual: list[int] | None = Field(default=None, description="These ids are never learned.")
    alternating: list[int] | None = Field(
        default=None, description="Of these ids every first occurrence is not learned and every second is."
    )
    eod: int | None = Field(
        default=None,
        description="The token after this end-of-document id is not learned (NeoX's eod_mask_loss); the id itself is.",
    )


class Source(Section):
    """Where conversations come from."""

    alternatives = (("epochs", "weight"),)

    path: str = Field(
        description="A file (.jsonl, .json, .csv, .txt, .parquet, .arrow, .bin; .gz and .zst too), a folder, a glob, "
        "- for stdin, hub:OWNER/NAME, or a generator such as builtin:orders."
    )
    format: Format = Field(
        default="auto", description="How a record becomes a conversation; auto looks and says what it found."
    )
    fields: dict[str, str] | None = Field(
        default=None, description="Names in your file for the format's fields, such as {prompt: question}."
    )
    split: str | None = Field(
        default=None, description="Of a data set: its split. Of a generator: train or held-out, which never overlap."
    )
    subset: str | None = Field(default=None, description="Of a data set on the hub: the name of its configuration.")
    epochs: float | None = Field(
        default=None, gt=0, description="How often its conversations occur in one epoch of the run; 1 if absent."
    )
    weight: float | None = Field(
        default=None, gt=0, description="Or: its share of the conversations, relative to the other sources' weights."
    )
    start: int | None = Field(default=None, ge=0, description="Skip this many records first.")
    stop: int | None = Field(default=None, ge=1, description="Stop before this record, counted from 0.")
    step: int | None = Field(default=None, ge=1, description="Take every so-manieth of them.")
    max_samples: int | None = Field(default=None, ge=1, description="Take at most this many, from the start.")
    where: str | None = Field(
        default=None, description="Keep records for which this holds, such as: turns <= 6 and lang == 'de'."
    )
    calculator: Literal["calls", "remove"] = Field(
        default="remove", description="Of gsm8k and builtin:arithmetic: sums become calculator calls, or plain text."
    )
    mask: MaskRules | None = Field(default=None, description="Of a .bin file: what is not learned.")

    @property
    def is_generated(self) -> bool:
        return self.path.startswith("builtin:")

    def identity(self) -> tuple[str, str]:
        """The same for two ways to write the same path."""
        named = self.path == "-" or self.path.startswith(("builtin:", "hub:"))
        path = self.path if named else str(Path(self.path).expanduser().resolve())
        return path, self.split or ("train" if self.is_generated else "")


class Validation(Section):
    """Conversations kept apart from training, to measure on."""

    alternatives = (("sources", "fraction"),)

    sources: list[Source] | None = Field(default=None, min_length=1, description="Where they come from.")
    fraction: float | None = Field(
        default=None, gt=0, lt=1, description="Or: this part of the training conversations, drawn by run.seed."
    )


class Marker(Section):
    """A text that opens and closes a turn, and its id."""

    text: str = Field(min_length=1, description="As it stands in the file, such as <<<|user|>>>.")
    id: int | None = Field(default=None, ge=0, description="Its token; absent: what the tokenizer says.")


class Markers(Section):
    """How marked text is written: the same marker opens and closes a turn."""

    user: Marker = Field(description="Of the user's turns.")
    assistant: Marker = Field(description="Of the assistant's turns; the closing one is learned and ends an answer.")
    system: Marker | None = Field(default=None, description="Of system turns, if there are any.")
    append_eod: bool = Field(default=True, description="End each document with the tokenizer's end-of-document.")


class DataConfig(Section):
    """What to train on."""

    sources: list[Source] = Field(min_length=1, description="Where the training conversations come from.")
    validation: Validation | None = Field(default=None, description="What to measure on.")
    template: str = Field(
        default="auto",
        description="The chat template: the tokenizer's own, one of its others by name, or a .jinja file.",
    )
    markers: Markers | None = Field(default=None, description="Write turns between markers instead of by a template.")
    train_on: Literal["assistant", "last", "all"] = Field(
        default="assistant",
        description="Which tokens are learned: all assistant turns, the last one only, or every token.",
    )
    max_length: int = Field(default=4096, ge=2, description="The longest conversation, in tokens.")
    too_long: Literal["drop", "truncate", "split", "error"] = Field(
        default="drop",
        description="What happens to a longer one: left out, cut to its first tokens, split between turns (plain text: "
        "into windows), or an error. It is counted.",
    )
    on_bad: Literal["error", "skip"] = Field(
        default="error", description="A record that cannot be used: stop and name it, or leave it out and count it."
    )
    deduplicate: bool = Field(default=False, description="Leave out exact copies; they are counted in any case.")
    packing: Literal["best-fit", "k-bin", "none"] = Field(
        default="best-fit", description="How conversations share rows; they never see each other."
    )
    bins: int = Field(default=16, ge=1, description="Of k-bin: how many rows are open at a time.")
    store: str | None = Field(
        default=None, description="A folder for the prepared data; absent: the cache, addressed by content."
    )

    @model_validator(mode="after")
    def _no_overlap(self) -> DataConfig:
        held = (self.validation.sources or []) if self.validation else []
        train = {source.identity() for source in self.sources}
        for source in held:
            if source.identity() in train:
                raise config_error(
                    "validation",
                    f"{source.path} is a training source too, so the validation would measure memory. "
                    "Name another file, or use validation.fraction",
                )
        return self

    @model_validator(mode="after")
    def _weights_or_epochs(self) -> DataConfig:
        weighted = [source for source in self.sources if source.weight is not None]
        if weighted and len(weighted) < len(self.sources):
            other = next(source for source in self.sources if source.weight is None)
            raise config_error(
                "sources",
                f"{weighted[0].path} has a weight and {other.path} has none: give a weight to all, or to none",
            )
        return self
