"""Runs code that a model wrote in a sandbox, with limits on time, memory and files.

In mode `strict` the program sees Python's own files and one empty in-memory folder, no network and no other processes;
it has no privileges, no environment and only the system calls of seccomp.py. bubblewrap sets that up where it is
installed and works, else namespaces.py. Linux permits it to root and, where user namespaces are allowed, to
everyone. Where it does not, nothing runs, unless the user chooses mode `limits`.

What runs inside is sandbox_child.py. It cannot report a result: the exit code comes from the kernel.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import platform
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from whet.core.errors import WhetError
from whet.inference.sandbox import namespaces, python_files, sandbox_child
from whet.inference.sandbox.memory_totals import MemoryCgroup, find_excess, memory_cgroup, too_much_memory
from whet.inference.sandbox.seccomp import seccomp_filter

SandboxMode = Literal["strict", "limits"]
Launcher = Literal["bubblewrap", "namespaces", "limits"]

_DEVICES = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
_ENVIRONMENT = {"PATH": "/python/bin", "HOME": "/work", "LANG": "C.UTF-8", "LD_LIBRARY_PATH": "/python/lib"}
_SCRIPT_IN_SANDBOX = "/python/sandbox_child.py"
_PYTHON_OPTIONS = ("-I", "-S", "-B", "-X", "utf8")
_START_S = 60.0
_KILL_GRACE_S = 5.0
_CHECK_EVERY_S = 0.05
_MAX_OUTPUT_BYTES = 64 * 1024
_TEST_PROGRAM = """
import json, os, random, time
try:
    for _ in range(5):  # one more than it may
        if os.fork() == 0:
            time.sleep(60)
except BlockingIOError:
    print("limited")
"""
_sandbox_ids = itertools.count(os.getpid() * 1000)


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Resource limits of a program."""

    seconds: float = 5.0
    memory_bytes: int = 512 * 2**20
    """Per process, and in mode strict for all processes together."""
    file_bytes: int = 16 * 2**20
    """Per file; in mode strict for all files together."""
    processes: int = 4
    """How many it may start; threads count."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended, and its output."""

    exit_code: int
    """As in a shell: 128 + n after signal n."""
    timed_out: bool
    out: str
    err: str


class SandboxError(WhetError):
    """The system does not permit the sandbox."""


def run_program(code: str, limits: SandboxLimits = SandboxLimits(), mode: SandboxMode = "strict") -> ProgramResult:  # noqa: B008
    """Run Python code in a sandbox until it ends; a SandboxError if the system does not permit one."""
    return launch_program(require_sandbox(mode), code, limits)


@functools.cache
def require_sandbox(mode: SandboxMode) -> Launcher:
    """What launches sandboxes in this mode, the first that passes a test; a SandboxError if nothing does."""
    launchers: dict[SandboxMode, tuple[Launcher, ...]] = {"strict": ("bubblewrap", "namespaces"), "limits": ("limits",)}
    reasons = []
    for launcher in launchers[mode]:
        try:
            check_launcher(launcher)
        except SandboxError as error:
            reasons.append(str(error))
        else:
            return launcher
    remedy = (
        " Install bubblewrap and permit user namespaces (in a container: --privileged or a seccomp profile with "
        "unshare and mount), or set eval.sandbox=limits, which does not isolate the code from files and processes"
    )
    raise SandboxError(
        f"eval.sandbox: {mode} does not work on this machine, so generated code is not run ({'; '.join(reasons)})."
        + (remedy if mode == "strict" else "")
    )


def check_launcher(launcher: Launcher) -> None:
    """Run a test program; a SandboxError if it does not run, or can start more processes than it may. That happens: the
    kernel does not count the processes of the real root, also under other names in user namespaces."""
    result = launch_program(launcher, _TEST_PROGRAM, SandboxLimits(seconds=_START_S))
    if result.out != "limited\n":
        reason = "the number of processes is not limited" if result.exit_code == 0 else result.err[-300:].strip()
        raise SandboxError(f"the sandbox of {launcher} does not work: {reason}")


def launch_program(launcher: Launcher, code: str, limits: SandboxLimits) -> ProgramResult:
    """Run Python code in a sandbox of one kind; a SandboxError if it cannot be set up."""
    try:
        return _launch_program(launcher, code, limits)
    except OSError as error:  # too many processes or open files
        raise SandboxError(f"the sandbox cannot be set up by {launcher}: {error}") from error


