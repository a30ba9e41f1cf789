"""Stop, cancel, rename and delete runs, from any shell: through their folder, their process, or Slurm."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from whet.core.display import escape_controls
from whet.core.errors import ExitCode, WhetError, os_error
from whet.core.files import atomic_write, delete_atomically
from whet.core.run_folder import FolderLock, config_was_edited, read_owner, record_end, write_config
from whet.core.signals import ignores_signal, is_alive, process_tree
from whet.core.yaml import dump_yaml, read_yaml
from whet.launch.slurm_commands import SlurmUnavailableError, run_slurm
from whet.runs.slurm_states import COMMAND_S
from whet.runs.summary import RunSummary, summarize_run_folder

_POLL_S = 0.5
_END_S = 30.0
"""How long a cancelled process may take to write down that it ended."""
_JOB_END_S = 120.0
"""How long Slurm may take to end a job; its KillWait is 30 s by default."""


def stop_run(run: RunSummary, on_wait: Callable[[str], None]) -> RunSummary:
    """Let a run save a checkpoint and end, and wait for it. `on_wait` is called with what it waits for.

    Any machine that shares the folder can do this. Jobs that are still queued are removed: nothing has to be saved, and
    the next of a chain would continue the run.
    """
    if run.state.name not in ("unreachable", "stalled") and not run.state.is_active:
        raise WhetError(f"{run.folder}: not running ({run.state.name}), so there is nothing to stop")
    queued = [job.number for job in run.active_jobs if job.is_queued]
    if queued:
        _scancel(run, *map(str, queued))
    if run.state.name != "queued":
        _request_stop(run.folder)
        if run.state.name == "starting" and (target := _local_process(run)) is not None:
            _send_signal(target, signal.SIGTERM, run.folder)  # the file is read with each step: there is none yet
        on_wait(_describe_request(run))
    while (run := summarize_run_folder(run.folder)).state.name in ("queued", "starting", "running", "stopping"):
        time.sleep(_POLL_S)
    if not run.state.is_active and run.state.name != "unreachable":
        (run.folder / "stop").unlink(missing_ok=True)  # a process that was killed meanwhile has left it
    return run


def _request_stop(folder: Path) -> None:
    try:
        (folder / "stop").touch()
    except OSError as error:
        raise os_error(error, "requesting a stop", folder / "stop") or WhetError(
            f"{folder / 'stop'}: cannot be written ({error.strerror})"
        ) from None


def _describe_request(run: RunSummary) -> str:
    if run.state.is_active and run.state.name != "stalled":
        return f"{run.folder}: it saves and ends after the current step; Ctrl-C here does not take the request back"
    return f"{run.folder}: the request is in {run.folder / 'stop'}, but {run.host} may never see it: {run.state.note}"


def cancel_run(run: RunSummary, kill: bool, on_wait: Callable[[str], None]) -> RunSummary:
    """End a run now and remove its queued jobs. The last checkpoint stays valid. `kill`: with SIGKILL."""
    jobs = [str(job.number) for job in run.active_jobs]
    target = _local_process(run)
    if not jobs and target is None:
        if run.state.name in ("running", "starting", "stalled", "stopping", "unreachable"):
            raise WhetError(
                f"{run.folder}: its process is on {run.host}, which cannot be reached from here. Run `whet runs cancel "
                f"{run.folder}` there, or `whet runs stop {run.folder}`, which works through the folder"
            )
        raise WhetError(f"{run.folder}: not running ({run.state.name}), so there is nothing to cancel")
    if jobs:
        if kill:
            _scancel(run, "--full", "--signal=KILL", *jobs)
        _scancel(run, *jobs)
        on_wait(f"cancelling job {', '.join(jobs)}")
        _wait_for_jobs(run.folder)
    while (target := _local_process(run)) is not None:  # again, if `whet launch` has just restarted it
        _end_process(target, kill, run.folder)
    (run.folder / "stop").unlink(missing_ok=True)
    ended = summarize_run_folder(run.folder)
    if ended.facts.status.get("state") == "running" and not ended.state.is_active:
        record_end(run.folder, "stopped", "cancelled", ExitCode.INTERRUPTED)
        ended = summarize_run_folder(run.folder)
    return ended


def _wait_for_jobs(folder: Path) -> None:
    until = time.monotonic() + _JOB_END_S
    while any(job.is_active for job in summarize_run_folder(folder).jobs):
        if time.monotonic() > until:
            raise WhetError(f"{folder}: Slurm has not ended its jobs within {_JOB_END_S:g} s. See `squeue`; try --kill")
        time.sleep(_POLL_S)


def _scancel(run: RunSummary, *arguments: str) -> None:
    try:
        done = run_slurm("scancel", *arguments, timeout_s=COMMAND_S)
    except SlurmUnavailableError as error:
        raise WhetError(f"{run.folder}: its jobs cannot be cancelled here: {error.reason}") from None
    if done.returncode != 0 and "Invalid job id" not in done.stderr and "already completing" not in done.stderr:
        raise WhetError(f"{run.folder}: scancel {' '.join(arguments)} failed: {done.stderr.strip() or done.returncode}")


def _local_process(run: RunSummary) -> int | None:
    """The process to signal: the `whet launch` that would restart the run, or the run's own; None if there is none on
    this machine."""
    owner = read_owner(run.folder)
    if owner is None or not owner.is_local:
        return None
    return owner.live_supervisor() or (owner.pid if owner.is_alive(run.folder) else None)


def _end_process(pid: int, kill: bool, folder: Path) -> None:
    """Ctrl-C saves after the step, a second one ends at once; what a shell started in the background ignores both."""
    family = process_tree(pid)
    signals: list[tuple[float, signal.Signals]] = []
    if kill:
        for each in family:  # parents first: nobody restarts what is killed
            _send_signal(each, signal.SIGKILL, folder)
    elif ignores_signal(pid, signal.SIGINT):
        signals = [(0.0, signal.SIGTERM)]
    else:
        signals = [(0.0, signal.SIGINT), (1.0, signal.SIGINT), (4.0, signal.SIGINT)]
    began = time.monotonic()
    while any(map(is_alive, family)):
        waited = time.monotonic() - began
        while signals and waited >= signals[0][0]:
            _send_signal(pid, signals.pop(0)[1], folder)
        if waited > _END_S:
            raise WhetError(
                f"{folder}: process {pid} has not ended within {_END_S:g} s. `whet runs cancel --kill {folder}` ends "
                "it at once; its last checkpoint stays valid"
            )
        time.sleep(0.05)


def _send_signal(pid: int, number: signal.Signals, folder: Path) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
    except PermissionError:
        raise WhetError(
            f"{folder}: process {pid} belongs to another user. `whet runs stop {folder}` works if you may write there"
        ) from None


# Renaming and deleting.


def require_idle(run: RunSummary, doing: str) -> None:
    """Refuse a run that is queued, running, or perhaps running where it cannot be seen."""
    if run.state.is_active or run.state.name == "unreachable":
        where = f" on {run.host}" if run.host else ""
        raise WhetError(
            f"{run.folder}: {run.state.name}{where}; {doing} would break it. Stop it first: whet runs stop {run.folder}"
        )


def rename_run(run: RunSummary, name: str) -> Path:
    """Give a run's folder another name, and the run with it; returns the new folder."""
    require_idle(run, "renaming")
    if not name or name.startswith((".", "-")) or "/" in name or "@" in name or escape_controls(name) != name:
        raise WhetError(
            f"{name!r} cannot be the name of a run: it begins with . or -, or has /, @ or a control character"
        )
    if run.folder.is_symlink():
        raise WhetError(f"{run.folder}: this is a link. Rename the folder that it leads to: {run.folder.resolve()}")
    target = run.folder.absolute().with_name(name)
    if os.path.lexists(target):
        raise WhetError(f"{target}: exists already. Give another name, or delete it first")
    with _locked(run.folder, "renaming"):
        _rename_in_config(run.folder, name, target)
        run.folder.absolute().rename(target)
    return target


