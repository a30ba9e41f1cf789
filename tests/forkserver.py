"""Start Python processes without importing torch each time.

`python -m whet …` spends four fifths of a short run on imports. Here one server imports whet, torch and transformers
once; every process that a test starts is a fork of it. `sys.executable` points to a small stand-in during the tests:
it sends its arguments, environment, limits and file descriptors to the server, forwards signals, and ends as the fork
ends. What it cannot serve (flags other than -m, -c and -u) it hands to the real interpreter. A stand-in that is killed
takes its fork with it, and a fork that is killed its stand-in, so exit codes and signals are those of a real process.

What differs: the fork is a child of the server, so it is in another session and its parent never dies; and it ends
without freeing its objects. Tests of that, and of what is imported when, use the fixture `real_python`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import resource
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
PRELOADED = (
    "torch._dynamo", "torch.distributed.run", "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.checkpoint", "torch.utils.tensorboard", "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto", "peft", "peft.tuners.lora", "safetensors.torch", "pydantic", "yaml",
)  # fmt: skip
_LIMITS = (resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_CPU)

STAND_IN = """#!{python} -IS
import array, json, os, resource, signal, socket, sys
def real(): os.execv({python!r}, [{python!r}, *sys.argv[1:]])
words = sys.argv[1:]
while words[:1] == ["-u"]: words = words[1:]
if not words or (words[0].startswith("-") and words[0] not in ("-m", "-c")): real()
server = socket.socket(socket.AF_UNIX)
try: server.connect({address!r})
except OSError: real()
limits = [resource.getrlimit(kind) for kind in {limits!r}]
task = {{"argv": words, "env": dict(os.environ), "cwd": os.getcwd(), "pid": os.getpid(), "limits": limits,
        "ignored": [n for n in {forwarded!r} if signal.getsignal(n) == signal.SIG_IGN]}}
