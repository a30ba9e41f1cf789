"""A run as its folder describes it: config, status, plan, ledger, metrics, samples, events and certificates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from whet.core.errors import WhetError
from whet.core.files import read_json, read_json_lines
from whet.core.run_folder import check_run_format
from whet.core.yaml import read_yaml
from whet.report.formatting import finite_number

# What became of every conversation, as `ledger.json` tells it.


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """One source of conversations: how many went in, how many were kept, and why the others were not."""

    name: str
    use: str
    given: float | None
    kept: float | None
    dropped: float | None
    truncated: float | None
    split: float | None
    duplicates: float | None
    kept_with: dict[str, float | None]
    """What is to be known about conversations that were kept."""
    reasons: dict[str, float | None]
    first: dict[str, list[str]]
    tokens: float | None
    supervised_tokens: float | None
    eos_supervised: float | None

    @classmethod
    def read(cls, record: dict[str, Any]) -> SourceCounts:
        """A source from its entry in `ledger.json`."""
        conversations = record.get("conversations") or {}
        return cls(
            name=str(record.get("source", "")),
            use=str(record.get("use", "")),
            given=finite_number(conversations.get("in")),
            kept=finite_number(conversations.get("kept")),
            dropped=finite_number(conversations.get("dropped")),
            truncated=finite_number(conversations.get("truncated")),
            split=finite_number(conversations.get("split")),
            duplicates=finite_number(record.get("duplicates")),
            kept_with={str(note): finite_number(n) for note, n in (record.get("notes") or {}).items()},
            reasons={str(reason): finite_number(n) for reason, n in (record.get("reasons") or {}).items()},
            first={
                str(reason): [str(place) for place in places] for reason, places in (record.get("first") or {}).items()
            },
            tokens=finite_number(record.get("tokens")),
            supervised_tokens=finite_number(record.get("supervised_tokens")),
            eos_supervised=finite_number(record.get("eos_supervised")),
        )

    @property
    def notes(self) -> dict[str, float | None]:
        """How many conversations were dropped for each reason, and how many were cut, split or are copies."""
        others = {"truncated": self.truncated, "split": self.split, "duplicate": self.duplicates, **self.kept_with}
        return {reason: number for reason, number in others.items() if number} | self.reasons

    @property
    def unaccounted(self) -> float | None:
        """Conversations that are neither kept nor dropped: 0 in a sound ledger, None if it lacks a count."""
        if self.given is None or self.kept is None or self.dropped is None:
            return None
        return self.given - self.kept - self.dropped


# What the model answered to the same prompt before and after training.


@dataclass(frozen=True, slots=True)
class LoggedSample:
    """One answer of the model, after `step` steps. `right` is None if nobody judged."""

    step: int
    task: str
    prompt: str
    expected: str
    answer: str
    right: bool | None

    @classmethod
    def read(cls, record: dict[str, Any]) -> LoggedSample:
        """A sample from a line of `samples.jsonl`."""
        right = record.get("right")
        return cls(
            step=int(record.get("step") or 0),
            task=_as_text(record.get("task")),
            prompt=_as_text(record.get("prompt")),
            expected=_as_text(record.get("expected")),
            answer=_as_text(record.get("answer")),
            right=right if isinstance(right, bool) else None,
        )


@dataclass(frozen=True, slots=True)
class SamplePair:
    """One prompt with the answers before training and at the last evaluation; None where the model was not asked."""

    before: LoggedSample | None
    after: LoggedSample | None

    @property
    def sample(self) -> LoggedSample:
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


def pair_samples(samples: Iterable[LoggedSample], first: int = 0) -> list[SamplePair]:
    """One pair for each prompt, in the order in which the prompts were first asked; `first` is where the run began."""
    samples = list(samples)
    last = max((sample.step for sample in samples), default=first)
    before = {_sample_key(sample): sample for sample in samples if sample.step == first}
    after = {_sample_key(sample): sample for sample in samples if sample.step == last > first}
    return [SamplePair(before.get(question), after.get(question)) for question in before | after]


def select_pairs(pairs: Sequence[SamplePair], limit: int) -> list[SamplePair]:
    """At most `limit` pairs to show: the improved ones first, and wrong answers in proportion, at least one.

    A choice of successes alone would let a poor model look perfect.
    """
    wrong = [pair for pair in pairs if pair.wrong_after]
    fair = min(len(wrong), max(1, round(limit * len(wrong) / len(pairs)))) if wrong else 0
    rest = sorted((pair for pair in pairs if not pair.wrong_after), key=lambda pair: not pair.improved)
    good = rest[: max(0, limit - fair)]
    return good + wrong[: limit - len(good)]


def _sample_key(sample: LoggedSample) -> tuple[str, str, str]:
    return sample.task, sample.prompt, sample.expected


def _as_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# A run, read from the files in its directory. Any file but `config.yaml` may be missing or still growing.

Series = list[tuple[int, float | None]]
"""A metric by step; None where the step was logged without a number, for example because the loss was not finite."""


@dataclass(frozen=True)
class RunStatus:
    """How far the run is, from `status.json`."""

    state: str
    step: int | None
    steps: int | None
    host: str | None
    heartbeat: float | None
    exit_code: int | None
    started: float | None

    @classmethod
    def read(cls, record: dict[str, Any]) -> RunStatus:
        """The status from its file's content."""
        return cls(
            state=str(record.get("state") or "unknown"),
            step=_int_or_none(record.get("step")),
            steps=_int_or_none(record.get("steps")),
            host=record.get("host"),
            heartbeat=finite_number(record.get("heartbeat")),
            exit_code=_int_or_none(record.get("exit_code")),
            started=finite_number(record.get("started")),
        )