def _rename_in_config(folder: Path, name: str, target: Path) -> None:
    """run.name and run.dir, where the run has written them; an edited file stays one."""
    for file in (folder / "config.yaml", folder / "slurm" / "recipe.yaml"):
        if not file.exists():
            continue
        tree: dict[str, Any] = read_yaml(file, expand="none").plain()
        run = tree.get("run") if isinstance(tree.get("run"), dict) else {}
        tree["run"] = {**(run or {}), "name": name} | ({"dir": str(target)} if run and "dir" in run else {})
        text = dump_yaml(tree)
        if file.name != "config.yaml":
            atomic_write(file, text)
        else:
            write_config(folder, text, is_edited=config_was_edited(folder))


def delete_run(run: RunSummary) -> None:
    """Delete a run's folder. It is renamed first: after a kill, all of it is there or nothing."""
    require_idle(run, "deleting")
    if run.folder.is_symlink():
        raise WhetError(f"{run.folder}: this is a link. Delete the folder that it leads to: {run.folder.resolve()}")
    with _locked(run.folder, "deleting"):
        delete_atomically(run.folder.absolute())


@contextlib.contextmanager
def _locked(folder: Path, doing: str) -> Iterator[None]:
    """Hold the lock of a run's folder. An error of the operating system names the folder and what was done."""
    lock = FolderLock(folder)
    try:
        yield
    except OSError as error:
        raise os_error(error, f"{doing} the run", folder) or WhetError(
            f"{folder}: {doing} the run failed ({error.strerror})"
        ) from None
    finally:
        lock.release()


def folder_size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
