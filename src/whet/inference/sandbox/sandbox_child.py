"""What runs inside the sandbox: a script that reads a program from stdin and runs it. Standard library only.

Two processes: `init` is PID 1 of the PID namespace: when it exits, the kernel kills all processes inside, daemons too.
`program` runs the code, as another user if init is root. init exits with the program's exit code, which whet gets from
the kernel. A byte through a pipe reports that all is prepared; that pipe is closed before the code runs.
"""

# Importing pathlib and typing would take half of the start-up time.

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import resource
import signal
import sys

_DEATH_SIGNAL, _DUMPABLE = 1, 4  # prctl
_KEYCTL, _JOIN_SESSION_KEYRING = {"x86_64": 250, "aarch64": 219}, 1
_IGNORED_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ)  # as in Python: a file over its limit is an OSError


def leave_session() -> None:
    """Give up what came from whet's session: its keyring and its terminal. Die with the launcher, and be closed to the
    program: without access to this process's memory and descriptors."""
    libc = ctypes.CDLL(None)
    # Where a container forbids keyctl, the program still reaches no keys: the seccomp filter permits only this call.
    libc.syscall(_KEYCTL[os.uname().machine], _JOIN_SESSION_KEYRING, None)
    libc.prctl(_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def change_user(uid: int) -> None:
    """Become an unprivileged user; -1: this is one already."""
    if uid >= 0:
        with contextlib.suppress(PermissionError):  # in some user namespaces
            os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if not os.access(os.__file__, os.R_OK):
        sys.exit(f"{os.__file__}, a file of Python, is not readable by other users")


def set_resource_limits(memory_bytes: int, seconds: int, file_bytes: int, processes: int) -> None:
    """Set the rlimits, which processes that the program starts inherit."""
    for resource_, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, seconds + 1),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(resource_, (value, value))


def exec_code(code: bytes) -> int:
    """Run the code in this process; return its exit code."""
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.stdin = io.StringIO()
    try:
        exec(compile(code.decode(errors="surrogatepass"), "<answer>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1 if error.code else 0
    except BaseException as error:
        status = 1
        with contextlib.suppress(BaseException):  # its __str__ may be the program's
            sys.stderr.write(f"{type(error).__name__}: {error}"[:2000] + "\n")
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    return status & 255


def program_process(prepared_fd: int, uid: int, limits: list[int]) -> None:
    """The process of the program, which stdin holds."""
    os.setsid()
    change_user(uid)
    set_resource_limits(*limits)
    os.write(prepared_fd, b"1")
    os.close(prepared_fd)
    status = 1
    try:
        status = exec_code(sys.stdin.buffer.read())
    finally:
        os._exit(status)


def init_process(prepared_fd: int, uid: int, limits: list[int]) -> None:
    """Start the program, and exit as it does: with 128 + n if signal n ended it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # for PID 1 the default is to ignore what comes from inside
    leave_session()
    program = os.fork()
    if program == 0:
        program_process(prepared_fd, uid, limits)
    os.close(prepared_fd)
    while True:
        pid, status = os.wait()
        if pid == program:
            os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


if __name__ == "__main__":
    _prepared_fd, _uid, *_limits = map(int, sys.argv[1:])
    init_process(_prepared_fd, _uid, _limits)