def _launch_program(launcher: Launcher, code: str, limits: SandboxLimits) -> ProgramResult:
    with contextlib.ExitStack() as stack:
        prepared_read, prepared_write = os.pipe()
        stack.callback(os.close, prepared_read)
        with os.fdopen(prepared_write, "wb"), _as_pipe(_require_filter()) as filter_fd:
            uid = _unused_uid()
            processes = limits.processes + _other_processes(launcher, uid)
            numbers = (prepared_write, uid, limits.memory_bytes, int(limits.seconds), limits.file_bytes, processes)
            arguments = [str(number) for number in numbers]
            inherited = [prepared_write]
            if launcher == "bubblewrap":
                inherited.append(filter_fd)
                command = _bubblewrap_command(uid, limits, arguments, filter_fd)
            else:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="whet-sandbox-"))
                command = _own_launcher_command(launcher, uid, limits, arguments, folder)
            group = MemoryCgroup(None)
            if launcher != "limits":
                group = stack.enter_context(memory_cgroup(limits.memory_bytes + limits.file_bytes))
                command = [*group.command_prefix(), *command]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={}, cwd="/",
                start_new_session=True, pass_fds=inherited,
            )  # fmt: skip
        stack.enter_context(process)
        stack.callback(process.kill)
        _wait_until_prepared(process, prepared_read, launcher)
        result = _run_to_end(process, launcher, code, limits)
        if group.was_killed():
            result = replace(result, err=result.err + too_much_memory(limits.memory_bytes))
        return result


@contextlib.contextmanager
def _as_pipe(data: bytes) -> Iterator[int]:
    """A descriptor to read some data from: at most what fits into a pipe, 64 KiB."""
    read, write = os.pipe()
    with os.fdopen(read, "rb"):
        with os.fdopen(write, "wb") as file:
            file.write(data)
        yield read


def _bubblewrap_command(uid: int, limits: SandboxLimits, arguments: list[str], filter_fd: int) -> list[str]:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError("bubblewrap is not installed")
    files, empty = _python_files()
    command = [bwrap, "--die-with-parent", "--as-pid-1", "--unshare-pid", "--unshare-ipc", "--unshare-net",
               "--unshare-uts", "--unshare-cgroup-try"]  # fmt: skip
    if uid >= 0:  # sandbox_child.py changes to that user, which takes away these two capabilities as well
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    targets = [*(target for _, target in files), *_DEVICES]
    for folder in sorted({str(parent) for target in targets for parent in Path(target).parents} - {"/"}):
        command += ["--perms", "0755", "--dir", folder]
    for source, target in files:
        command += ["--ro-bind", source, target]
    for path in empty:
        command += ["--tmpfs", path, "--remount-ro", path]
    for device in _DEVICES:
        command += ["--dev-bind", device, device]
    command += ["--perms", "0777", "--size", str(limits.file_bytes), "--tmpfs", "/work", "--remount-ro", "/"]
    command += ["--chdir", "/work", "--clearenv"]
    for name, value in _ENVIRONMENT.items():
        command += ["--setenv", name, value]
    return [*command, "--seccomp", str(filter_fd), *_command_inside(), *arguments]


def _own_launcher_command(
    launcher: Launcher, uid: int, limits: SandboxLimits, arguments: list[str], folder: str
) -> list[str]:
    python, options = _base_interpreter(), list(_PYTHON_OPTIONS)
    files, empty = _python_files()
    strict = launcher == "namespaces"
    request = {
        "strict": strict, "uid": uid, "folder": folder, "files": files, "empty": empty, "devices": _DEVICES,
        "file_bytes": limits.file_bytes, "filter": _require_filter().hex(),
        "seconds": limits.seconds + _START_S if strict else limits.seconds,  # strict: this process keeps the time
        "command": [*(_command_inside() if strict else [python, *options, sandbox_child.__file__]), *arguments],
        "environment": _ENVIRONMENT if strict else {"HOME": folder, "LANG": "C.UTF-8"},
    }  # fmt: skip
    if not strict:
        Path(folder).chmod(0o777)
    return [python, *options, namespaces.__file__, json.dumps(request)]


@functools.cache
def _require_filter() -> bytes:
    filter_ = seccomp_filter(platform.machine())
    if filter_ is None:
        raise SandboxError(f"whet has no seccomp filter for {platform.machine()}, only for x86_64 and aarch64")
    return filter_


