"""What the files of a run contain, and an index: a cache of the files that have not changed since they were read.

The index is one JSON file for each folder of runs, in whet's cache. Deleting it costs the next list some time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from whet.checkpoint.directory import lower_is_better
from whet.core.costs import counted_device_hours
from whet.core.errors import WhetError, first_line
from whet.core.files import atomic_write, cache_dir, hash_json
from whet.core.json_lines import parse_json_line
from whet.core.run_folder import Owner, read_owner, read_status
from whet.core.yaml import parse_yaml
from whet.report.formatting import finite_number

_INDEX_VERSION = 3  # raise it when facts have other fields or another meaning
_FILES = ("config.yaml", "slurm/recipe.yaml", "status.json", "metrics.jsonl", "lock", "usage.json")
_SETTLED_S = 2.0  # a file that changed a moment ago may change again without a new time
_SECTION = re.compile(r"^(?:run|eval):\n((?:[ \t#-].*\n|\n)*)", re.MULTILINE)
_PLAIN_VALUE = re.compile(r"^  (project|best): ([A-Za-z][\w./-]*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is read from the files of a run."""

    status: dict[str, Any]
    """The content of status.json; empty without one."""
    is_readable: bool
    """False: the run of a newer whet."""
    owner: Owner | None
    project: str | None
    best_metric: str
    """eval.best: what the run is judged by."""
    step: int | None
    loss: float | None
    tokens_per_s: float | None
    best: float | None
    longest_gap_s: float
    tags: tuple[str, ...]
    tokens: int | None
    device_hours: float | None
    """Of all devices and starts together; None for runs of earlier versions."""
    problems: tuple[str, ...]
    """What cannot be read, with the remedy."""

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> RunFacts:
        owner = record["owner"]
        texts = {name: tuple(record[name]) for name in ("tags", "problems")}
        return cls(**record | {"owner": owner and Owner(**owner)} | texts)


def read_facts(folder: Path, only_end: bool = False) -> RunFacts:
    """Read a run's files; of a long metrics.jsonl `only_end`, so that `best` is not known. Damage is one of the
    problems, never an error."""
    problems = [
        f"{folder / name}: this is not a file. Remove it, or bring the file back from a copy"
        for name in _FILES
        if os.path.exists(f"{folder}/{name}") and not os.path.isfile(f"{folder}/{name}")  # noqa: PTH110, PTH113
    ]
    if problems:  # a pipe, for one, would block whoever reads it
        return RunFacts({}, False, None, None, "val_loss", None, None, None, None, 0.0, (), None, None, tuple(problems))
    status: dict[str, Any] = {}
    is_readable = True
    try:
        status = read_status(folder)
        if not status and (folder / "status.json").exists():
            problems.append(f"{folder / 'status.json'}: damaged; `whet runs resume` writes it again")
    except WhetError as error:
        is_readable = False
        problems.append(str(error))
    settings = _read_settings(folder, problems)
    metric = settings.get("best", "val_loss")
    tail = MetricsTail.read(folder / "metrics.jsonl", only_end) if is_readable else MetricsTail(b"")
    return RunFacts(
        status=status,
        is_readable=is_readable,
        owner=read_owner(folder),
        project=settings.get("project"),
        best_metric=metric,
        step=tail.step,
        loss=tail.loss,
        tokens_per_s=tail.tokens_per_s,
        best=tail.best(metric, lower_is_better(metric)),
        longest_gap_s=tail.longest_gap_s() if status.get("state") == "running" else 0.0,
        tags=tuple(settings.get("tags", ())),
        tokens=tail.tokens,
        device_hours=counted_device_hours(folder),
        problems=tuple(problems),
    )


def read_all_facts(folders: Sequence[Path], root: Path | None, seconds: float | None = None) -> list[RunFacts]:
    """The facts of many runs; with `root`, those of unchanged files from its index. After so many `seconds`, of long
    metrics.jsonl the ends alone are read: a first look does not wait for gigabytes on a slow disk."""
    if root is None:
        return [read_facts(folder) for folder in folders]
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    file = cache_dir() / "runs" / f"{hash_json(os.path.realpath(root))[:20]}.json"
    known, kept, facts = _read_index(file), dict[str, Any](), list[RunFacts]()
    for folder in folders:
        key, signature = str(folder.relative_to(root)), _signature(folder)
        entry = known.get(key)
        if entry is not None and entry["signature"] == signature:
            facts.append(RunFacts.from_json(entry["facts"]))
            kept[key] = entry
            continue
        is_late = time.monotonic() > deadline
        facts.append(read_facts(folder, only_end=is_late))
        if not is_late and max((changed for _, changed, _ in signature), default=0) < (time.time() - _SETTLED_S) * 1e9:
            kept[key] = {"signature": signature, "facts": asdict(facts[-1])}
    if kept != known:
        with contextlib.suppress(OSError, ValueError):  # without an index, the next list reads the files again
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(file, json.dumps({"version": _INDEX_VERSION, "runs": kept}))
    return facts


