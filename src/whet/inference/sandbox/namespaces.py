"""Launches a sandbox where bubblewrap does not: a script that isolates a child process and runs a command in it.
Standard library only. Its argument is a JSON object, see `main`; it exits as the command does.

With `strict` it does what bubblewrap does: namespaces, a root folder of its own, the seccomp filter. Without, it only
installs the filter, ends the command after a time limit, and kills what the command leaves behind.
"""

# Importing pathlib and typing would take half of the start-up time.
# ruff: noqa: PTH102, PTH103, PTH112, PTH120, PTH123, PTH208

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_BIND, _REC, _PRIVATE, _DETACH = 4096, 16384, 1 << 18, 2
_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
_MOUNT_SETATTR, _AT_RECURSIVE, _AT_FDCWD = 442, 0x8000, -100
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
# prctl
_DEATH_SIGNAL, _DUMPABLE, _SET_SECCOMP, _DROP_BOUNDING_CAPABILITY, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 22, 24, 36, 38
_SECCOMP_FILTER = 2
_CAP_SETGID, _CAP_SETUID = 6, 7
_MAX_FILES = 1000

_libc = ctypes.CDLL(None, use_errno=True)


def _libc_call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _libc_call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def _make_read_only(path: str, flags: int = _AT_RECURSIVE) -> None:
    attributes = (ctypes.c_uint64 * 4)(_RDONLY | _NOSUID, 0, 0, 0)
    _libc_call("syscall", _MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, ctypes.byref(attributes), 32)


def unshare_namespaces(uid: int) -> None:
    """Enter new namespaces; the children are in the PID namespace. Without a user id to change to, that takes a user
    namespace. There this process is not root, so that it loses its privileges with the next execve."""
    me, group = os.getuid(), os.getgid()
    others = _NEWCGROUP | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET
    if uid >= 0:
        _libc_call("unshare", others)
        return
    _libc_call("unshare", _NEWUSER | others)
    for file, text in (("setgroups", "deny"), ("uid_map", f"65534 {me} 1"), ("gid_map", f"65534 {group} 1")):
        with open(f"/proc/self/{file}", "w") as map_:
            map_.write(text)


def enter_sandbox_root(
    folder: str, files: list[list[str]], empty: list[str], devices: list[str], file_bytes: int
) -> None:
    """Switch to a root folder with the given files, read-only, and one empty writable tmpfs, /work."""
    _libc_call("unshare", _NEWNS)
    _mount("none", "/", "none", _REC | _PRIVATE)
    _mount("sandbox", folder, "tmpfs", _NOSUID | _NODEV, "size=16m,mode=755")
    for source, target in files:
        _bind(source, folder + target)
        _make_read_only(folder + target)
    for path in empty:
        _mount("empty", folder + path, "tmpfs", _NOSUID | _NODEV | _RDONLY)
    for device in devices:
        _bind(device, folder + device)
    os.mkdir(f"{folder}/work")
    options = f"size={file_bytes},nr_inodes={_MAX_FILES},mode=777"
    _mount("work", f"{folder}/work", "tmpfs", _NOSUID | _NODEV, options)
    os.chdir(folder)
    _libc_call("syscall", _PIVOT_ROOT[os.uname().machine], b".", b".")
    _libc_call("umount2", b".", _DETACH)
    os.chdir("/work")
    _make_read_only("/", 0)


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, "none", _BIND | _REC)


def drop_capabilities() -> None:
    """Leave to the command, if it is root's, only what it takes to become another user."""
    for capability in range(64):
        if capability not in (_CAP_SETGID, _CAP_SETUID):
            _libc.prctl(_DROP_BOUNDING_CAPABILITY, capability, 0, 0, 0)


def install_seccomp_filter(program: bytes) -> None:
    """Install the filter for this process and all it starts, for good."""
    _libc_call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    array = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(array)))
    _libc_call("prctl", _SET_SECCOMP, _SECCOMP_FILTER, header, 0, 0)


def command_process(request: dict[str, Any]) -> NoReturn:
    """The child: isolates itself and becomes the command."""
    try:
        _libc_call("prctl", _DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if request["strict"]:
            enter_sandbox_root(
                request["folder"], request["files"], request["empty"], request["devices"], request["file_bytes"]
            )
        else:
            os.chdir(request["folder"])
        drop_capabilities()
        install_seccomp_filter(bytes.fromhex(request["filter"]))
        os.execve(request["command"][0], request["command"], request["environment"])
    except BaseException as error:
        _fail(error)


def _fail(error: BaseException) -> NoReturn:
    os.write(2, f"{error}\n".encode())
    os._exit(1)


def wait_for_command(child: int, seconds: float) -> int | None:
    """The exit code of the child; None if it runs longer."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        signal.sigtimedwait([signal.SIGCHLD], left)
    return None


def _kill_descendants() -> None:
    """Kill all descendants. Orphaned ones become children of this process, because it is a subreaper."""
    for _ in range(1000):
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            for child in _child_pids():
                with contextlib.suppress(OSError):
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.002)


def _child_pids() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


def main(request: dict[str, Any]) -> NoReturn:
    """Run `command` and exit with its code; by SIGALRM if it ran longer than `seconds`."""
    _libc_call("prctl", _DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    try:
        if request["strict"]:
            unshare_namespaces(request["uid"])
        else:
            _libc_call("prctl", _SUBREAPER, 1, 0, 0, 0)
        _libc_call("prctl", _DUMPABLE, 0, 0, 0, 0)  # closed to the program, which may be of the same user
        child = os.fork()
    except OSError as error:
        _fail(error)
    if child == 0:
        command_process(request)
    code = wait_for_command(child, request["seconds"])
    _kill_descendants()
    if code is None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGALRM)
    os._exit(code or 0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
