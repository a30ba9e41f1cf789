"""The records of a run: metrics.jsonl, samples.jsonl and events.jsonl.

Nothing in them steers training. A checkpoint has the size and the hash of each, so that a resumed run can tell whether
their lines are still those that were written. What is not is reported, and kept beside the file; the run continues.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.core.console import warn
from whet.core.files import atomic_write, hash_bytes, hash_prefix, read_with_retries
from whet.core.json_lines import describe_lines, parse_json_line

RECORDS = ("metrics", "samples", "events")


def record_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.jsonl"


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first bytes of a record: all that it had after the checkpoint's step."""

    size: int = 0
    hash: str | None = None
    """None: unknown, in checkpoints from before it was kept."""

    @classmethod
    def from_state(cls, state: Mapping[str, Any], name: str) -> Prefix:
        """From the state in a checkpoint's manifest."""
        return cls(state.get(f"{name}_bytes", 0), state.get(f"{name}_hash"))


def restore_records(folder: Path, step: int, prefixes: Mapping[str, Prefix]) -> None:
    """Bring the records back to what they were after `step`: a resumed run repeats what came later. Events stay,
    because they have happened."""
    for name in RECORDS:
        _restore_record(record_file(folder, name), name, step, prefixes.get(name, Prefix()))


def _restore_record(file: Path, name: str, step: int, prefix: Prefix) -> None:
    since = f"since the checkpoint of step {step}"
    if os.path.lexists(file) and not file.is_file():
        away = _unused_name(file)
        file.rename(away)
        warn(f"{file}: this is not a file. It is kept as {away.name}, and the run continues with a new file")
    if not file.exists():
        if prefix.size:
            warn(f"{file}: deleted {since}; {prefix.size:,} bytes are lost. The run continues with a new file")
        return
    size, digest = read_with_retries(lambda: _measure(file, prefix.size), file)
    is_intact = digest == prefix.hash
    if is_intact and name != "events":
        if size > prefix.size:
            os.truncate(file, prefix.size)
        return
    kept, unreadable, misplaced = read_with_retries(lambda: _select_lines(file, name, step, prefix, is_intact), file)
    reasons = []
    if size < prefix.size:
        reasons.append(f"{prefix.size - size:,} of its {prefix.size:,} bytes are missing")
    if unreadable:
        reasons.append(f"{describe_lines(unreadable)} cannot be read")
    if not reasons and not is_intact and (prefix.hash is not None or misplaced):
        reasons.append("its lines are not those that were written (hash mismatch)")
    if reasons:
        beside = ""
        if unreadable or misplaced:
            away = _unused_name(file)
            shutil.copyfile(file, away)
            beside = f"The whole file is kept as {away.name}. "
        warn(f"{file}: changed {since}: {'; '.join(reasons)}. {beside}The run continues with the other lines")
    if len(kept) != size:
        atomic_write(file, kept)


def intact_lines(folder: Path, name: str, prefix: Prefix) -> list[dict[str, Any]]:
    """The lines that a record had at a checkpoint; none if they are damaged."""
    file = record_file(folder, name)
    content = file.read_bytes()[: prefix.size] if file.is_file() else b""
    lines = content.splitlines(keepends=True) if hash_bytes(content) == prefix.hash else []
    return [record for line in lines if (record := parse_json_line(line)) is not None]


def _measure(file: Path, size: int) -> tuple[int, str]:
    """The size of the file, and the hash of its first `size` bytes."""
    with file.open("rb") as opened:
        return os.fstat(opened.fileno()).st_size, hash_prefix(opened, size).hexdigest()


def _select_lines(
    file: Path, name: str, step: int, prefix: Prefix, is_intact: bool
) -> tuple[bytes, list[int], list[int]]:
    """The lines to keep, and the numbers of those in the prefix that cannot be read, or seem to be from after it.

    In a damaged file the end of the prefix may have moved, so lines are selected by their step.
    """
    kept, unreadable, misplaced, position = [], list[int](), list[int](), 0
    with file.open("rb") as opened:
        for number, line in enumerate(opened, 1):
            is_within, position = position < prefix.size, position + len(line)
            record = parse_json_line(line)
            is_wanted = record is not None and (name == "events" or _is_before(record, name, step))
            if is_wanted or (is_within and is_intact):
                kept.append(line)
            elif is_within or name == "events":
                (unreadable if record is None else misplaced).append(number)
    return b"".join(kept), unreadable, misplaced


def _is_before(record: dict[str, Any], name: str, step: int) -> bool:
    """Whether a line is from before the checkpoint of `step`, which is saved before it is evaluated."""
    at = record.get("step")
    if isinstance(at, bool) or not isinstance(at, int):
        return False
    return at < step or (at == step and name == "metrics" and "loss" in record)


def _unused_name(file: Path) -> Path:
    """damaged-metrics.jsonl, or with a number after the name: what was kept before stays."""
    names = (f"damaged-{file.stem}{f'-{n}' if n > 1 else ''}{file.suffix}" for n in itertools.count(1))
    return next(path for name in names if not os.path.lexists(path := file.with_name(name)))


def initial_evaluation(folder: Path, first: int) -> dict[str, Prefix]:
    """The lines about the model before its first step, which a restart need not evaluate again; empty without them, and
    if one cannot be read."""
    found: dict[str, bytes] = {}
    for name in ("metrics", "samples"):
        file, lines = record_file(folder, name), list[bytes]()
        for line in file.read_bytes().splitlines(keepends=True) if file.is_file() else ():
            record = parse_json_line(line)
            if record is None:
                return {}
            if record.get("step") != first:
                break
            lines.append(line)
        found[name] = b"".join(lines)
    has_scores = b'"task/' in found["metrics"]
    if not found["metrics"] or (has_scores and not found["samples"]):
        return {}
    return {name: Prefix(len(content), hash_bytes(content)) for name, content in found.items()}
