"""The other side of the sandbox: a script that locks itself in and then runs a program. Only the standard library.

Three processes, so that nothing can outlive the program:
    outer   makes the namespaces, waits, keeps the clock, and kills;
    first   is number 1 of a process namespace: when it ends, the kernel kills everything inside, daemons too;
    program runs the code, without rights, inside a root folder that holds Python and one empty folder to write to.
It reads a JSON object with the limits and the code from stdin, and tells on the descriptor that its argument names what
is enforced, and how the program ended. The program itself cannot: it has no such descriptor.
"""

# pathlib would be half of the time that a sandbox takes to start:
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
_FIRST_UNUSED_UID = (
    2_000_000_000  # ids from here belong to no one; one for each sandbox, so that processes are counted apart
)
_IGNORED_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ)  # as Python has it: a file that grows too large is an OSError
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
    """Namespaces of its own. Root needs no user namespace; anyone else gets the rights to the others through one."""
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
    """A root folder with Python and the system's libraries, read-only, and one empty folder in memory to write to."""
    _libc_call("unshare", _NEWNS)  # not in `outer`, which must go on seeing the real /proc to kill
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
    with contextlib.suppress(OSError):  # some containers forbid it; nothing here needs it
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


def drop_privileges(number: int | None) -> None:
    """No rights, and no way to new ones. `number`: of the user to become, for root; others stay who they are."""
    if number is not None:
        with contextlib.suppress(OSError):
            os.setgroups([])
        os.setresgid(number, number, number)
        os.setresuid(number, number, number)
    else:  # root of a user namespace of its own: give up what that brought
        for capability in range(64):
            _libc.prctl(24, capability, 0, 0, 0)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        _libc_call("capset", header, (ctypes.c_uint32 * 6)())
    _libc_call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _libc_call("prctl", _DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def set_resource_limits(limits: dict[str, Any], processes_more: int) -> None:
    """Limits of the system for the program and all that it starts."""
    for what, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_CPU, int(limits["seconds"]) + 1),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"] + processes_more),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (value, value))


def exec_code(code: str) -> int:
    """The program in this process; its exit code."""
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


def program_process(limits: dict[str, Any], more: int, code: str) -> NoReturn:
    """Never returns."""
    status = 1
    try:
        os.setsid()
        os.close(_STATUS_FD)
        set_resource_limits(limits, more)
        status = exec_code(code)
    finally:
        os._exit(status)


def init_process(order: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> NoReturn:
    """Number 1 of the process namespace. Never returns."""
    try:
        enter_sandbox_root(order["folder"], order["python"], order["file_bytes"])
        drop_privileges(order["user"])
        tell({"enforced": {"network": True, "files": True, "processes": True}})
        child = os.fork()
        if child == 0:
            program_process(order, 3, order["code"])
        os.close(_STATUS_FD)
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        while True:
            pid, status = os.wait()
            if pid == child:
                os._exit(_shell_exit_code(status))
    except BaseException as error:
        with contextlib.suppress(OSError):
            tell({"error": str(error) or type(error).__name__})
        os._exit(_EXIT_UNSUPPORTED)


def enter_limits_only(order: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Where there are only limits: root still becomes someone else, for whom alone processes are counted."""
    drop_privileges(order["user"])
    hidden = [path for path in order["python"] if not os.access(path, os.R_OK | os.X_OK)]
    if hidden:
        tell({"error": f"{hidden[0]}, where Python is, cannot be read by a user without rights"})
        os._exit(_EXIT_UNSUPPORTED)
    tell({"enforced": {"network": False, "files": False, "processes": False}})


def _shell_exit_code(status: int) -> int:
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def supervisor_process(order: dict[str, Any]) -> int:
    """Tells the exit code of the program, if it ended in time; its own is 0 if there was one."""

    def tell(found: dict[str, Any]) -> None:
        os.write(_STATUS_FD, json.dumps(found).encode() + b"\n")

    _libc_call("prctl", _DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    order["user"] = _FIRST_UNUSED_UID + order["number"] if os.getuid() == 0 else None
    if order["strict"]:
        try:
            unshare_namespaces()
        except OSError as error:
            tell({"error": str(error)})
            return _EXIT_UNSUPPORTED
    else:
        _libc_call("prctl", _SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child == 0:
        if order["strict"]:
            init_process(order, tell)
        enter_limits_only(order, tell)
        program_process(order, _user_process_count() if order["user"] is None else 0, order["code"])
    until = time.monotonic() + order["seconds"]
    status = None
    while status is None and time.monotonic() < until:
        pid, ended = os.waitpid(child, os.WNOHANG)
        status = _shell_exit_code(ended) if pid else None
        if status is None:
            time.sleep(0.002)
    _kill_descendants()
    tell({"code": status})
    return 0


def _user_process_count() -> int:
    """Processes of this user: where they cannot be counted apart, the limit is above them."""
    mine = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            mine += name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid()
    return mine


def _kill_descendants() -> None:
    """Everything below this process. Those that ran from their parents come here, because it is their reaper."""
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