def _unused_uid() -> int:
    """A user that root changes to, one per sandbox: RLIMIT_NPROC counts processes by user. -1 if not root, or in a user
    namespace without other users; then the sandbox has a user namespace of its own, which counts them."""
    if os.geteuid() != 0:
        return -1
    ranges = [[int(number) for number in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, _, count = max(ranges, key=lambda numbers: numbers[2])
    return first + count // 2 + next(_sandbox_ids) % (count // 4) if count >= 2**16 else -1


def _other_processes(launcher: Launcher, uid: int) -> int:
    """How many processes of one user RLIMIT_NPROC counts besides those that the program starts: itself, and if it has
    no user of its own, init and whet's launcher."""
    if uid >= 0:
        return 1
    return {"bubblewrap": 2, "namespaces": 3}.get(launcher) or 3 + _user_process_count()


def _user_process_count() -> int:
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            count += folder.stat().st_uid == os.getuid()
    return count


@functools.cache
def _base_interpreter() -> str:
    """The Python behind a virtual environment: it needs only its own folders."""
    return str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())


@functools.cache
def _python_files() -> tuple[list[tuple[str, str]], list[str]]:
    """The files in a strict sandbox, each with its path there, and the folders inside them that are empty there."""
    command = [_base_interpreter(), *_PYTHON_OPTIONS, python_files.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={})
    if done.returncode != 0:
        raise SandboxError(f"the files of {command[0]} cannot be listed: {done.stderr[-300:].strip()}")
    found = json.loads(done.stdout)
    return [*found["files"].items(), (sandbox_child.__file__, _SCRIPT_IN_SANDBOX)], found["empty"]


def _command_inside() -> list[str]:
    return [f"/python/bin/{Path(_base_interpreter()).name}", *_PYTHON_OPTIONS, _SCRIPT_IN_SANDBOX]


def _wait_until_prepared(process: subprocess.Popen[bytes], prepared_fd: int, launcher: Launcher) -> None:
    """Wait until sandbox_child.py has prepared itself; a SandboxError if it ends before."""
    with selectors.DefaultSelector() as selector:
        selector.register(prepared_fd, selectors.EVENT_READ)
        if selector.select(_START_S) and os.read(prepared_fd, 1):
            return
    process.kill()
    assert process.stderr
    reason = process.stderr.read().decode(errors="replace").strip()[-300:] or f"nothing happens for {_START_S:g} s"
    raise SandboxError(f"the sandbox cannot be set up by {launcher}: {reason}")


def _run_to_end(
    process: subprocess.Popen[bytes], launcher: Launcher, code: str, limits: SandboxLimits
) -> ProgramResult:
    """Send the program and collect its output, up to a limit, until no process is left. Kill them at the limits."""
    assert process.stdin
    assert process.stdout
    assert process.stderr
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(code.encode(errors="surrogatepass"))
        process.stdin.close()
    parts = {process.stdout: bytearray(), process.stderr: bytearray()}
    next_check = time.monotonic() + _CHECK_EVERY_S
    deadline = time.monotonic() + limits.seconds + (_KILL_GRACE_S if launcher == "limits" else 0)
    timed_out, excess = False, ""
    with selectors.DefaultSelector() as selector:
        for stream in parts:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map() and time.monotonic() < deadline + _KILL_GRACE_S:
            for key, _ in selector.select(_CHECK_EVERY_S):
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(key.fileobj)
                kept = parts[key.fileobj]  # type: ignore[index]
                kept += chunk[: _MAX_OUTPUT_BYTES - len(kept)]
            if timed_out or excess:
                continue  # until all processes have died with their launcher, which the end of their output shows
            timed_out = time.monotonic() >= deadline
            if not timed_out and launcher != "limits" and time.monotonic() >= next_check:
                excess = find_excess(process.pid, limits.memory_bytes)
                next_check = time.monotonic() + _CHECK_EVERY_S
            if timed_out or excess:
                process.kill()
    ended = process.wait(_KILL_GRACE_S)
    timed_out = timed_out or (launcher == "limits" and ended == -signal.SIGALRM)
    exit_code = 128 + signal.SIGKILL if timed_out else ended if ended >= 0 else 128 - ended
    out, err = (bytes(part).decode(errors="replace") for part in parts.values())
    return ProgramResult(exit_code, timed_out, out, err + excess)
