"""What the model answered to the same prompt before and after training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of the model, after `step` steps. `right` is None if nobody judged."""

    step: int
    task: str
    prompt: str
    expected: str
    answer: str
    right: bool | None

    @classmethod
    def read(cls, record: dict[str, Any]) -> Sample:
        """A sample from a line of `samples.jsonl`."""
        right = record.get("right")
        return cls(
            step=int(record.get("step") or 0),
            task=_text(record.get("task")),
            prompt=_text(record.get("prompt")),
            expected=_text(record.get("expected")),
            answer=_text(record.get("answer")),
            right=right if isinstance(right, bool) else None,
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt with the answers before training and at the last evaluation; None where the model was not asked."""

    before: Sample | None
    after: Sample | None

    @property
    def sample(self) -> Sample:
        """Either answer: task, prompt and expected are those of both."""
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


def pair_up(samples: Iterable[Sample], first: int = 0) -> list[Pair]:
    """One pair for each prompt, in the order in which the prompts were first asked; `first` is where the run began."""
    samples = list(samples)
    last = max((sample.step for sample in samples), default=first)
    before = {_question(sample): sample for sample in samples if sample.step == first}
    after = {_question(sample): sample for sample in samples if sample.step == last > first}
    return [Pair(before.get(question), after.get(question)) for question in before | after]


def pick(pairs: Sequence[Pair], limit: int) -> list[Pair]:
    """At most `limit` pairs to show: the improved ones first, and wrong answers in proportion, at least one.

    A choice of successes alone would let a poor model look perfect.
    """
    wrong = [pair for pair in pairs if pair.wrong_after]
    fair = min(len(wrong), max(1, round(limit * len(wrong) / len(pairs)))) if wrong else 0
    rest = sorted((pair for pair in pairs if not pair.wrong_after), key=lambda pair: not pair.improved)
    good = rest[: max(0, limit - fair)]
    return good + wrong[: limit - len(good)]


def _question(sample: Sample) -> tuple[str, str, str]:
    return sample.task, sample.prompt, sample.expected


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
