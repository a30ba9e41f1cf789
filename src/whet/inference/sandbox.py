"""Runs code that a model wrote in a sandbox, with limits on time, memory and files.

In mode `strict` the program gets its own process tree, an empty network and its own root folder with Python and one
in-memory folder; it has no privileges and no environment. Linux allows that to root and, where user namespaces are
permitted, to everyone. Where it does not, nothing runs, unless the user chooses mode `limits`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from whet.core.errors import WhetError
from whet.inference import sandbox_child

SandboxMode = Literal["strict", "limits"]
_CHILD_SCRIPT = Path(sandbox_child.__file__)
_KILL_GRACE_S = 5.0
_MAX_OUTPUT_BYTES = 64 * 1024
_sandbox_ids = itertools.count(os.getpid() * 1000)


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Resource limits of a program. Those per process apply to each process it starts, whose number is limited too."""

    seconds: float = 5.0
    memory_bytes: int = 512 * 2**20
    """Per process."""
    file_bytes: int = 16 * 2**20
    """Per file; in mode strict for all files together."""
    processes: int = 4


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended, and its output."""

    exit_code: int
    """As in a shell: 128 + n after signal n."""
    timed_out: bool
    out: str
    err: str
    enforced: dict[str, bool]
    """Whether the program was isolated from the network, files and processes of this machine."""


class SandboxError(WhetError):
    """The system does not permit the sandbox."""


def run_program(code: str, limits: SandboxLimits = SandboxLimits(), mode: SandboxMode = "strict") -> ProgramResult:  # noqa: B008
    """Run Python code in a sandbox until it ends; a SandboxError if the system does not permit one."""
    with tempfile.TemporaryDirectory(prefix="whet-sandbox-") as folder:
        inside = Path(folder) / "inside"
        inside.mkdir()
        inside.chmod(0o777)
        request = {
            **asdict(limits), "code": code, "strict": mode == "strict", "folder": str(inside),
            "number": next(_sandbox_ids) % 1_000_000_000, "python": _stdlib_folders(),
        }  # fmt: skip
        return _run_child(request, inside, limits.seconds)


def _run_child(request: dict[str, object], folder: Path, seconds: float) -> ProgramResult:
    status_read, status_write = os.pipe()
    try:
        process = subprocess.Popen(
            [_base_interpreter(), "-I", "-S", "-B", str(_CHILD_SCRIPT), str(status_write)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": "/work", "LANG": "C.UTF-8"}, start_new_session=True,
            pass_fds=[status_write],
        )  # fmt: skip
    finally:
        os.close(status_write)
    with process, os.fdopen(status_read, "rb") as status:
        out, err, killed = _collect_output(process, json.dumps(request).encode(), seconds + _KILL_GRACE_S)
        found = dict(pair for line in status.read().splitlines() for pair in json.loads(line).items())
    if "error" in found or "enforced" not in found:
        reason = found.get("error", err[-300:])
        if not request["strict"]:
            raise SandboxError(f"eval.sandbox: limits does not work on this machine: {reason}")
        raise SandboxError(
            f"eval.sandbox: strict does not work on this machine ({reason}), so generated code is not run. Permit user "
            "namespaces (in a container: --privileged or a seccomp profile with unshare and mount), or set "
            "eval.sandbox=limits, which does not isolate it from network and files"
        )
    timed_out = killed or found.get("code") is None  # from the supervisor: a program can exit with any code
    return ProgramResult(128 + signal.SIGKILL if timed_out else found["code"], timed_out, out, err, found["enforced"])


def _collect_output(process: subprocess.Popen[bytes], request: bytes, seconds: float) -> tuple[str, str, bool]:
    """(stdout, stderr, killed): the output up to a limit, and whether the process was killed after `seconds`."""
    assert process.stdin
    assert process.stdout
    assert process.stderr
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(request)
        process.stdin.close()
    parts = {process.stdout: bytearray(), process.stderr: bytearray()}
    deadline, killed = time.monotonic() + seconds, False
    with selectors.DefaultSelector() as selector:
        for stream in parts:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map() and not killed:
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(key.fileobj)
                kept = parts[key.fileobj]  # type: ignore[index]
                kept += chunk[: _MAX_OUTPUT_BYTES - len(kept)]
            killed = time.monotonic() >= deadline
    with contextlib.suppress(ProcessLookupError):
        if killed:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    out, err = (bytes(part).decode(errors="replace") for part in parts.values())
    return out, err, killed


@functools.cache
def _base_interpreter() -> str:
    """The Python behind a virtual environment: it needs only its own folders."""
    return str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())


@functools.cache
def _stdlib_folders() -> list[str]:
    """The folders of the standard library."""
    bases = ("base", "installed_base", "platbase", "installed_platbase")
    paths = sysconfig.get_paths(vars=dict.fromkeys(bases, sys.base_prefix))
    wanted = {paths["stdlib"], paths["platstdlib"], str(Path(_base_interpreter()).parent.parent / "lib")}
    real = {str(Path(path).resolve()) for path in wanted}
    return sorted(path for path in wanted | real if path not in ("/lib", "/usr/lib") and Path(path).is_dir())


@functools.cache
def require_sandbox(mode: SandboxMode) -> dict[str, bool]:
    """Run a test program once; return what the sandbox enforces, or raise a SandboxError."""
    result = run_program("import json, random\nprint(6 * 7)", mode=mode)
    if result.out != "42\n":
        raise SandboxError(f"eval.sandbox: Python does not start in the sandbox: {(result.err or result.out)[-500:]}")
    return result.enforced
