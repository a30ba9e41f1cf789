"""The run folder: its lock, its status file and how the run ended. No torch.

`status.json` carries the version of the folder's layout as `format`. Folders written before the key existed have
version 1; a version newer than `RUN_FORMAT` is refused. It also carries a hash of itself. A damaged one counts as
missing: checkpoints do not depend on it, and it is written again when the run continues.
"""

from __future__ import annotations

import contextlib
import datetime
import difflib
import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import whet
from whet.core import launch_env
from whet.core.checksums import read_hashed_json, write_hashed_json
from whet.core.console import info, warn
from whet.core.display import mask_secrets
from whet.core.errors import WhetError, os_error
from whet.core.files import (
    atomic_write,
    clear_leftovers,
    delete_atomically,
    delete_path,
    hash_json,
    is_open_at,
    move_aside,
)
from whet.core.heartbeat import PHASE, format_age
from whet.core.signals import holds_open, identify_process, machine_id

RUN_FORMAT = 1
"""The version of the run folder that this code writes, and the newest that it reads."""

VARIABLES_FILE = "variables.json"
"""Hashes of the settings that come from environment variables; see run/resume.py."""

CHECK_FILE = "check.json"
"""What `whet check RUN` found."""

SUPERVISOR_VARIABLE = "WHET_LAUNCH_PID"
"""Environment variable with the identity of the `whet launch` that restarts this process."""

_FILES = (
    "config.yaml", "status.json", VARIABLES_FILE, "ledger.json", "ledger.jsonl", "plan.json", "effect.json",
    "checkpoints/latest", "checkpoints/best", "report.html",
)  # fmt: skip
_FOLDERS = ("checkpoints", "logs", "plan")
"""What a run writes, some of it at its end alone."""

_HEARTBEAT_INTERVAL_S = 5.0


