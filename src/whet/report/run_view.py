"""A run read from its folder: config, status, plan, ledger, metrics, samples, events and certificates.

Every file except `config.yaml` may be missing, still growing or damaged. What cannot be read is left out, and `damage`
says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from whet.core.checksums import read_hashed_json
from whet.core.errors import WhetError
from whet.core.files import resolve_path
from whet.core.json_lines import describe_lines, read_json_lines
from whet.core.run_folder import CHECK_FILE, check_run_format, not_a_run, read_status
from whet.core.yaml import read_yaml
from whet.report.formatting import finite_number, int_or_none
from whet.report.samples import LoggedSample, SamplePair, as_text, pair_samples


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """The counts of one data source, from `ledger.json`."""

    name: str
    use: str
    total: float | None
    kept: float | None
    dropped: float | None
    truncated: float | None
    split: float | None
    duplicates: float | None
    kept_with: dict[str, float | None]
    """Notes about kept conversations and their number."""
    reasons: dict[str, float | None]
    """Reasons for dropped conversations and their number."""
    first: dict[str, list[str]]
    """The first places (file:line) of each reason or note."""
    tokens: float | None
    supervised_tokens: float | None
    eos_supervised: float | None

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> SourceCounts:
        """From an entry of `sources` in `ledger.json`."""
        conversations = as_dict(record.get("conversations"))
        return cls(
            name=str(record.get("source", "")),
            use=str(record.get("use", "")),
            total=finite_number(conversations.get("in")),
            kept=finite_number(conversations.get("kept")),
            dropped=finite_number(conversations.get("dropped")),
            truncated=finite_number(conversations.get("truncated")),
            split=finite_number(conversations.get("split")),
            duplicates=finite_number(record.get("duplicates")),
            kept_with={str(note): finite_number(n) for note, n in as_dict(record.get("notes")).items()},
            reasons={str(reason): finite_number(n) for reason, n in as_dict(record.get("reasons")).items()},
            first={
                str(reason): [str(place) for place in as_list(places)]
                for reason, places in as_dict(record.get("first")).items()
            },
            tokens=finite_number(record.get("tokens")),
            supervised_tokens=finite_number(record.get("supervised_tokens")),
            eos_supervised=finite_number(record.get("eos_supervised")),
        )

    @property
    def notes(self) -> dict[str, float | None]:
        """The number of conversations that were truncated, split, duplicates or noted, and dropped for each reason."""
        others = {"truncated": self.truncated, "split": self.split, "duplicate": self.duplicates, **self.kept_with}
        return {reason: number for reason, number in others.items() if number} | self.reasons

    @property
    def unaccounted(self) -> float | None:
        """Conversations neither kept nor dropped: 0 in a correct ledger; None if a count is missing."""
        if self.total is None or self.kept is None or self.dropped is None:
            return None
        return self.total - self.kept - self.dropped


Series = list[tuple[int, float | None]]
"""A metric by step; None where it was logged without a finite number."""


@dataclass(frozen=True)
class RunStatus:
    """The progress of the run, from `status.json`."""

    state: str
    step: int | None
    steps: int | None
    host: str | None
    heartbeat: float | None
    exit_code: int | None
    started: float | None

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> RunStatus:
        """From the content of `status.json`."""
        return cls(
            state=str(record.get("state") or "unknown"),
            step=int_or_none(record.get("step")),
            steps=int_or_none(record.get("steps")),
            host=as_text(record.get("host")) or None,
            heartbeat=finite_number(record.get("heartbeat")),
            exit_code=int_or_none(record.get("exit_code")),
            started=finite_number(record.get("started")),
        )


@dataclass(frozen=True)
class TaskScore:
    """The score of a task before training and at the last evaluation."""

    task: str
    before: float | None
    after: float | None
    after_step: int | None


@dataclass(frozen=True)
class RunView:
    """All files of a run folder, read without the code that wrote them."""

    folder: Path
    config: dict[str, Any]
    config_text: str
    status: RunStatus
    plan: dict[str, Any]
    sources: tuple[SourceCounts, ...]
    held_out: int
    """Conversations of the training sources that were held out for validation."""
    metrics: tuple[dict[str, Any], ...]
    samples: tuple[LoggedSample, ...]
    events: tuple[dict[str, Any], ...]
    certificates: tuple[dict[str, Any], ...]
    effect: dict[str, Any]
    """effect.json: what training changed."""
    checks: dict[str, tuple[str, str]]
    """check.json, which `whet check RUN` writes: (level, text) of each check, the worst if there are several."""
    damage: tuple[str, ...]
    """One sentence for each file that is damaged."""

    @classmethod
    def read(cls, folder: str | Path, metrics: Sequence[dict[str, Any]] | None = None) -> RunView:
        """The run in `folder`; a WhetError if there is none. `metrics`: the lines of metrics.jsonl that matter, if the
        caller has read it."""
        folder = Path(folder)
        config = folder / "config.yaml"
        if not config.is_file():
            raise not_a_run(folder)
        check_run_format(folder)
        damage = [f"{path.name}: kept by a resumed run that found damage" for path in sorted(folder.glob("damaged-*"))]
        status = read_status(folder)
        if not status and (folder / "status.json").exists():
            damage.append("status.json: damaged; how the run ended is unknown")
        ledger = _read_object(folder / "ledger.json", damage)
        return cls(
            folder=folder,
            config=read_yaml(config, expand="none").plain(),
            config_text=config.read_text(),
            status=RunStatus.from_json(status),
            plan=_read_object(folder / "plan.json", damage),
            sources=tuple(SourceCounts.from_json(as_dict(record)) for record in as_list(ledger.get("sources"))),
            held_out=_held_out(ledger),
            metrics=tuple(
                line
                for line in (_read_lines(folder / "metrics.jsonl", damage) if metrics is None else metrics)
                if int_or_none(line.get("step")) is not None
            ),
            samples=tuple(LoggedSample.from_json(line) for line in _read_lines(folder / "samples.jsonl", damage)),
            events=tuple(_checked_event(line) for line in _read_lines(folder / "events.jsonl", damage)),
            certificates=tuple(
                _read_object(path, damage) | {"kind": path.parent.name}
                for path in sorted(folder.glob("exports/*/certificate.json"))
            ),
            effect=_read_object(folder / "effect.json", damage),
            checks=_checks_by_name(_read_object(folder / CHECK_FILE, damage)),
            damage=tuple(damage),
        )

    @property
    def name(self) -> str:
        return str(self.setting("run", "name") or resolve_path(self.folder).name)

    def setting(self, *path: str) -> Any:
        """The value at `path` in the resolved configuration; None if it is not set."""
        value: Any = self.config
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @cached_property
    def step_lines(self) -> list[dict[str, Any]]:
        """The metrics of training steps; the other lines are evaluations."""
        return [line for line in self.metrics if not line.keys().isdisjoint(("loss", "lr", "step_s"))]

    def series(self, key: str) -> Series:
        """The metric `key` of every training step."""
        return [(line["step"], finite_number(line.get(key))) for line in self.step_lines]

    def points(self, key: str) -> list[tuple[int, float]]:
        """The metric `key` by step, where it has a value."""
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
        """The validation metrics by name: (before training, last)."""
        keys = dict.fromkeys(key for line in self.metrics for key in line if key.startswith("val_"))
        return {key: self._first_and_last(key) for key in keys}

    def _first_and_last(self, key: str) -> tuple[float | None, float | None]:
        points = self.points(key)
        before = next((value for step, value in points if step == self.start_step), None)
        return before, next((value for step, value in reversed(points) if step > self.start_step), None)

    @cached_property
    def scores(self) -> dict[str, list[tuple[int, float]]]:
        """The scores of each task, by step."""
        keys = dict.fromkeys(key for line in self.metrics for key in line if key.startswith("task/"))
        return {key.removeprefix("task/"): self.points(key) for key in keys}

    @property
    def task_scores(self) -> list[TaskScore]:
        """Each task before and after. Only an evaluation at the start step counts as before."""
        scores = []
        for task, points in self.scores.items():
            before = next((score for step, score in points if step == self.start_step), None)
            later = ((step, score) for step, score in reversed(points) if step > self.start_step)
            after_step, after = next(later, (None, None))
            scores.append(TaskScore(task, before, after, after_step))
        return scores

    @cached_property
    def pairs(self) -> list[SamplePair]:
        """The answers before and after, paired by prompt."""
        return pair_samples(self.samples, self.start_step)

    @property
    def start_step(self) -> int:
        """train.start_step: the step that the run started at; evaluations there count as `before`."""
        return int_or_none(self.plan.get("start_step", self.setting("train", "start_step"))) or 0

    @property
    def step(self) -> int | None:
        """Completed steps."""
        return self.step_lines[-1]["step"] if self.step_lines else self.status.step

    @property
    def steps(self) -> int | None:
        """Planned steps."""
        return self.status.steps or int_or_none(self.plan.get("steps"))

    @property
    def train_seconds(self) -> float | None:
        """The time spent in steps; None if a step has no time, because the sum would be too small."""
        times = self.series("step_s")
        known = [seconds for _, seconds in times if seconds is not None]
        return sum(known) if known and len(known) == len(times) else None

    @property
    def tokens(self) -> float | None:
        """Tokens trained on, supervised or not."""
        return self._latest("tokens")

    @property
    def supervised_tokens(self) -> float | None:
        return self._latest("supervised_tokens")

    @property
    def conversations(self) -> float | None:
        return self._latest("conversations")

    @cached_property
    def seen_note(self) -> str | None:
        """How many conversations of the training data were seen: `48 of 298`; None if it is not known."""
        kept = [source.kept for source in self.sources if source.use == "train"]
        known = [number for number in kept if number is not None]
        if not known or len(known) < len(kept):
            return None
        total, seen = sum(known) - self.held_out, self._seen()
        if seen is None or total <= 0:
            return None
        return f"{min(seen, total):,.0f} of {total:,.0f}"

    def _seen(self) -> float | None:
        """Different conversations in losses.bin. A run that an earlier version began has none of its first steps: as
        many as were trained on, unless an epoch repeats some."""
        import numpy as np

        try:
            content = (self.folder / "losses.bin").read_bytes()
        except OSError:
            content = b""
        records = np.frombuffer(content, dtype="<u4", count=len(content) // 16 * 4).reshape(-1, 4)
        if len(records) and records[0, 0] == self.start_step + 1:
            return len(np.unique(records[:, 1]))
        return self.conversations if (finite_number(self.plan.get("epochs")) or 0) <= 1 else None

    @property
    def flops(self) -> float | None:
        return self._latest("flops")

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of step time, slow first steps included. With a start step, the first line counts the
        tokens of skipped steps too and is left out."""
        if self.tokens is None or not self.train_seconds:
            return None
        if not self.start_step:
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


