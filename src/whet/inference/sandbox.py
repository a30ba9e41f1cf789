"""Running code that a model wrote: apart from everything, for a short time, or not at all.

Strict, the program has a process tree, a network (an empty one), and a root folder of its own, in which there is Python
and one folder in memory; it has no rights, no environment, and the limits below. Linux can do that for root and, where
user namespaces are permitted, for anyone. Where it cannot, nothing is run, unless the user asks for limits only.
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
    """What a program may use; those it starts share it or have as much each, but there can be few."""

    seconds: float = 5.0
    memory_bytes: int = 512 * 2**20
    """Of each process."""
    file_bytes: int = 16 * 2**20
    """Of each file; strict: of all of them together."""
    processes: int = 4


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended."""

    code: int
    """As a shell gives it: 128 + n after signal n."""
    timed_out: bool
    out: str
    err: str
    enforced: dict[str, bool]
    """network, files, processes: whether the program was kept from them."""


class SandboxError(WhetError):
    """The system does not permit what a sandbox needs."""


def run_program(code: str, limits: SandboxLimits = SandboxLimits(), mode: SandboxMode = "strict") -> ProgramResult:  # noqa: B008
    """Run Python code in a sandbox and wait for its end; a SandboxError where there can be none."""
    with tempfile.TemporaryDirectory(prefix="whet-sandbox-") as folder:
        inside = Path(folder) / "inside"
        inside.mkdir()
        inside.chmod(0o777)
        order = {
            **asdict(limits), "code": code, "strict": mode == "strict", "folder": str(inside),
            "number": next(_sandbox_ids) % 1_000_000_000, "python": _stdlib_folders(),
        }  # fmt: skip
        return _run_child(order, inside, limits.seconds)


def _run_child(order: dict[str, object], folder: Path, seconds: float) -> ProgramResult:
    told, tell = os.pipe()
    try:
        process = subprocess.Popen(
            [_base_interpreter(), "-I", "-S", "-B", str(_CHILD_SCRIPT), str(tell)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": "/work", "LANG": "C.UTF-8"}, start_new_session=True, pass_fds=[tell],
        )  # fmt: skip
    finally:
        os.close(tell)
    with process, os.fdopen(told, "rb") as status:
        out, err, late = _collect_output(process, json.dumps(order).encode(), seconds + _KILL_GRACE_S)
        found = dict(pair for line in status.read().splitlines() for pair in json.loads(line).items())
    if "error" in found or "enforced" not in found:
        why = found.get("error", err[-300:])
        if not order["strict"]:
            raise SandboxError(f"eval.sandbox: limits is not possible here: {why}")
        raise SandboxError(
            f"eval.sandbox: strict is not possible on this machine ({why}), so generated code is not run. Permit user "
            "namespaces (in a container: --privileged or a seccomp profile with unshare and mount), or set "
            "eval.sandbox=limits, which leaves network and files open to it"
        )
    timed_out = late or found.get("code") is None  # told by the one outside: a program can end with any code
    return ProgramResult(128 + signal.SIGKILL if timed_out else found["code"], timed_out, out, err, found["enforced"])


def _collect_output(process: subprocess.Popen[bytes], order: bytes, seconds: float) -> tuple[str, str, bool]:
    """What it wrote, up to a limit, and whether it had to be killed from here."""
    assert process.stdin
    assert process.stdout
    assert process.stderr
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(order)
        process.stdin.close()
    parts = {process.stdout: bytearray(), process.stderr: bytearray()}
    until, late = time.monotonic() + seconds, False
    with selectors.DefaultSelector() as selector:
        for stream in parts:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map() and not late:
            for key, _ in selector.select(max(0.0, until - time.monotonic())):
                piece = os.read(key.fd, 65536)
                if not piece:
                    selector.unregister(key.fileobj)
                kept = parts[key.fileobj]  # type: ignore[index]
                kept += piece[: _MAX_OUTPUT_BYTES - len(kept)]
            late = time.monotonic() >= until
    with contextlib.suppress(ProcessLookupError):
        if late:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    out, err = (bytes(part).decode(errors="replace") for part in parts.values())
    return out, err, late


@functools.cache
def _base_interpreter() -> str:
    """Python itself, not that of a virtual environment, which needs files from all over."""
    return str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())


@functools.cache
def _stdlib_folders() -> list[str]:
    """The folders that Python needs to import its own library."""
    bases = ("base", "installed_base", "platbase", "installed_platbase")
    paths = sysconfig.get_paths(vars=dict.fromkeys(bases, sys.base_prefix))
    wanted = {paths["stdlib"], paths["platstdlib"], str(Path(_base_interpreter()).parent.parent / "lib")}
    real = {str(Path(path).resolve()) for path in wanted}
    return sorted(path for path in wanted | real if path not in ("/lib", "/usr/lib") and Path(path).is_dir())


@functools.cache
def require_sandbox(mode: SandboxMode) -> dict[str, bool]:
    """Prove once that programs can be run and are kept where they belong; what is enforced."""
    outcome = run_program("import json, random\nprint(6 * 7)", mode=mode)
    if outcome.out != "42\n":
        raise SandboxError(f"eval.sandbox: Python does not start in the sandbox: {(outcome.err or outcome.out)[-500:]}")
    return outcome.enforced