class RunFolder:
    """A run folder owned by this process."""

    def __init__(self, path: Path) -> None:
        """Create the folder if needed and lock it. Raises a WhetError that names the owner, or why it is unusable."""
        check_run_format(path)  # before anything is written
        self.path = path
        self._lock_is_new = not (path / "lock").exists()
        self._made = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            if self.holds_run():
                _require_kinds(path)
            self._lock = FolderLock(path)
            self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)  # while it is open, its inode is not reused
        except OSError as error:
            raise os_error(error, "opening the run folder", path) or WhetError(
                f"run.dir: {path} cannot be used as a folder: {error.strerror}. Give another one: run.dir=FOLDER"
            ) from None
        self._was_empty, self._held_run = not self._entries(), self.holds_run()
        if self._was_empty or self._held_run:
            for folder in (path, *(entry for entry in path.iterdir() if entry.is_dir())):
                clear_leftovers(folder)
        status = read_status(path)
        if not status and (path / "status.json").exists():
            warn(f"{path / 'status.json'}: damaged, so how this run ended is unknown. Checkpoints do not depend on it")
        self._started = status.get("started") or time.time()
        self._heartbeat = 0.0
        self._step, self._steps = status.get("step") or 0, status.get("steps") or 0
        self.step_offset: int = status.get("step_offset") or 0
        """train.step_offset: `step` and `steps` in status.json count from there."""
        self.first_step: dict[str, float] | None = None
        """Seconds from the start of this process to the end of its first step, and their parts; None before it."""

    def holds_run(self) -> bool:
        """Whether a run was started here before."""
        return (self.path / "config.yaml").exists()

    def require_empty(self) -> None:
        """Refuse a folder that holds files other than a run's."""
        others = self._entries()
        if others:
            raise WhetError(
                f"run.dir: {self.path} holds files that do not belong to a run ({', '.join(others[:3])}). Give an "
                "empty or new folder: run.dir=FOLDER"
            )

    def _entries(self) -> list[str]:
        return sorted(entry.name for entry in self.path.iterdir() if not _is_of_killed_start(entry))

    def _is_gone(self) -> bool:
        opened = os.fstat(self._handle)
        try:
            found = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a file system that does not answer now may answer again
            return False
        return (opened.st_dev, opened.st_ino) != (found.st_dev, found.st_ino) or (
            self._held_run and not self.holds_run()
        )

    def gone_error(self) -> WhetError | None:
        """An error if someone deleted, moved or emptied the folder since this process opened it, or if they deleted its
        lock and another process has taken the folder since. A lock that is only deleted is made again."""
        if self._is_gone():
            return WhetError(
                f"{self.path}: the run folder was deleted or moved while the run was writing to it. If you moved it, "
                "continue it there: run.dir=FOLDER with --resume. If you deleted it, start the run again"
            )
        if not self._lock.is_in_place():
            try:
                lock = FolderLock(self.path)
            except WhetError as error:
                return WhetError(f"{self.path / 'lock'}: deleted while the run was writing to its folder. Now {error}")
            self._lock.release()
            self._lock = lock
        return None

    def require_present(self) -> None:
        """Raise if the folder is gone or another process has it: what is written from now on would be lost."""
        if error := self.gone_error():
            raise error

    def set_status(
        self, state: str, step: int, steps: int, exit_code: int | None = None, reason: str | None = None
    ) -> None:
        """Write status.json; `reason` tells why a run ended."""
        self.require_present()
        self._held_run = self._held_run or self.holds_run()
        self._heartbeat, self._step, self._steps = time.time(), step, steps
        write_hashed_json(
            self.path / "status.json",
            {
                "format": RUN_FORMAT, "state": state, "step": step, "steps": steps, "host": socket.gethostname(),
                "pid": os.getpid(), "job": launch_env.slurm_job(), "started": self._started,
                "heartbeat": self._heartbeat, "exit_code": exit_code, "reason": reason and mask_secrets(reason),
                "phase": PHASE.name, "first_step": self.first_step, "step_offset": self.step_offset,
            },
        )  # fmt: skip

    def heartbeat(self, step: int, steps: int) -> None:
        """Write the step and the time into status.json, at most once every five seconds."""
        self._step, self._steps = step, steps
        if time.time() - self._heartbeat > _HEARTBEAT_INTERVAL_S:
            self.set_status("running", step, steps)

    def set_ended(self, state: str, exit_code: int, reason: str | None = None, begun: bool = False) -> None:
        """Write how the run ended, if it had begun: `begun` where it had without reaching a step."""
        if self._heartbeat or begun:
            self.set_status(state, self._step, self._steps, exit_code, reason)

    def stop_requested(self) -> bool:
        """Whether someone put a file named `stop` into the folder."""
        return (self.path / "stop").exists()

    def abandon(self, keep: bool = False) -> None:
        """Release the folder after an error. A run with neither a finished step nor a checkpoint is deleted, unless
        `keep` leaves it to be resumed; files that were there before are never touched."""
        grown = (self.path / name for name in ("metrics.jsonl", "events.jsonl"))
        has_grown = any(file.exists() and file.stat().st_size for file in grown)
        has_grown = has_grown or any(self.path.glob("checkpoints/step-*"))
        if self._was_empty and not has_grown and not (keep and self.holds_run()):
            self.clear()
            (self.path / "lock").unlink(missing_ok=True)
            for folder in self._made:
                with contextlib.suppress(OSError):  # not empty: another run is in it
                    folder.rmdir()
        elif not self.holds_run() and self._lock_is_new:
            (self.path / "lock").unlink(missing_ok=True)
        self.close()

    def clear(self) -> None:
        """Delete everything but the lock, config.yaml last: after a kill, the rest is still a run, to be resumed or
        cleared."""
        for entry in sorted(self.path.iterdir(), key=lambda entry: entry.name == "config.yaml"):
            if entry.name != "lock":
                delete_atomically(entry)

    def close(self) -> None:
        delete_path(self.path / "stop")  # it was meant for this run, not for the next
        self.release()

    def release(self) -> None:
        """Give the folder up without changing anything in it."""
        os.close(self._handle)
        self._lock.release()


def _require_kinds(path: Path) -> None:
    """Refuse a run folder in which a folder has the name of a file that a run replaces, or a file that of a folder."""
    for name in _FILES:
        _require_no_folder(path / name)
    for name in _FOLDERS:
        place = path / name
        if os.path.lexists(place) and not place.is_dir():
            what = f"this link leads to {place.readlink()}, which is" if place.is_symlink() else "this is"
            raise WhetError(
                f"{place}: {what} no folder, and the run has files there. Bring it back (is its disk mounted?), then "
                "start again"
            )


def _require_no_folder(path: Path) -> None:
    if path.is_dir():
        raise WhetError(
            f"{path}: this is a folder, and a run writes a file of this name. Move it away, then start again"
        )


