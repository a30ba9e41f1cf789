"""Answers of the model in samples.jsonl, paired before and after training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from whet.report.formatting import finite_number, int_or_none

FIXED_PROMPTS = "eval.prompts"
"""The task of samples that answer eval.prompts."""


@dataclass(frozen=True, slots=True)
class LoggedSample:
    """An answer of the model after `step` steps; `right` is None if it was not scored as right or wrong, and `score` is
    None in runs of earlier versions."""

    step: int
    task: str
    prompt: str
    expected: str
    answer: str
    right: bool | None
    score: float | None = None

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> LoggedSample:
        """From a line of `samples.jsonl`."""
        right = record.get("right")
        return cls(
            step=int_or_none(record.get("step")) or 0,
            task=as_text(record.get("task")),
            prompt=as_text(record.get("prompt")),
            expected=as_text(record.get("expected")),
            answer=as_text(record.get("answer")),
            right=right if isinstance(right, bool) else None,
            score=finite_number(record.get("score")),
        )


@dataclass(frozen=True, slots=True)
class SamplePair:
    """The answers to one prompt before training and at the last evaluation; None where there is none."""

    before: LoggedSample | None
    after: LoggedSample | None

    @property
    def sample(self) -> LoggedSample:
        """One of the answers; task, prompt and expected answer are the same in both."""
        found = self.after or self.before
        assert found is not None
        return found

    @property
    def improved(self) -> bool:
        """Wrong before, right after."""
        return bool(self.before and self.after and self.before.right is False and self.after.right)

    @property
    def wrong_after(self) -> bool:
        return bool(self.after and self.after.right is False)


def pair_samples(samples: Iterable[LoggedSample], start_step: int = 0) -> list[SamplePair]:
    """One pair per prompt, in order of first appearance; answers at `start_step` are those before training."""
    samples = list(samples)
    last = max((sample.step for sample in samples), default=start_step)
    before = {_sample_key(sample): sample for sample in samples if sample.step == start_step}
    after = {_sample_key(sample): sample for sample in samples if sample.step == last > start_step}
    return [SamplePair(before.get(key), after.get(key)) for key in before | after]


def select_pairs(pairs: Sequence[SamplePair], limit: int) -> list[SamplePair]:
    """At most `limit` pairs to show: improved ones first, and wrong answers in proportion, at least one.

    Showing successes only would make a poor model look perfect.
    """
    wrong = [pair for pair in pairs if pair.wrong_after]
    share = min(len(wrong), max(1, round(limit * len(wrong) / len(pairs)))) if wrong else 0
    rest = sorted((pair for pair in pairs if not pair.wrong_after), key=lambda pair: not pair.improved)
    good = rest[: max(0, limit - share)]
    return good + wrong[: limit - len(good)]


def _sample_key(sample: LoggedSample) -> tuple[str, str, str]:
    return sample.task, sample.prompt, sample.expected


def as_text(value: object) -> str:
    """A value of JSON as text that can be encoded."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()  # JSON can name surrogates, which are no characters