@dataclass(frozen=True)
class TaskScore:
    """A task's share of right answers: of the base model, and at the last evaluation since."""

    task: str
    before: float | None
    after: float | None
    after_step: int | None


@dataclass(frozen=True)
class RunView:
    """Everything a run directory says, without the code that wrote it."""

    folder: Path
    config: dict[str, Any]
    config_text: str
    status: RunStatus
    plan: dict[str, Any]
    sources: tuple[SourceCounts, ...]
    metrics: tuple[dict[str, Any], ...]
    samples: tuple[LoggedSample, ...]
    events: tuple[dict[str, Any], ...]
    certificates: tuple[dict[str, Any], ...]

    @classmethod
    def read(cls, folder: str | Path) -> RunView:
        """The run in `folder`; a WhetError if there is none."""
        folder = Path(folder)
        config = folder / "config.yaml"
        if not config.is_file():
            problem = "there is no config.yaml in it" if folder.is_dir() else "there is no such folder"
            raise WhetError(
                f"{folder}: not a run: {problem}. Give the folder of a run, for example runs/NAME; "
                "`whet train CONFIG` and `whet demo` make one."
            )
        check_run_format(folder)
        return cls(
            folder=folder,
            config=read_yaml(config).plain(),
            config_text=config.read_text(),
            status=RunStatus.read(_read_object(folder / "status.json")),
            plan=_read_object(folder / "plan.json"),
            sources=tuple(
                SourceCounts.read(record) for record in _read_object(folder / "ledger.json").get("sources") or ()
            ),
            metrics=tuple(
                line for line in _read_lines(folder / "metrics.jsonl") if _int_or_none(line.get("step")) is not None
            ),
            samples=tuple(LoggedSample.read(line) for line in _read_lines(folder / "samples.jsonl")),
            events=tuple(_read_lines(folder / "events.jsonl")),
            certificates=tuple(
                _read_object(path) | {"kind": path.parent.name}
                for path in sorted(folder.glob("exports/*/certificate.json"))
            ),
        )

    @property
    def name(self) -> str:
        return str(self.setting("run", "name") or self.folder.resolve().name)

    def setting(self, *path: str) -> Any:
        """The value at `path` in the resolved config; None if it is not set."""
        value: Any = self.config
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @cached_property
    def step_lines(self) -> list[dict[str, Any]]:
        """The metrics of finished steps; the other lines are evaluations."""
        return [line for line in self.metrics if not line.keys().isdisjoint(("loss", "lr", "step_s"))]

    def series(self, key: str) -> Series:
        """The metric `key` of every finished step."""
        return [(line["step"], finite_number(line.get(key))) for line in self.step_lines]

    def points(self, key: str) -> list[tuple[int, float]]:
        """The metric `key` by step, where it was measured."""
        values = ((line["step"], finite_number(line.get(key))) for line in self.metrics)
        return [(step, value) for step, value in values if value is not None]

    @property
    def losses(self) -> list[tuple[int, float]]:
        return self.points("loss")

    @property
    def val_losses(self) -> list[tuple[int, float]]:
        return self.points("val_loss")

    @cached_property
    def validation(self) -> dict[str, tuple[float | None, float | None]]:
        """What was measured on held-out conversations, by the name of the metric: untrained, and at the end."""
        keys = dict.fromkeys(key for line in self.metrics for key in line if key.startswith("val_"))
        return {key: self._first_and_last(key) for key in keys}

    def _first_and_last(self, key: str) -> tuple[float | None, float | None]:
        points = self.points(key)
        before = next((value for step, value in points if step == self.first), None)
        return before, next((value for step, value in reversed(points) if step > self.first), None)

    @cached_property
    def scores(self) -> dict[str, list[tuple[int, float]]]:
        """The scores of each task, by step."""
        keys = dict.fromkeys(key for line in self.metrics for key in line if key.startswith("task/"))
        return {key.removeprefix("task/"): self.points(key) for key in keys}

    @property
    def results(self) -> list[TaskScore]:
        """Before and after, for each task. An evaluation after a step of this run does not count as before."""
        results = []
        for task, points in self.scores.items():
            before = next((score for step, score in points if step == self.first), None)
            later = ((step, score) for step, score in reversed(points) if step > self.first)
            after_step, after = next(later, (None, None))
            results.append(TaskScore(task, before, after, after_step))
        return results

    @cached_property
    def pairs(self) -> list[SamplePair]:
        """Samples before and after, paired by prompt."""
        return pair_samples(self.samples, self.first)

    @property
    def first(self) -> int:
        """The steps that the run took for done when it began (train.start_step): what is measured there is `before`."""
        return _int_or_none(self.setting("train", "start_step")) or 0

    @property
    def step(self) -> int | None:
        """Finished steps."""
        return self.step_lines[-1]["step"] if self.step_lines else self.status.step

    @property
    def steps(self) -> int | None:
        """Steps the run is going to have."""
        return self.status.steps or _int_or_none(self.plan.get("steps"))

    @property
    def train_seconds(self) -> float | None:
        """Time spent in steps; None if a step was not timed, because the sum would be too small."""
        times = self.series("step_s")
        known = [seconds for _, seconds in times if seconds is not None]
        return sum(known) if known and len(known) == len(times) else None

    @property
    def tokens(self) -> float | None:
        """Tokens trained on so far, supervised or not."""
        return self._latest("tokens")

    @property
    def supervised_tokens(self) -> float | None:
        return self._latest("supervised_tokens")

    @property
    def conversations(self) -> float | None:
        return self._latest("conversations")

    @property
    def flops(self) -> float | None:
        return self._latest("flops")

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens over the time spent in steps, slow first steps included. Those of steps that were taken for done are
        counted in the first line, which is left out then."""
        if self.tokens is None or not self.train_seconds:
            return None
        if not self.first:
            return self.tokens / self.train_seconds
        tokens, times = self.points("tokens"), self.points("step_s")
        rest = self.train_seconds - times[0][1]
        return (tokens[-1][1] - tokens[0][1]) / rest if len(tokens) > 1 and rest > 0 else None

    @property
    def peak_gib(self) -> float | None:
        return max((gib for _, gib in self.points("peak_gib")), default=None)

    def _latest(self, key: str) -> float | None:
        points = self.points(key)
        return points[-1][1] if points else None


def _int_or_none(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise WhetError(f"{path}: should hold a JSON object. The file was damaged or edited by hand.")
    return value


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(path) if isinstance(line, dict)]
