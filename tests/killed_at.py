"""`whet` in a process that is killed, as by kill -9, before a file operation: python killed_at.py WHEN FOLDER train …

The kernel reports the operations, so that those of C++ and Rust count too: a seccomp filter of the child hands every
call that changes a file below FOLDER to this process, which lets it proceed, or kills the child. WHEN is the number of
the operation, or a part of its line in FOLDER/operations.log: call and file (`rename run/plan#2`: the second such).
With 0 nobody is killed, and the log tells how many operations there are.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

_X86 = "x86_64"
_CALLS = {
    _X86: {
        "write": 1, "open": 2, "pwrite": 18, "writev": 20, "sendfile": 40, "fsync": 74, "fdatasync": 75,
        "truncate": 76, "ftruncate": 77, "rename": 82, "mkdir": 83, "rmdir": 84, "link": 86, "unlink": 87,
        "symlink": 88, "openat": 257, "mkdirat": 258, "unlinkat": 263, "renameat": 264, "linkat": 265,
        "symlinkat": 266, "fallocate": 285, "pwritev": 296, "renameat2": 316, "copy_file_range": 326,
    },
    "aarch64": {
        "mkdirat": 34, "unlinkat": 35, "symlinkat": 36, "linkat": 37, "renameat": 38, "truncate": 45, "ftruncate": 46,
        "fallocate": 47, "openat": 56, "write": 64, "writev": 66, "pwrite": 68, "pwritev": 70, "sendfile": 71,
        "fsync": 82, "fdatasync": 83, "renameat2": 276, "copy_file_range": 285,
    },
}  # fmt: skip
"""Calls that change files, by architecture."""
IS_SUPPORTED = platform.system() == "Linux" and platform.machine() in _CALLS
_AUDIT_ARCH = {_X86: 0xC000003E, "aarch64": 0xC00000B7}
_OF_A_DESCRIPTOR = ("write", "pwrite", "writev", "pwritev", "fsync", "fdatasync", "ftruncate", "fallocate")
_PATH_ARGUMENT = {"openat": 1, "mkdirat": 1, "unlinkat": 1, "renameat": 1, "renameat2": 1, "linkat": 1, "symlinkat": 0}
_OPENS_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_NOTIFY, _ALLOW = 0x7FC00000, 0x7FFF0000
_RECEIVE, _RESPOND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV and _SEND
_PR_SET_NO_NEW_PRIVS, _SET_MODE_FILTER, _NEW_LISTENER = 38, 1, 8
_SYS_SECCOMP = {_X86: 317, "aarch64": 277}


def _filter() -> bytes:
    """A BPF program: the calls above are reported, of those that open a file only the ones that may write."""
    machine = platform.machine()
    calls = _CALLS[machine]
    opening = {calls[name]: 16 + 8 * place for name, place in (("open", 1), ("openat", 2)) if name in calls}
    program = [(0x20, 0, 0, 4), (0x15, 1, 0, _AUDIT_ARCH[machine]), (0x06, 0, 0, _ALLOW), (0x20, 0, 0, 0)]
    for number in calls.values():
        if number in opening:  # load its flags; without one of writing: allow
            program += [(0x15, 0, 4, number), (0x20, 0, 0, opening[number]), (0x45, 1, 0, _OPENS_FOR_WRITING)]
            program += [(0x06, 0, 0, _ALLOW), (0x06, 0, 0, _NOTIFY)]
        else:
            program += [(0x15, 0, 1, number), (0x06, 0, 0, _NOTIFY)]
    program.append((0x06, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _report_file_operations() -> int:
    """Install the filter in this process; returns the descriptor that reports its operations."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = _filter()
    memory = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("H6xP", len(code) // 8, ctypes.addressof(memory))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    listener = libc.syscall(_SYS_SECCOMP[platform.machine()], _SET_MODE_FILTER, _NEW_LISTENER, program)
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return int(listener)


def _operations(listener: int, below: Path) -> Iterator[str]:
    """Each operation on a file, before it happens; it proceeds when the next one is requested."""
    names = {number: name for name, number in _CALLS[platform.machine()].items()}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while all(event & select.POLLIN for _, event in poll.poll()):
        notice = bytearray(80)
        try:
            fcntl.ioctl(listener, _RECEIVE, notice)
        except OSError:  # killed meanwhile
            continue
        number, pid, _, call, _, _, *arguments = struct.unpack("QIIiIQ6Q", notice)
        name = names[call]
        place = _place(pid, name, arguments)
        if Path(place).is_relative_to(below):
            yield f"{name} {Path(place).relative_to(below)}"
        try:
            fcntl.ioctl(listener, _RESPOND, bytearray(struct.pack("QqiI", number, 0, 0, 1)))
        except OSError:  # killed meanwhile
            continue


def _place(pid: int, name: str, arguments: list[int]) -> str:
    """The file of an operation, as far as it is known."""
    process = Path(f"/proc/{pid}")
    try:
        if name in _OF_A_DESCRIPTOR:
            return str((process / f"fd/{arguments[0]}").readlink())
        with (process / "mem").open("rb", buffering=0) as memory:
            place = _PATH_ARGUMENT.get(name, 0)
            memory.seek(arguments[place])
            path = memory.read(1024).split(b"\0")[0].decode(errors="replace")
        folder = process / "cwd"
        if place and arguments[0] < 1 << 31:
            folder = process / f"fd/{arguments[0]}"
        return str(folder.readlink() / path)
    except OSError:
        return "unknown"


def main() -> None:
    (text, _, nth), below = sys.argv[1].partition("#"), Path(sys.argv[2]).resolve()
    text, wanted = ("", int(text) or -1) if text.isdecimal() else (text, int(nth or 1))
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        listener = _report_file_operations()
        socket.send_fds(theirs, [b"x"], [listener])
        os.close(listener)
        ours.close()
        theirs.close()
        sys.argv = ["whet", *sys.argv[3:]]
        from whet.cli.app import main as whet

        whet()
        return
    theirs.close()
    _, [listener], _, _ = socket.recv_fds(ours, 1, 1)
    with (below / "operations.log").open("w") as log:
        for operation in _operations(listener, below):
            log.write(f"{operation}\n")
            wanted -= text in operation
            if not wanted:
                os.killpg(child, signal.SIGKILL)
                break
    os.close(listener)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