def _read_index(file: Path) -> dict[str, Any]:
    try:
        index = json.loads(file.read_bytes())
        if index["version"] != _INDEX_VERSION:
            return {}
        for entry in index["runs"].values():
            entry["signature"] = [tuple(each) for each in entry["signature"]]
            RunFacts.from_json(entry["facts"])
        return dict(index["runs"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _signature(folder: Path) -> list[tuple[str, int, int]]:
    """Name, time and size of the files that facts come from."""
    found = []
    for name in _FILES:
        with contextlib.suppress(OSError):
            stat = os.stat(f"{folder}/{name}")  # noqa: PTH116 - a Path for each of five thousand files takes longer
            found.append((name, stat.st_mtime_ns, stat.st_size))
    return found


def _read_settings(folder: Path, problems: list[str]) -> dict[str, Any]:
    """run.project, run.tags and eval.best, without parsing the whole of config.yaml, which takes 10 ms."""
    file = folder / "config.yaml"
    if not file.exists() and (folder / "slurm" / "recipe.yaml").exists():
        file = folder / "slurm" / "recipe.yaml"
    try:
        text = file.read_text()
    except FileNotFoundError:
        if (folder / "status.json").exists() or (folder / "checkpoints").exists():
            problems.append(f"{file}: missing, so this run is incomplete. Restore it from a copy, or delete the folder")
        return {}
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{file}: cannot be read ({first_line(error)}). Bring it back from a copy")
        return {}
    found: dict[str, Any] = {}
    for block in _SECTION.findall(text):
        plain = {key: value for key, value in _PLAIN_VALUE.findall(block) if value not in ("null", "true", "false")}
        is_plain = all(f"\n  {key}:" not in f"\n{block}" or key in plain for key in ("project", "best"))
        is_plain = is_plain and ("\n  tags:" not in f"\n{block}" or "\n  tags: []\n" in f"\n{block}")
        found |= plain if is_plain else _parse_section(block, file, problems)
    return found


def _parse_section(block: str, file: Path, problems: list[str]) -> dict[str, Any]:
    try:
        values = parse_yaml(block, str(file), numbered=False, expand="none").plain()
    except WhetError as error:
        problems.append(f"{error}. Bring it back from a copy")
        return {}
    values = values if isinstance(values, dict) else {}
    tags = values.get("tags")
    found: dict[str, Any] = {key: values[key] for key in ("project", "best") if isinstance(values.get(key), str)}
    return found | ({"tags": [str(tag) for tag in tags]} if isinstance(tags, list) else {})


# The newest and the best numbers in metrics.jsonl, without parsing all of its lines: a list has a thousand runs.

_NUMBER = re.compile(rb": (-?\d+\.?\d*(?:[eE][-+]?\d+)?)[,}]")
_END_BYTES = 2**16


@dataclass
class MetricsTail:
    """Where a run stands. Lines that cannot be read are left out; `whet runs show` names them."""

    content: bytes
    is_whole: bool = True
    """False: these are the last lines, without the best values of earlier ones."""

    @classmethod
    def read(cls, file: Path, only_end: bool = False) -> MetricsTail:
        """Of a file that may be missing; `only_end`: its last 64 KiB, however long it is."""
        try:
            with file.open("rb") as opened:
                size = os.fstat(opened.fileno()).st_size
                start = max(0, size - _END_BYTES) if only_end else 0
                opened.seek(start)
                return cls(opened.read(), start == 0)
        except OSError:
            return cls(b"")

    @cached_property
    def last_step(self) -> dict[str, Any]:
        """The line of the last step; empty before the first."""
        is_step = (line for line in self._from_the_end() if "loss" in line and isinstance(line.get("step"), int))
        return next(is_step, {})

    @property
    def step(self) -> int | None:
        return self.last_step.get("step")

    @property
    def loss(self) -> float | None:
        return finite_number(self.last_step.get("loss"))

    @property
    def tokens_per_s(self) -> float | None:
        return finite_number(self.last_step.get("tokens_per_s"))

    @property
    def tokens(self) -> int | None:
        """All that were trained on so far."""
        tokens = self.last_step.get("tokens")
        return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) else None

    def best(self, metric: str, lower_is_better: bool) -> float | None:
        """The best value of a metric in all lines; None if not all were read."""
        if not self.is_whole:
            return None
        key, values, place = json.dumps(metric, ensure_ascii=False).encode("utf-8", "surrogatepass"), list[float](), -1
        while (place := self.content.find(key, place + 1)) >= 0:  # ten times as fast as a pattern over all lines
            found = _NUMBER.match(self.content, place + len(key))
            value = None if found is None else finite_number(float(found[1]))
            values += [] if value is None else [value]
        return (min if lower_is_better else max)(values, default=None)

    def longest_gap_s(self) -> float:
        """The longest time between two of the last hundred lines: evaluations and slow steps are in it."""
        lines = islice(self._from_the_end(), 100)
        times = [moment for line in lines if (moment := finite_number(line.get("time"))) is not None]
        return max((later - earlier for later, earlier in pairwise(times)), default=0.0)

    def _from_the_end(self) -> Iterator[dict[str, Any]]:
        end = self.content.rfind(b"\n") + 1
        while end > 0:
            start = self.content.rfind(b"\n", 0, end - 1) + 1
            line = parse_json_line(self.content[start:end])
            if line is not None:
                yield line
            end = start