def move_run_aside(path: Path) -> None:
    """Rename the folder of an earlier run, if there is one; raises a WhetError if a process uses it."""
    if not (path / "config.yaml").exists():
        return
    if launch_env.world_size() > 1:
        raise WhetError("--fresh is for one process. For several: whet launch CONFIG --fresh")
    RunFolder(path).close()
    info(f"the earlier run is now in {move_aside(path)}")


def _is_of_killed_start(entry: Path) -> bool:
    """Whether `whet launch`, or a process that was killed before it wrote config.yaml, may have left this."""
    if entry.name == "checkpoints":  # earlier versions made it first
        return entry.is_dir() and not any(entry.iterdir())
    return entry.name in ("lock", "stop", "logs", "slurm", VARIABLES_FILE) or entry.name.startswith(
        (".config.yaml.", f".{VARIABLES_FILE}.")
    )


_STATUS_TYPES: dict[str, type | tuple[type, ...]] = {
    "state": str, "step": int, "steps": int, "started": (int, float), "heartbeat": (int, float),
    "exit_code": (int, type(None)), "reason": (str, type(None)), "host": str, "job": (int, type(None)),
}  # fmt: skip


def read_status(path: Path) -> dict[str, Any]:
    """The content of status.json; empty if the run has not written it yet, or if it is damaged. Raises a WhetError for
    the folder of a newer whet."""
    status = _read_status(path)
    _require_known_format(path, status)
    has_types = all(isinstance(status[key], known) for key, known in _STATUS_TYPES.items() if key in status)
    return status if has_types else {}


def _read_status(path: Path) -> dict[str, Any]:
    """The content of status.json; empty if it is missing or damaged."""
    try:
        return read_hashed_json(path / "status.json")
    except (OSError, WhetError):
        return {}


def check_run_format(path: Path) -> None:
    """Refuse the run folder of a newer whet, whose files this one would misread."""
    _require_known_format(path, _read_status(path))


def _require_known_format(path: Path, status: dict[str, Any]) -> None:
    version = status.get("format", 1)
    if not isinstance(version, int) or version > RUN_FORMAT:
        raise WhetError(
            f"{path}: this run folder has format {version!r} (in status.json), and whet {whet.__version__} reads "
            f"formats up to {RUN_FORMAT}. Use the whet that wrote it or a newer one: pip install --upgrade whet"
        )


_HASH_COMMENT = "# hash: "
"""The last line of config.yaml has the hash of those above."""


def write_config(path: Path, text: str, is_edited: bool = False) -> None:
    """Write config.yaml, with its hash; `is_edited`: with one that says that it is not what the run wrote."""
    digest = "edited" if is_edited else hash_json(text)
    atomic_write(path / "config.yaml", f"{text}{_HASH_COMMENT}{digest}\n")


def config_was_edited(path: Path) -> bool:
    """Whether config.yaml is not what the run wrote."""
    text, mark, digest = (path / "config.yaml").read_text(errors="replace").rpartition(_HASH_COMMENT)
    return bool(mark) and digest.strip() != hash_json(text)


def record_failure(path: Path, reason: str, exit_code: int, step: int = 0) -> None:
    """Set the status of a run to failed from a process that does not own the folder: its owner hangs or was killed."""
    record_end(path, "failed", reason, exit_code, step)


def record_end(path: Path, state: str, reason: str, exit_code: int, step: int = 0) -> None:
    """Write how a run ended, from a process that does not own its folder."""
    with contextlib.suppress(OSError, WhetError):
        status = read_status(path)
        if status:
            done = max(step, status.get("step", 0))
            end = {"state": state, "exit_code": exit_code, "reason": mask_secrets(reason), "step": done}
            write_hashed_json(path / "status.json", status | end)


def parse_run_reference(reference: str) -> tuple[Path, str]:
    """Split RUN@STEP into (RUN, STEP). Without a step, or where the whole names a run folder, STEP is `latest`."""
    path, at, step = reference.rpartition("@")
    if not at or (Path(reference) / "config.yaml").exists():
        return Path(reference), "latest"
    return Path(path), step or "latest"


