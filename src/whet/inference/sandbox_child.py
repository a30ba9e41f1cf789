"""The child process of the sandbox: a script that isolates itself and then runs a program. Standard library only.

Three processes, so that nothing outlives the program:
    supervisor  creates the namespaces, enforces the time limit, and kills;
    init        is PID 1 of a PID namespace: when it exits, the kernel kills all processes inside, daemons too;
    program     runs the code, unprivileged, in a root folder with Python and one empty writable folder.
The script reads a JSON object with limits and code from stdin. It writes what is enforced, and the program's exit code,
to the file descriptor named by its argument. The program cannot: that descriptor is closed for it.
"""

# Importing pathlib would take half of the sandbox's start-up time.
# ruff: noqa: PTH102, PTH103, PTH110, PTH112, PTH113, PTH114, PTH115, PTH116, PTH120, PTH123, PTH208, PTH211

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_BIND, _REC, _PRIVATE, _DETACH = 4096, 16384, 1 << 18, 2
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8
_MOUNT_SETATTR, _ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV, _AT_RECURSIVE, _AT_FDCWD = 442, 1, 2, 4, 0x8000, -100
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "ppc64le": 203, "riscv64": 41, "s390x": 217}
_DEATH_SIGNAL, _NO_NEW_PRIVILEGES, _SUBREAPER, _DUMPABLE = 1, 38, 36, 4
_SYSTEM_PATHS = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_FIRST_UNUSED_UID = 2_000_000_000  # one per sandbox: RLIMIT_NPROC counts processes by user
_IGNORED_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ)  # as in Python: a file over its limit is an OSError
_STATUS_FD = 3
_EXIT_UNSUPPORTED = 97

_libc = ctypes.CDLL(None, use_errno=True)


def _libc_call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _libc_call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def _make_read_only(path: str) -> None:
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
    _libc_call("syscall", _MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, ctypes.byref(attributes), 32)


