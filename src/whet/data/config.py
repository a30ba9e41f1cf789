"""The `data` section of the configuration."""

from __future__ import annotations

import math
import sys
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from whet.core.config import Section, config_error
from whet.core.files import resolve_path, user_path

Format = Literal[
    "auto", "messages", "sharegpt", "alpaca", "prompt-completion", "transcript", "marked", "text", "gsm8k",
    "multiple-choice", "tokens",
]  # fmt: skip
_Pair = Annotated[tuple[int, int], Field(strict=False)]

DEFAULT_BUILTIN_SAMPLES = 1000
"""Conversations of a built-in dataset when neither max_samples nor stop is set."""


class MaskRules(Section):
    """Loss mask of a .bin file, by token id. The rules are GPT-NeoX's; a masked token is never a target."""

    pairs: list[_Pair] | None = Field(
        default=None,
        description="[[a, b], …]: mask from each a to its b, inclusive; [7, 7] masks from each odd 7 to the next. "
        "GPT-NeoX's loss_mask_pairs is the same as a flat list: [7, 7].",
    )
    individual: list[int] | None = Field(default=None, description="Mask these ids.")
    alternating: list[int] | None = Field(
        default=None, description="Mask every odd occurrence (1st, 3rd, …) of these ids."
    )
    eod: int | None = Field(
        default=None,
        description="Mask the token after this end-of-document id, not the id itself (GPT-NeoX's eod_mask_loss).",
    )


class Source(Section):
    """A source of conversations or documents."""

    alternatives = (("epochs", "weight"),)

    path: str = Field(
        description="A file (.jsonl, .json, .csv, .xlsx, .txt, .parquet, .arrow, .bin; .gz and .zst too), a folder, a "
        "glob, - for stdin, hub:OWNER/NAME, a built-in dataset such as builtin:orders, or plugin:NAME, a source of "
        "your own (docs/python.md)."
    )
    format: Format = Field(
        default="auto", description="The format of the records; auto detects it and prints the result."
    )
    fields: dict[str, str] | None = Field(
        default=None, description="The names of the format's fields in your file, such as {prompt: question}."
    )
    encoding: str | None = Field(
        default=None, description="The encoding of a .csv, .tsv or .txt file, such as cp1252; default: detected."
    )
    split: str | None = Field(
        default=None,
        description="The split of a dataset. Built-in datasets have train and held-out, which are disjoint.",
    )
    subset: str | None = Field(default=None, description="The subset (configuration) of a dataset on the hub.")
    epochs: float | None = Field(
        default=None,
        gt=0,
        le=10**6,
        description="How many times each conversation occurs per epoch of the run; default 1.",
    )
    weight: float | None = Field(
        default=None,
        gt=0,
        le=10**9,
        description="Alternative to epochs: its share of the conversations, relative to the other sources' weights.",
    )
    start: int | None = Field(default=None, ge=0, description="Skip this many records.")
    stop: int | None = Field(default=None, ge=1, description="Stop before this record, counting from 0.")
    step: int | None = Field(default=None, ge=1, description="Take every n-th record.")
    max_samples: int | None = Field(
        default=None, ge=1, description="Take at most this many records, after start, stop and step."
    )
    where: str | None = Field(
        default=None, description="Keep only records that match, such as: turns <= 6 and lang == 'de'."
    )
    system: str | None = Field(
        default=None, description="The system message of conversations that have none; default: data.system."
    )
    calculator: Literal["calls", "remove"] = Field(
        default="remove",
        description="For gsm8k, builtin:arithmetic and builtin:spelling-bee: turn calculations into calculator calls, "
        "or keep plain text.",
    )
    mask: MaskRules | None = Field(
        default=None, description="The loss mask of a .bin file; default: every token is supervised."
    )

    @field_validator("encoding")
    @classmethod
    def _encoding_exists(cls, encoding: str | None) -> str | None:
        try:
            "".encode(encoding or "utf-8")
        except LookupError:
            raise ValueError("no such encoding; common ones: utf-8, cp1252, cp1250, cp1251, gb18030, cp932") from None
        return encoding

    @property
    def is_builtin(self) -> bool:
        return self.path.startswith("builtin:")

    @property
    def selection(self) -> range:
        """The numbers of the records that are read, from 0, as if the source were endless; `where` applies later."""
        chosen = range(self.start or 0, sys.maxsize if self.stop is None else self.stop, self.step or 1)
        limit = self.max_samples
        if limit is None and self.stop is None and self.is_builtin:
            limit = DEFAULT_BUILTIN_SAMPLES
        return chosen if limit is None else chosen[:limit]

    def identity(self) -> tuple[str, str, str]:
        """(resolved path, split, subset): equal for two spellings of the same path, such as a token file with and
        without its suffix."""
        named = self.path == "-" or self.path.startswith(("builtin:", "hub:", "plugin:"))
        path = self.path if named else str(resolve_path(user_path(self.path))).removesuffix(".bin")
        return path, self.split or ("train" if self.is_builtin else ""), self.subset or ""


def common_records(one: range, other: range) -> range:
    """The numbers in both of two selections: they recur every least common multiple of the steps."""
    shared = math.gcd(one.step, other.step)
    first = max(one.start, other.start)
    if (other.start - one.start) % shared:
        return range(0)
    turns = (other.start - one.start) // shared * pow(one.step // shared, -1, other.step // shared)
    period = math.lcm(one.step, other.step)
    first += (one.start + turns * one.step - first) % period
    return range(first, min(one.stop, other.stop), period)