class FolderLock:
    """Exclusive ownership of a folder while this process lives; the kernel releases it when the process dies."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        _require_no_folder(self._path)
        self._file = self._path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = _describe_owner(self._file.readline().strip())
            self._file.close()
            raise WhetError(
                f"{folder}: in use by {owner}{_describe_heartbeat(folder)}. Wait for it, stop it (touch "
                f"{folder / 'stop'}), or give this run another folder: run.dir=FOLDER"
            ) from None
        now = datetime.datetime.now(datetime.UTC)
        details = {
            "since": now.timestamp(), "machine": machine_id(),
            "supervisor": os.environ.get(SUPERVISOR_VARIABLE), "job": launch_env.slurm_job(),
        }  # fmt: skip
        self._file.truncate(0)
        moment = now.isoformat(timespec="seconds")
        self._file.write(f"{socket.gethostname()} pid {os.getpid()} since {moment}\n{json.dumps(details)}\n")
        self._file.flush()

    def is_in_place(self) -> bool:
        """Whether the file is still there: if someone deleted it, another process may lock the folder."""
        return is_open_at(self._file, self._path)

    def release(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that locked a folder last. It may have ended."""

    host: str
    pid: int
    since: float
    machine: str | None
    """None: written by an earlier version."""
    supervisor: str | None
    """The identity of the `whet launch` that would restart it."""
    job: int | None
    """Of Slurm."""

    @property
    def is_local(self) -> bool:
        """Whether its process id means something in this process."""
        return self.host == socket.gethostname() if self.machine is None else self.machine == machine_id()

    def live_supervisor(self) -> int | None:
        """The process id of that `whet launch`, if it is on this machine and has not ended."""
        pid = (self.supervisor or "").partition(":")[0]
        is_live = self.is_local and pid.isdecimal() and identify_process(int(pid)) == self.supervisor
        return int(pid) if is_live else None

    def is_alive(self, folder: Path) -> bool | None:
        """Whether it still owns the folder; None: it is on another machine."""
        return holds_open(self.pid, folder / "lock") if self.is_local else None


def read_owner(folder: Path) -> Owner | None:
    """The last owner of a folder; None if it had none, or if its lock file is damaged."""
    try:
        first, _, rest = (folder / "lock").read_text().partition("\n")
        name, _, moment = first.partition(" since ")
        host, _, pid = name.partition(" pid ")
        details = json.loads(rest) if rest.strip() else {}
        since = float(details.get("since") or datetime.datetime.fromisoformat(moment.strip()).timestamp())
        machine, supervisor, job = (details.get(key) for key in ("machine", "supervisor", "job"))
        return Owner(
            host, int(pid), since, machine, supervisor if isinstance(supervisor, str) else None,
            job if isinstance(job, int) else None,
        )  # fmt: skip
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _describe_owner(text: str) -> str:
    """The first line of a lock file, with the age of the lock."""
    name, since, moment = text.partition(" since ")
    try:
        began = datetime.datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return text or "another process"
    return f"{name}{since}{moment} ({format_age(time.time() - began)})"


def _describe_heartbeat(folder: Path) -> str:
    """When the owner, possibly on another machine, last wrote its status."""
    beat = _read_status(folder).get("heartbeat")
    return f"; its last heartbeat was {format_age(time.time() - beat)}" if isinstance(beat, int | float) else ""


def not_a_run(path: Path) -> WhetError:
    """The error for a path that should be a run and has no config.yaml."""
    hint = suggest_runs(path) or " `whet train CONFIG` and `whet demo` create one"
    if path.is_dir():
        what = "it has no config.yaml"
    else:
        what = "it is a file" if path.exists() else f"no such folder (in {Path.cwd()})"
    return WhetError(f"{path}: not a run: {what}. Give the folder of a run.{hint}")


def suggest_runs(path: Path) -> str:
    """For a path that is no run: if it does not exist, folders with similar names, or else the runs here, as a sentence
    after a space."""
    with contextlib.suppress(OSError):
        siblings = sorted(each.name for each in path.parent.iterdir() if each.is_dir())
        similar = difflib.get_close_matches(path.name.partition("@")[0], siblings, n=3, cutoff=0.5)
        if similar and not path.exists():
            return f" Did you mean {' or '.join(str(path.parent / name) for name in similar)}?"
    runs = sorted(Path("runs").glob("*/config.yaml"), key=lambda file: -file.stat().st_mtime)[:5]
    return f" Runs here: {', '.join(str(file.parent) for file in runs)}" if runs else ""
