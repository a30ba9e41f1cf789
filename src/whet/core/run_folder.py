"""The run folder: its lock, its status and how the run ended."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from pydantic import Field

from whet.core.config import Section
from whet.core.errors import WhetError, disk_error
from whet.core.files import read_json, write_json
from whet.core.heartbeat import format_age

_HEARTBEAT_INTERVAL_S = 5.0


class RunConfig(Section):
    """The run itself."""

    name: str | None = Field(default=None, description="What to call it; the recipe's file name if absent.")
    dir: str | None = Field(default=None, description="Its folder; runs/NAME if absent.")
    seed: int = Field(default=0, ge=0, description="Decides data order, start values and dropout.")
    tags: list[str] = Field(default=[], description="Words to find it by.")


class FolderLock:
    """Exclusive ownership of a run folder while this process lives; the kernel frees it when the process dies."""

    def __init__(self, folder: Path) -> None:
        path = folder / "lock"
        self._file = path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = _describe_owner(self._file.read().strip())
            raise WhetError(
                f"{folder}: in use by {owner}{_describe_heartbeat(folder)}. Wait for it, stop it (touch {folder / 'stop'}), or "
                "give this run another folder: run.dir=FOLDER"
            ) from None
        self._file.truncate(0)
        self._file.write(f"{socket.gethostname()} pid {os.getpid()} since {_timestamp(time.time())}\n")
        self._file.flush()

    def release(self) -> None:
        self._file.close()


def _timestamp(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")


def _describe_owner(text: str) -> str:
    """The owner as the lock's file names it, with the age of its claim."""
    name, since, moment = text.partition(" since ")
    try:
        began = datetime.datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return text or "another process"
    return f"{name}{since}{moment} ({format_age(time.time() - began)})"


def _describe_heartbeat(folder: Path) -> str:
    """When the owner, who may be on a machine that cannot be asked, was last seen alive."""
    try:
        beat = float(json.loads((folder / "status.json").read_text())["heartbeat"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f"; its last heartbeat was {format_age(time.time() - beat)}"


class RunFolder:
    """A run directory owned by this process."""

    def __init__(self, path: Path) -> None:
        """Take the folder; an error says who has it or why it cannot be written."""
        self.path = path
        self._lock_is_new = not (path / "lock").exists()
        self._made = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(path)
        except OSError as error:
            raise disk_error(error, "opening the run folder", path) or WhetError(
                f"run.dir: {path} cannot be used as a folder: {error.strerror}. Give another one: run.dir=FOLDER"
            ) from None
        self._was_empty = not self._entries()
        status = read_status(path)
        self._started = status.get("started") or time.time()
        self._beat = 0.0
        self._step, self._steps = status.get("step") or 0, status.get("steps") or 0
        self.first_step: dict[str, float] | None = None
        """How long this process took to its first step, and on what; None before it."""

    def holds_run(self) -> bool:
        """Whether a run was started here before."""
        return (self.path / "config.yaml").exists()

    def require_empty(self) -> None:
        """Refuse a folder with files of someone else's in it."""
        others = self._entries()
        if others:
            raise WhetError(
                f"run.dir: {self.path} holds files that are not of a run ({', '.join(others[:3])}). "
                "Give an empty or new folder: run.dir=FOLDER"
            )

    def _entries(self) -> list[str]:
        return sorted(entry.name for entry in self.path.iterdir() if entry.name != "lock")

    def set_status(
        self, state: str, step: int, steps: int, exit_code: int | None = None, reason: str | None = None
    ) -> None:
        """Say where the run stands, for whoever watches it; of one that has ended, why."""
        self._beat, self._step, self._steps = time.time(), step, steps
        write_json(
            self.path / "status.json",
            {
                "state": state, "step": step, "steps": steps, "host": socket.gethostname(), "pid": os.getpid(),
                "started": self._started, "heartbeat": self._beat, "exit_code": exit_code,
                "reason": reason, "first_step": self.first_step,
            },
        )  # fmt: skip

    def heartbeat(self, step: int, steps: int) -> None:
        """A sign of life, every few seconds at most."""
        self._step, self._steps = step, steps
        if time.time() - self._beat > _HEARTBEAT_INTERVAL_S:
            self.set_status("running", step, steps)

    def set_ended(self, state: str, exit_code: int, reason: str | None = None, begun: bool = False) -> None:
        """Write into the status how a run ended that had begun; `begun`: it had, even if it came to no step."""
        if self._beat or begun:
            self.set_status(state, self._step, self._steps, exit_code, reason)

    def stop_requested(self) -> bool:
        """Whether someone put a file named `stop` into the folder."""
        return (self.path / "stop").exists()

    def abandon(self, keep: bool = False) -> None:
        """Let go after an error. A run that had not begun to learn leaves no trace, unless it `stays` to be continued;
        what was there before stays always."""
        grown = (self.path / name for name in ("metrics.jsonl", "events.jsonl"))
        has_grown = any(file.exists() and file.stat().st_size for file in grown)
        if self._was_empty and not has_grown and not (keep and self.holds_run()):
            for entry in self.path.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)
            for folder in self._made:
                with contextlib.suppress(OSError):  # not empty: another run lives beside it
                    folder.rmdir()
        elif not self.holds_run() and self._lock_is_new:
            (self.path / "lock").unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        (self.path / "stop").unlink(missing_ok=True)  # it was meant for this run, not for the next
        self._lock.release()


def read_status(path: Path) -> dict[str, Any]:
    """The last status of a run, empty if it never got so far."""
    file = path / "status.json"
    return dict(read_json(file)) if file.exists() else {}


def parse_run_reference(reference: str) -> tuple[Path, str]:
    """RUN@STEP as (RUN, STEP); without a step, or where the whole is a folder, the step is `latest`."""
    path, at, step = reference.rpartition("@")
    if not at or (Path(reference) / "config.yaml").exists():
        return Path(reference), "latest"
    return Path(path), step or "latest"


def record_failure(path: Path, reason: str, exit_code: int, step: int = 0) -> None:
    """Write into the status of a run that it failed, for a process that does not own the folder: the owner hangs, or
    was killed before it could."""
    with contextlib.suppress(OSError, WhetError):
        status = read_status(path)
        if status:
            status |= {"state": "failed", "exit_code": exit_code, "reason": reason, "step": max(step, status["step"])}
            write_json(path / "status.json", status)