def _held_out(ledger: dict[str, Any]) -> int:
    """Held out of the training sources, which share a store with the validation then."""
    stores = as_dict(ledger.get("stores"))
    is_split = "train" in stores and stores.get("validation") == stores["train"]
    return (int_or_none(ledger.get("held_out")) or 0) if is_split else 0


def as_dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _checked_event(event: dict[str, Any]) -> dict[str, Any]:
    """A line of `events.jsonl` whose step is a number and whose conversations are objects."""
    conversations = [each for each in as_list(event.get("conversations")) if isinstance(each, dict)]
    return {**event, "step": finite_number(event.get("step")), "conversations": conversations}


def _read_object(path: Path, damage: list[str]) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none, which is appended to `damage` if the file is damaged."""
    if not path.is_file():
        return {}
    try:
        return read_hashed_json(path)
    except WhetError:
        damage.append(f"{path.name}: damaged")
        return {}


def _checks_by_name(record: dict[str, Any]) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for check in map(as_dict, as_list(record.get("checks"))):
        name = str(check.get("check"))
        if found.get(name, ("ok", ""))[0] != "fault":
            found[name] = (str(check.get("level")), str(check.get("text")))
    return found


def _read_lines(path: Path, damage: list[str]) -> list[dict[str, Any]]:
    records, unreadable = read_json_lines(path)
    if unreadable:
        damage.append(f"{path.name}: {describe_lines(unreadable)} cannot be read")
    return records
