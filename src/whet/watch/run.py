"""A run, read from the files in its directory. Any file but `config.yaml` may be missing or still growing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from whet.core.errors import WhetError
from whet.core.files import read_json, read_json_lines
from whet.core.yaml import read_yaml
from whet.watch.ledger import Source
from whet.watch.readable import measured
from whet.watch.samples import Pair, Sample, pair_up

Series = list[tuple[int, float | None]]
"""A metric by step; None where the step was logged without a number, for example because the loss was not finite."""


@dataclass(frozen=True)
class Status:
    """How far the run is, from `status.json`."""

    state: str
    step: int | None
    steps: int | None
    host: str | None
    heartbeat: float | None
    exit_code: int | None
    started: float | None

    @classmethod
    def read(cls, record: dict[str, Any]) -> Status:
        """The status from its file's content."""
        return cls(
            state=str(record.get("state") or "unknown"),
            step=_whole(record.get("step")),
            steps=_whole(record.get("steps")),
            host=record.get("host"),
            heartbeat=measured(record.get("heartbeat")),
            exit_code=_whole(record.get("exit_code")),
            started=measured(record.get("started")),
        )


@dataclass(frozen=True)
class Score:
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
    status: Status
    plan: dict[str, Any]
    sources: tuple[Source, ...]
    metrics: tuple[dict[str, Any], ...]
    samples: tuple[Sample, ...]
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
        return cls(
            folder=folder,
            config=read_yaml(config).plain(),
            config_text=config.read_text(),
            status=Status.read(_object(folder / "status.json")),
            plan=_object(folder / "plan.json"),
            sources=tuple(Source.read(record) for record in _object(folder / "ledger.json").get("sources") or ()),
            metrics=tuple(line for line in _lines(folder / "metrics.jsonl") if _whole(line.get("step")) is not None),
            samples=tuple(Sample.read(line) for line in _lines(folder / "samples.jsonl")),
            events=tuple(_lines(folder / "events.jsonl")),
            certificates=tuple(
                _object(path) | {"kind": path.parent.name} for path in sorted(folder.glob("exports/*/certificate.json"))
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
        return [(line["step"], measured(line.get(key))) for line in self.step_lines]

    def points(self, key: str) -> list[tuple[int, float]]:
        """The metric `key` by step, where it was measured."""
        values = ((line["step"], measured(line.get(key))) for line in self.metrics)
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
    def results(self) -> list[Score]:
        """Before and after, for each task. An evaluation after a step of this run does not count as before."""
        results = []
        for task, points in self.scores.items():
            before = next((score for step, score in points if step == self.first), None)
            later = ((step, score) for step, score in reversed(points) if step > self.first)
            after_step, after = next(later, (None, None))
            results.append(Score(task, before, after, after_step))
        return results

    @cached_property
    def pairs(self) -> list[Pair]:
        """Samples before and after, paired by prompt."""
        return pair_up(self.samples, self.first)

    @property
    def first(self) -> int:
        """The steps that the run took for done when it began (train.start_step): what is measured there is `before`."""
        return _whole(self.setting("train", "start_step")) or 0

    @property
    def step(self) -> int | None:
        """Finished steps."""
        return self.step_lines[-1]["step"] if self.step_lines else self.status.step

    @property
    def steps(self) -> int | None:
        """Steps the run is going to have."""
        return self.status.steps or _whole(self.plan.get("steps"))

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


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise WhetError(f"{path}: should hold a JSON object. The file was damaged or edited by hand.")
    return value


def _lines(path: Path) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(path) if isinstance(line, dict)]