def describe_records(numbers: range) -> str:
    """`record 7`, `records 90 to 99`, `all records from 90 on`, `records 5, 15, 25, …`."""
    if not numbers[1:]:
        return f"record {numbers[0]}"
    if numbers.step > 1:
        return f"records {', '.join(map(str, numbers[:3]))}{', …' if numbers[3:] else ''}"
    if numbers.stop >= sys.maxsize:
        return f"all records from {numbers[0]} on" if numbers[0] else "all records"
    return f"records {numbers[0]} to {numbers[-1]}"


class Validation(Section):
    """Validation data, never trained on."""

    alternatives = (("sources", "fraction"),)

    sources: list[Source] | None = Field(default=None, min_length=1, description="Sources of the validation data.")
    fraction: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Alternative to sources: hold out this fraction of the training data, drawn with run.seed.",
    )


class Marker(Section):
    """The marker text that opens and closes a turn, and its token id."""

    text: str = Field(min_length=1, description="The text of the marker in the file, such as <<<|user|>>>.")
    id: int | None = Field(default=None, ge=0, description="Its token id; default: looked up in the tokenizer.")


class Markers(Section):
    """The markers of marked text; the same marker opens and closes a turn."""

    user: Marker = Field(description="The marker of user turns.")
    assistant: Marker = Field(
        description="The marker of assistant turns; the closing one is supervised and ends an answer."
    )
    system: Marker | None = Field(default=None, description="The marker of system turns, if there are any.")
    append_eod: bool = Field(default=True, description="Append the tokenizer's end-of-document token to each document.")


class DataConfig(Section):
    """Training and validation data."""

    sources: list[Source] = Field(min_length=1, description="Sources of the training data.")
    validation: Validation | None = Field(default=None, description="Validation data.")
    template: str = Field(
        default="auto",
        description="The chat template: auto (the tokenizer's default), the name of another template of the "
        "tokenizer, a .jinja file, or chatml, llama3, gemma or nanochat, which add the tokens that they need.",
    )
    markers: Markers | None = Field(default=None, description="Delimit turns by markers instead of a chat template.")
    system: str | None = Field(
        default=None,
        min_length=1,
        description="The system message of conversations that have none, in training, evaluation and chats with the "
        "run.",
    )
    train_on: Literal["assistant", "last", "all"] = Field(
        default="assistant",
        description="Which tokens are supervised: all assistant turns, only the last one, or every token.",
    )
    max_length: int = Field(default=4096, ge=2, description="Maximum length of a conversation, in tokens.")
    too_long: Literal["drop", "truncate", "split", "error"] = Field(
        default="drop",
        description="What to do with longer conversations: drop, truncate, split between turns (plain text: into "
        "windows), or stop with an error. The ledger counts them.",
    )
    on_bad: Literal["error", "skip"] = Field(
        default="error",
        description="What to do with a record that cannot be used: stop with an error, or skip it and count it.",
    )
    deduplicate: bool = Field(default=False, description="Drop exact duplicates; the ledger counts them either way.")
    packing: Literal["best-fit", "k-bin", "none"] = Field(
        default="best-fit",
        description="How conversations are packed into rows; attention never crosses from one conversation to another.",
    )
    bins: int = Field(default=16, ge=1, description="For k-bin: the number of open rows.")
    store: str | None = Field(
        default=None, description="The folder of the prepared data; default: a content-addressed folder in the cache."
    )

    @model_validator(mode="before")
    @classmethod
    def _pass_system_on(cls, given: Any) -> Any:
        """data.system is that of every source without one."""
        system = given.get("system") if isinstance(given, dict) else None
        if system is None:
            return given

        def add(sources: Any) -> Any:
            if not isinstance(sources, list):  # an error of its own
                return sources
            return [{"system": system, **each} if isinstance(each, dict) else each for each in sources]

        given, held_out = {**given, "sources": add(given.get("sources"))}, given.get("validation")
        if isinstance(held_out, dict) and "sources" in held_out:
            given["validation"] = {**held_out, "sources": add(held_out["sources"])}
        return given

    @model_validator(mode="after")
    def _no_overlap(self) -> DataConfig:
        for number, source in enumerate((self.validation.sources or []) if self.validation else []):
            for other in self.sources:
                common = common_records(other.selection, source.selection)
                if source.identity() != other.identity() or not common:
                    continue
                if source.where is None and other.where is None:  # with a filter, the records decide: see run/data.py
                    raise config_error(
                        f"validation.sources.{number}",
                        f"{source.path} is a training source too, and both read {describe_records(common)} (counted "
                        "from 0), so validation would measure memorization. Select different records with start, stop "
                        "or step, give another file, or use validation.fraction",
                    )
        return self

    @model_validator(mode="after")
    def _weights_or_epochs(self) -> DataConfig:
        weighted = [source for source in self.sources if source.weight is not None]
        if weighted and len(weighted) < len(self.sources):
            other = next(source for source in self.sources if source.weight is None)
            raise config_error(
                "sources",
                f"{weighted[0].path} has a weight and {other.path} has none; set weight for all sources or for none",
            )
        return self