def unshare_namespaces() -> None:
    """Enter new UTS, IPC, PID and network namespaces. Users other than root need a user namespace to be allowed to."""
    me, group = os.getuid(), os.getgid()
    others = _NEWUTS | _NEWIPC | _NEWPID | _NEWNET
    if me == 0:
        _libc_call("unshare", others)
        return
    _libc_call("unshare", _NEWUSER | others)
    for file, text in (("setgroups", "deny"), ("uid_map", f"0 {me} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{file}", "w") as map_:
            map_.write(text)


def enter_sandbox_root(folder: str, python: list[str], file_bytes: int) -> None:
    """Switch to a root folder with Python and system libraries, read-only, and one empty writable tmpfs."""
    _libc_call("unshare", _NEWNS)  # not in the supervisor, which needs the real /proc to kill
    _mount("none", "/", "none", _REC | _PRIVATE)
    _mount("sandbox", folder, "tmpfs", _NOSUID | _NODEV, "size=16m,mode=755")
    for path in dict.fromkeys([*_SYSTEM_PATHS, *python]):
        target = folder + path
        if os.path.islink(path) and path in _SYSTEM_PATHS:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(os.readlink(path), target)
        elif os.path.isdir(path) and not os.path.exists(target):
            os.makedirs(target)
            _mount(path, target, "none", _BIND | _REC)
            _make_read_only(target)
        elif os.path.isfile(path) and not os.path.exists(target):
            _bind_file(path, target)
            _make_read_only(target)
    for device in _DEVICES:
        _bind_file(device, folder + device)
    for name in ("/work", "/proc"):
        os.mkdir(folder + name)
    _mount("work", f"{folder}/work", "tmpfs", _NOSUID | _NODEV, f"size={file_bytes},nr_inodes=1000,mode=777")
    with contextlib.suppress(OSError):  # some containers forbid it, and it is not required
        _mount("proc", f"{folder}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    os.chdir(folder)
    _libc_call("syscall", _PIVOT_ROOT[platform.machine()], b".", b".")
    _libc_call("umount2", b".", _DETACH)
    os.chdir("/work")
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY, 0, 0, 0)
    _libc_call("syscall", _MOUNT_SETATTR, _AT_FDCWD, b"/", 0, ctypes.byref(attributes), 32)


def _bind_file(path: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, target, "none", _BIND)


def drop_privileges(uid: int | None) -> None:
    """Drop all privileges for good. `uid`: the user that root changes to; None if not root."""
    if uid is not None:
        with contextlib.suppress(OSError):
            os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    else:  # root of its own user namespace: drop the capabilities that come with it
        for capability in range(64):
            _libc.prctl(24, capability, 0, 0, 0)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        _libc_call("capset", header, (ctypes.c_uint32 * 6)())
    _libc_call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _libc_call("prctl", _DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def set_resource_limits(limits: dict[str, Any], extra_processes: int) -> None:
    """Set the rlimits, which processes that the program starts inherit."""
    for resource_, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_CPU, int(limits["seconds"]) + 1),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"] + extra_processes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(resource_, (value, value))


def exec_code(code: str) -> int:
    """Run the code in this process; return its exit code."""
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN if number in _IGNORED_SIGNALS else signal.SIG_DFL)
    sys.stdin = io.StringIO()
    try:
        exec(compile(code, "<answer>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1 if error.code else 0
    except BaseException as error:
        with contextlib.suppress(BaseException):
            sys.stderr.write(f"{type(error).__name__}: {error}"[:2000] + "\n")
        status = 1
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    return status & 255


def program_process(limits: dict[str, Any], extra_processes: int, code: str) -> NoReturn:
    """The process of the program."""
    status = 1
    try:
        os.setsid()
        os.close(_STATUS_FD)
        set_resource_limits(limits, extra_processes)
        status = exec_code(code)
    finally:
        os._exit(status)


def init_process(request: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> NoReturn:
    """PID 1 of the PID namespace."""
    try:
        enter_sandbox_root(request["folder"], request["python"], request["file_bytes"])
        drop_privileges(request["user"])
        report({"enforced": {"network": True, "files": True, "processes": True}})
        child = os.fork()
        if child == 0:
            program_process(request, 3, request["code"])
        os.close(_STATUS_FD)
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        while True:
            pid, status = os.wait()
            if pid == child:
                os._exit(_shell_exit_code(status))
    except BaseException as error:
        with contextlib.suppress(OSError):
            report({"error": str(error) or type(error).__name__})
        os._exit(_EXIT_UNSUPPORTED)


def enter_limits_only(request: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
    """Mode `limits`: only privileges are dropped; root changes to a user whose processes can be counted."""
    drop_privileges(request["user"])
    hidden = [path for path in request["python"] if not os.access(path, os.R_OK | os.X_OK)]
    if hidden:
        report({"error": f"{hidden[0]}, the folder of Python, is not readable by unprivileged users"})
        os._exit(_EXIT_UNSUPPORTED)
    report({"enforced": {"network": False, "files": False, "processes": False}})


def _shell_exit_code(status: int) -> int:
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def supervisor_process(request: dict[str, Any]) -> int:
    """Start the program, kill it at the time limit, and report its exit code; None if it was killed."""

    def report(found: dict[str, Any]) -> None:
        os.write(_STATUS_FD, json.dumps(found).encode() + b"\n")

    _libc_call("prctl", _DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    request["user"] = _FIRST_UNUSED_UID + request["number"] if os.getuid() == 0 else None
    if request["strict"]:
        try:
            unshare_namespaces()
        except OSError as error:
            report({"error": str(error)})
            return _EXIT_UNSUPPORTED
    else:
        _libc_call("prctl", _SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child == 0:
        if request["strict"]:
            init_process(request, report)
        enter_limits_only(request, report)
        program_process(request, _user_process_count() if request["user"] is None else 0, request["code"])
    deadline = time.monotonic() + request["seconds"]
    status = None
    while status is None and time.monotonic() < deadline:
        pid, ended = os.waitpid(child, os.WNOHANG)
        status = _shell_exit_code(ended) if pid else None
        if status is None:
            time.sleep(0.002)
    _kill_descendants()
    report({"code": status})
    return 0


def _user_process_count() -> int:
    """The number of this user's processes, which RLIMIT_NPROC counts together with the sandbox's."""
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            count += name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid()
    return count


def _kill_descendants() -> None:
    """Kill all descendants. Orphaned ones become children of this process, because it is a subreaper."""
    for _ in range(1000):
        for pid in _child_pids():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            time.sleep(0.002)


def _child_pids() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


if __name__ == "__main__":
    _given_fd = int(sys.argv[1])
    if _given_fd != _STATUS_FD:
        os.dup2(_given_fd, _STATUS_FD)
        os.close(_given_fd)
    sys.exit(supervisor_process(json.load(sys.stdin)))