text = json.dumps(task).encode()
held = []
for n in {forwarded!r}: signal.signal(n, lambda n, _: held.append(n))
server.sendmsg([len(text).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
server.sendall(text)
file = server.makefile("rb")
child = int(file.readline())
def forward(n, _):
    try: os.kill(child, n)
    except ProcessLookupError: pass
for n in {forwarded!r}: signal.signal(n, forward)
for n in held: forward(n, None)
for fd in (0, 1, 2): os.close(fd)
status = file.readline()
if not status: os._exit(1)
status = int(status)
if os.WIFSIGNALED(status):
    if os.WTERMSIG(status) != signal.SIGKILL: signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.WEXITSTATUS(status))
"""


def write_stand_in(folder: Path, python: str) -> Path:
    """The script that stands in for the interpreter `python`."""
    script = folder / "python"
    text = STAND_IN.format(
        python=python, address=str(folder / "socket"), limits=_LIMITS, forwarded=tuple(map(int, FORWARDED))
    )
    script.write_text(text)
    script.chmod(0o755)
    return script


def serve(folder: Path) -> Callable[[], None] | None:
    """Fork for every stand-in that connects. Returns in each fork, with the work to do there."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    _preload()
    sys.executable = str(folder / "python")
    gc.collect()
    gc.freeze()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    selector.register(wake, selectors.EVENT_READ)
    children: dict[int, socket.socket] = {}
    records: dict[int, Path] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                task, descriptors = _receive(connection)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    selector.close()
                    for one in (listener, connection, *children.values()):
                        one.close()
                    os.close(wake)
                    os.close(woken)
                    return lambda: _run(task, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                children[pid] = connection
                records[pid] = folder / str(task["pid"])
                records[pid].write_text(str(pid))
                selector.register(connection, selectors.EVENT_READ, pid)
                _send(connection, pid)
            elif key.fileobj == wake:
                os.read(wake, 4096)
                for pid in list(children):
                    found, status = os.waitpid(pid, os.WNOHANG)
                    if found:
                        connection = children.pop(pid)
                        if connection in selector.get_map():
                            selector.unregister(connection)
                        records.pop(pid).unlink()
                        _send(connection, status)
                        connection.close()
            elif key.data in children and not _is_open(key.fileobj):  # type: ignore[arg-type]
                os.kill(key.data, signal.SIGKILL)  # its stand-in is gone
                selector.unregister(key.fileobj)


class Popen(subprocess.Popen[Any]):
    """A process started by `sys.executable`. Signals go to the fork itself, so that it is gone when `wait` returns."""

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since, as in subprocess.Popen
                os.kill(fork_of(self.pid), sig)


def fork_of(pid: int) -> int:
    """The process that does the work of a stand-in; any other process is its own."""
    record = Path(sys.executable).with_name(str(pid))
    try:
        return int(record.read_text())
    except FileNotFoundError:
        return pid


def children_of(pid: int) -> list[int]:
    """The child processes of a process that a test started."""
    parent = fork_of(pid)
    try:
        return [int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _is_open(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _send(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the stand-in is gone
        connection.sendall(f"{number}\n".encode())


def _receive(connection: socket.socket) -> tuple[dict[str, object], list[int]]:
    size, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(3 * 4))
    descriptors = [n for _, _, data in ancillary for n in struct.unpack(f"{len(data) // 4}i", data)]
    left, parts = int.from_bytes(size, "little"), []
    while left:
        parts.append(connection.recv(min(left, 1 << 20)))
        left -= len(parts[-1])
    return json.loads(b"".join(parts)), descriptors


def _preload() -> None:
    """Import, and nothing else: no thread, no tensor."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # of an extra
            importlib.import_module(name)
    import whet

    for module in pkgutil.walk_packages(whet.__path__, "whet."):
        if not any(word in module.name for word in ("kernel", "peers", "__main__", "sandbox_child", "torchrun_agent")):
            with contextlib.suppress(ImportError):  # of an extra
                importlib.import_module(module.name)


def _run(task: dict[str, object], descriptors: list[int]) -> None:
    os.setsid()
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, place)
    for descriptor in descriptors:
        if descriptor > 2:
            os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
    )  # fmt: skip
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.environ.clear()
    os.environ.update(task["env"])  # type: ignore[arg-type]
    _join_namespaces_of(int(task["pid"]))  # type: ignore[call-overload]
    os.sched_setaffinity(0, os.sched_getaffinity(int(task["pid"])))  # type: ignore[call-overload]
    os.chdir(str(task["cwd"]))
    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in task["ignored"]:  # type: ignore[attr-defined]
        signal.signal(number, signal.SIG_IGN)
    for kind, (soft, hard) in zip(_LIMITS, task["limits"], strict=True):  # type: ignore[call-overload]
        if (soft, hard) != resource.getrlimit(kind):
            resource.setrlimit(kind, (soft, hard))
    sys.path[:0] = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
    kind, *rest = task["argv"]  # type: ignore[misc]
    if kind == "-m":
        sys.modules.pop(rest[0], None)
        sys.argv = [rest[0], *rest[1:]]
        sys.path.insert(0, str(task["cwd"]))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv = [kind, *rest]
        sys.path.insert(0, str(Path(kind).absolute().parent))
        runpy.run_path(kind, run_name="__main__")


def _end_early(work: Callable[[], None]) -> None:
    """Work, then end as Python ends, but without freeing every object: that would copy the server's memory, in 0.4 s of
    processor time. An exception, or an output that cannot be written, ends the process in Python's own way."""
    code: object = None
    try:
        work()
    except SystemExit as end:
        code = end.code
    if code is not None and not isinstance(code, int):
        sys.exit(code)  # type: ignore[arg-type]
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        sys.exit(code)
    os._exit(int(code or 0) & 0xFF)


def _join_namespaces_of(pid: int) -> None:
    """A stand-in behind `ip netns exec` or `unshare` has a network, host name or mounts of its own; so has its fork."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "mnt"):
        own, theirs = Path(f"/proc/self/ns/{kind}"), Path(f"/proc/{pid}/ns/{kind}")
        if own.readlink() != theirs.readlink():
            with theirs.open() as file:
                if libc.setns(file.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"setns({kind}) failed")


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the server ends with pytest
    _work = serve(Path(sys.argv[1]))
    if _work is not None:
        _end_early(_work)
