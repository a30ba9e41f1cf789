"""Runs of several processes: consistency checks, hang detection, and reports of the rank that failed first."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.core import launch_env
from whet.core.console import print_error
from whet.core.distributed import Ranks, is_peer_failure
from whet.core.errors import ExitCode, RunFailedError, StoppedError, WhetError, describe_error
from whet.core.files import hash_file, hash_json, write_json
from whet.core.heartbeat import PHASE, read_first_error, report_texts, write_error_report, write_torchelastic_error
from whet.core.run_folder import record_failure
from whet.core.signals import ignore_stop_signals, is_alive, machine_id
from whet.core.watchdog import Watchdog
from whet.registry.references import is_registered
from whet.run.data import RunData

# Consistency check before the first step: all processes see one run folder, and the stores on their machines hold the
# same conversations. A run on two different stores would train without an error, on batches that no plan knows.

_VISIBLE_WITHIN_S = 15.0  # network file systems show a new file after some seconds


def store_digests(data: RunData) -> dict[str, str]:
    """A hash of each store's content, by use; empty on all but the first process of a machine.

    Call it before joining the process group, so that no process waits for it in a collective.
    """
    if launch_env.local_rank() != 0:
        return {}
    return {use: _store_digest(Path(folder)) for use, folder in data.store_folders().items()}


def _store_digest(folder: Path) -> str:
    """Of the small files that depend on every token."""
    files = ("hashes.npy", "targets.npy", "tokens.idx", "tokenizer.json")
    return hash_json({name: hash_file(folder / name) for name in files if (folder / name).exists()})


@dataclass(frozen=True, slots=True)
class Peer:
    """A process of the run, by rank in a list of all."""

    host: str
    machine: str
    pid: int

    def has_ended(self) -> bool:
        """Whether it has, as far as this machine can tell."""
        return self.machine == machine_id() and not is_alive(self.pid)


def require_consistent_ranks(folder: Path, digests: Mapping[str, str], model: str, ranks: Ranks) -> list[Peer]:
    """Refuse, on every rank, machines that do not share the run's folder, or have other data or another model.path.
    Returns the processes, in the order of their ranks."""
    if ranks.world_size == 1:
        return []
    probe = _SharedFolderProbe(folder)
    [name] = ranks.all_gather([probe.write()] if ranks.is_main else [])
    try:
        found = {"host": socket.gethostname(), "sees": probe.sees(name), "stores": dict(digests)}
        found["peer"] = Peer(socket.gethostname(), machine_id(), os.getpid())
        found["model"] = model if is_registered(model) else None  # a folder may have another path on each machine
        everyone: list[dict[str, Any]] = ranks.all_gather([found])
    finally:
        if ranks.is_main:
            probe.remove(name)
    apart = _unique_hosts(one for one in everyone if not one["sees"])
    if apart:
        raise WhetError(
            f"run.dir: {folder} is not the same folder on all machines: {', '.join(apart)} cannot see what "
            f"{everyone[0]['host']} writes there. Give a folder on a file system that they share: run.dir=FOLDER"
        )
    if another := next((one for one in everyone if one["model"] != everyone[0]["model"]), None):
        raise WhetError(
            f"model.path: {everyone[0]['host']} begins with {everyone[0]['model']}, {another['host']} with "
            f"{another['model']}: what it refers to changed while the processes started. Start the run again"
        )
    for use, digest in everyone[0]["stores"].items():
        others = _unique_hosts(one for one in everyone if one["stores"] and one["stores"].get(use) != digest)
        if others:
            raise WhetError(
                f"the {use} data on {', '.join(others)} is not that of {everyone[0]['host']}: their prepared stores "
                "hold different conversations. Give all machines the same files, or one store on a file system that "
                "they share (data.store, or the environment variable WHET_CACHE)"
            )
    return [one["peer"] for one in everyone]


class _SharedFolderProbe:
    """A file with a random name, which only processes that see the folder can find."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self) -> str:
        name = f".shared-{secrets.token_hex(8)}"
        write_json(self._folder / name, {"host": socket.gethostname()})
        return name

    def sees(self, name: str) -> bool:
        until = time.monotonic() + _VISIBLE_WITHIN_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                # Listing refreshes a network file system's cache, which a lookup of one name may not.
                if any(file.name == name for file in self._folder.iterdir()):
                    return True
            time.sleep(0.2)
        return False

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)


def _unique_hosts(found: Any) -> Sequence[str]:
    return list(dict.fromkeys(one["host"] for one in found))


# Failures: hangs are detected, and the first error is reported on every rank.


class HangDetector:
    """The watchdog of this process, if the run has several."""

    def __init__(self, folder: Path, rank: int, world_size: int, timeout_s: float) -> None:
        self._folder, self._rank, self._world_size, self._timeout_s = folder, rank, world_size, timeout_s
        self._watchdog: Watchdog | None = None
        if launch_env.has_agent_store():
            self.start()

    def start(self) -> None:
        """Start, once there is a store: torchrun's agent store at once, otherwise that of the process group."""
        if self._world_size > 1 and self._watchdog is None:
            self._watchdog = Watchdog(self._rank, self._world_size, self._timeout_s, self._report_hang)

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()

    def _report_hang(self, message: str) -> None:
        write_error_report(self._folder, self._rank, message, ExitCode.FAILED)
        write_torchelastic_error(message, ExitCode.FAILED)
        record_failure(self._folder, message, ExitCode.FAILED, PHASE.step - 1)
        print_error(f"error: {message}")


@contextlib.contextmanager
def process_group(ranks: Ranks) -> Iterator[None]:
    """Leave the process group together at the end.

    After an error, destroying a GPU's group would wait for the other processes' kernels: the process ends without,
    which they notice.
    """
    try:
        yield
    except StoppedError:
        ranks.shutdown()
        raise
    except BaseException:
        if ranks.device.type == "cpu" or ranks.world_size == 1:
            ranks.destroy()
        raise
    ranks.shutdown()


@contextlib.contextmanager
def report_failures(folder: Path, rank: int, world_size: int) -> Iterator[list[Peer]]:
    """Write an error to the run's folder before the other processes can notice it. Where the error is only the loss of
    another process, raise that process's error instead. Yields a list for the processes, once they are known."""
    peers: list[Peer] = []
    (folder / "logs" / f"rank-{rank}.json").unlink(missing_ok=True)
    earlier = report_texts(folder)
    try:
        yield peers
    except (StoppedError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if world_size > 1 and is_peer_failure(error):
            ignore_stop_signals()  # torchrun sends SIGTERM to the processes that are left
            raise RunFailedError(_lost_peer_message(folder, earlier, peers, error)) from None
        if world_size > 1:
            code = error.exit_code if isinstance(error, WhetError) else ExitCode.FAILED
            write_error_report(folder, rank, _error_text(error), code)
        raise


_DEATH_WITHIN_S = 2.0  # a process that is killed closes its connections before it is gone


def _lost_peer_message(folder: Path, earlier: frozenset[str], peers: Sequence[Peer], error: BaseException) -> str:
    end = "Start it again to continue from its last checkpoint (whet train: with --resume)"
    until = time.monotonic() + _DEATH_WITHIN_S
    first: dict[str, Any] | None = None
    while (first := read_first_error(folder, earlier)) is None and time.monotonic() < until:
        if ended := [f"rank {rank} on {peer.host}" for rank, peer in enumerate(peers) if peer.has_ended()]:
            killed = "was killed (without an error of its own; often by the system, when memory runs out)"
            return f"{' or '.join(ended)} {killed}. {end}"
        time.sleep(0.01)
    if first is None:
        return f"another process of this run exited: {_error_text(error)}. {end}"
    message = first["message"].rstrip(".")
    return f"rank {first['rank']} on {first['host']} failed in step {first['step']}: {message}. {end}"


def _error_text(error: BaseException) -> str:
    return str(error).strip() if isinstance(error, WhetError) else describe_error(error)
