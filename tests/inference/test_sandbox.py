"""Programs that try to escape the sandbox, to outlive it, or to exhaust the machine: under bubblewrap, and under whet's
own namespaces."""

from __future__ import annotations

import functools
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from whet.data.conversation import Message
from whet.inference.config import TaskConfig
from whet.inference.sandbox import memory_totals
from whet.inference.sandbox.sandbox import (
    Launcher,
    ProgramResult,
    SandboxError,
    SandboxLimits,
    check_launcher,
    launch_program,
    require_sandbox,
    run_program,
)
from whet.inference.tasks.load_tasks import load_file_task
from whet.inference.tasks.scorers import make_unit_test_scorer
from whet.inference.tasks.task import Example

AMPLE = SandboxLimits(seconds=20)  # enough on a busy machine
SOURCE = Path(memory_totals.__file__).parents[3]


@functools.cache
def why_not(launcher: Launcher) -> str:
    """Why a launcher cannot be tested here; empty if it can. A fork bomb needs one whose limits hold."""
    try:
        check_launcher(launcher)
    except SandboxError as error:
        return str(error)
    return ""


@pytest.fixture
def strict_sandbox() -> None:
    if why_not("bubblewrap") and why_not("namespaces"):
        pytest.skip(why_not("namespaces"))


strict = pytest.mark.usefixtures("strict_sandbox")


@pytest.fixture(params=["bubblewrap", "namespaces"])
def launcher(request: pytest.FixtureRequest) -> Launcher:
    """Each of the two that isolate."""
    if why_not(request.param):
        pytest.skip(why_not(request.param))
    return request.param


def output_of(launcher: Launcher, code: str, limits: SandboxLimits = AMPLE) -> str:
    """The output of a program that must exit with 0."""
    result = launch_program(launcher, code, limits)
    assert result.exit_code == 0, result
    return result.out.strip()


ATTEMPTS = """
import ctypes, errno, json, os, socket
libc, found = ctypes.CDLL(None, use_errno=True), {}
def call(name, *arguments):
    ctypes.set_errno(0)
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)
for code in CODES:
    try:
        exec(code)
        found[code] = 'done'
    except OSError as error:
        found[code] = errno.errorcode[error.errno]
    except BaseException as error:
        found[code] = type(error).__name__
print(json.dumps(found))
"""


def attempt(launcher: Launcher, *codes: str) -> dict[str, str]:
    """The result of each attempt of a program: `done`, the name of the error number, or of the exception."""
    found: dict[str, str] = json.loads(output_of(launcher, ATTEMPTS.replace("CODES", repr(codes))))
    return found


def test_an_honest_program_runs_with_the_standard_library(launcher: Launcher) -> None:
    code = (
        "import json, math, re, collections, random, itertools, decimal, hashlib, sqlite3, ssl, zlib, ctypes, asyncio\n"
        "import threading, subprocess, sys, tempfile, shutil, datetime, statistics, zoneinfo, unittest\n"
        "thread = threading.Thread(target=print, args=('thread', ), daemon=True); thread.start(); thread.join()\n"
        "async def later():\n    await asyncio.sleep(0.001)\n    print('später')\n"
        "asyncio.run(later())\n"
        "file = tempfile.NamedTemporaryFile('w', dir='/work'); shutil.copy2(file.name, 'copy')\n"
        "print(subprocess.run([sys.executable, '-S', '-c', 'print(6 * 7)'], capture_output=True, text=True).stdout)"
    )
    result = launch_program(launcher, code, AMPLE)
    assert (result.exit_code, result.out, result.timed_out) == (0, "thread\nspäter\n42\n\n", False), result


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("raise SystemExit(3)", 3),
        ("import os; os._exit(7)", 7),
        ("raise SystemExit(97)", 97),
        ("1 / 0", 1),
        ("def", 1),
        ("'\ud800'", 1),
        ("import os; os.kill(os.getpid(), 15)", 143),
        ("import os; os.abort()", 134),
    ],
)
def test_the_exit_code_is_reported(launcher: Launcher, code: str, ending: int) -> None:
    result = launch_program(launcher, code, AMPLE)
    assert (result.exit_code, result.timed_out) == (ending, False)


def test_a_program_holds_no_descriptor_but_its_input_and_output(launcher: Launcher) -> None:
    """So there is none to report another result through."""
    lie = "import os\nfor number in range(3, 1100):\n    try: os.fstat(number); print(number)\n    except OSError: pass"
    assert output_of(launcher, lie) == ""
    forged = """print('{"exit-code": 0}'); import os; os.write(2, b'{"exit-code": 0}'); os._exit(5)"""
    assert launch_program(launcher, forged, AMPLE).exit_code == 5


def test_a_program_cannot_end_or_control_its_parent(launcher: Launcher) -> None:
    """Its parent exits with what is reported as the program's exit code."""
    kill = "for number in range(1, 65):\n    try: os.kill(1, number)\n    except OSError: pass\n"
    result = launch_program(launcher, f"import os, time\n{kill}time.sleep(0.05)\nos._exit(9)", AMPLE)
    assert result.exit_code == 9
    assert attempt(launcher, "call('ptrace', 16, 1, 0, 0)", "open('/proc/1/mem', 'r+b')", "open('/proc/1/fd/3')") == {
        "call('ptrace', 16, 1, 0, 0)": "ENOSYS", "open('/proc/1/mem', 'r+b')": "ENOENT",
        "open('/proc/1/fd/3')": "ENOENT",
    }  # fmt: skip


def test_an_endless_loop_is_stopped(launcher: Launcher) -> None:
    began = time.monotonic()
    assert launch_program(launcher, "while True: pass", SandboxLimits(seconds=0.5)).timed_out
    assert time.monotonic() - began < 60


def test_a_program_that_ignores_signals_is_killed(launcher: Launcher) -> None:
    ignore = "import os, signal, time\nfor n in {*range(1, 32)} - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
    code = ignore + "os.close(1); os.close(2)\nwhile True: time.sleep(1)"
    assert launch_program(launcher, code, SandboxLimits(seconds=0.5)).timed_out


def test_a_fork_bomb_is_limited(launcher: Launcher) -> None:
    result = launch_program(launcher, "import os\nwhile True:\n    os.fork()", AMPLE)
    assert result.timed_out or "BlockingIOError" in result.err
    code = (
        "import os\nfor n in range(50):\n    try: pid = os.fork()\n    except OSError: break\n"
        "    if not pid: __import__('time').sleep(9)\nprint(n)"
    )
    assert output_of(launcher, code) == "4"


UNCOUNTED = """
from whet.inference.sandbox import sandbox
sandbox._unused_uid = lambda: -1
for launcher in ("bubblewrap", "namespaces"):
    try:
        print(sandbox.check_launcher(launcher))
    except sandbox.SandboxError as error:
        print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root's processes are not counted")
def test_a_launcher_that_does_not_limit_processes_is_refused() -> None:
    """Root in a user namespace of one user: there the kernel does not count its processes."""
    done = subprocess.run(
        [sys.executable, "-c", UNCOUNTED], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(SOURCE), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    first, second = done.stdout.splitlines()
    assert first == why_not("bubblewrap") or "bubblewrap does not work: the number of processes is not limited" in first
    assert second == why_not("namespaces") or "namespaces does not work: the number of processes is not" in second


def test_memory_and_files_are_limited(launcher: Launcher) -> None:
    memory = ("bytearray(2**31)", "import mmap; mmap.mmap(-1, 2**30)")
    files = (
        "with open('x', 'wb') as f:\n for _ in range(64): f.write(bytes(2**20))",
        "for n in range(9): open(f'{n}', 'wb').write(bytes(4 * 2**20))",
        "os.truncate('x', 2**30)",
    )
    found = attempt(launcher, *memory, *files)
    assert list(found.values()) == ["MemoryError", "ENOMEM", "EFBIG", "ENOSPC", "EFBIG"]


def test_there_is_no_memory_outside_the_limit(launcher: Launcher) -> None:
    """Shared memory that does not count as a process's address space."""
    found = attempt(
        launcher, "os.memfd_create('x')", "call('shmget', 0, 2**20, 0o1600)", "call('msgget', 0, 0o1600)",
        "call('syscall', 447, 0)", "call('semget', 0, 1, 0o1600)", "open('/dev/shm/x', 'wb')", "open('/x', 'wb')",
        "open('/python/lib/x', 'wb')", "open('/dev/x', 'wb')",
    )  # fmt: skip
    assert list(found.values())[:5] == ["ENOSYS"] * 5, found
    assert set(list(found.values())[5:]) <= {"ENOENT", "EROFS", "EACCES"}, found


def test_all_processes_together_have_one_memory_limit(launcher: Launcher) -> None:
    code = (
        "import os, time\nfor _ in range(3):\n    if os.fork() == 0: break\n"
        "x = bytearray(b'x') * (70 * 2**20)\ntime.sleep(15)"
    )
    result = launch_program(launcher, code, SandboxLimits(seconds=15, memory_bytes=160 * 2**20))
    assert (result.exit_code, result.timed_out) == (137, False)
    assert "all processes together used more than 160 MiB" in result.err
    shared = code.replace("for _", "y = bytearray(b'y') * (70 * 2**20)\nfor _", 1).replace("x = ", "#")
    within = launch_program(launcher, shared.replace("15)", "0.3)"), SandboxLimits(memory_bytes=160 * 2**20))
    assert within.exit_code == 0, within


def test_the_number_of_files_is_limited(launcher: Launcher) -> None:
    result = launch_program(launcher, "for n in range(10**9): open(f'{n}', 'w').close()", AMPLE)
    assert result.exit_code != 0
    assert not result.timed_out
    assert "more than 1000 files" in result.err or "No space left" in result.err


def test_a_cgroup_limits_memory_where_one_can_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that looks like a cgroup: the parent of this process's group permits children with a limit."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/x\n0::/user/own\n")
    (tmp_path / "proc/self/mounts").write_text(f"proc /proc proc rw 0 0\ncgroup2 {tmp_path}/sys cgroup2 rw 0 0\n")
    (tmp_path / "sys/user/own").mkdir(parents=True)
    (tmp_path / "sys/user/own/cgroup.subtree_control").write_text("\n")
    (tmp_path / "sys/user/cgroup.subtree_control").write_text("cpu memory pids\n")
    monkeypatch.setattr(memory_totals, "_PROC", tmp_path / "proc")
    assert memory_totals._writable_cgroup.__wrapped__() == tmp_path / "sys/user"
    with memory_totals._new_group(tmp_path / "sys/user", 12345) as group:
        assert group.folder
        done = subprocess.run(
            [*group.command_prefix(), "/bin/sh", "-c", "echo $$"], capture_output=True, text=True, check=True
        )
        assert (group.folder / "cgroup.procs").read_text() == done.stdout
        assert (group.folder / "memory.max").read_text() == "12345"
        for kills in (0, 1):
            (group.folder / "memory.events").write_text(f"low 0\nhigh 0\nmax 7\noom {kills}\noom_kill {kills}\n")
            assert group.was_killed() == bool(kills)
    (tmp_path / "sys/user/cgroup.subtree_control").write_text("cpu\n")
    assert memory_totals._writable_cgroup.__wrapped__() is None


def test_there_is_no_network(launcher: Launcher) -> None:
    name = f"\0whet-{os.getpid()}-{launcher}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(name)
        local.listen()
        tcp = f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)"
        unix = f"socket.socket(socket.AF_UNIX).connect({name!r})"
        found = attempt(launcher, tcp, unix, "a, b = socket.socketpair(); a.send(b'x'); assert b.recv(1) == b'x'")
        with socket.create_connection(server.getsockname(), 1), socket.socket(socket.AF_UNIX) as other:
            other.connect(name)  # from here both can be reached
    assert list(found.values()) == ["EAFNOSUPPORT", "ECONNREFUSED", "done"]


def test_sockets_are_unix_sockets(launcher: Launcher) -> None:
    """No VSOCK to a hypervisor, no NETLINK, PACKET, ALG, XDP or QIPCRTR to the kernel's many parsers."""
    families = [family for family in range(50) if family != socket.AF_UNIX]
    codes = [f"call('{kind}', {family}, 1, 0, None)" for family in families for kind in ("socket", "socketpair")]
    codes.append(f"call('socket', {socket.AF_INET + 2**32}, 1, 0)")
    assert {*attempt(launcher, *codes).values()} <= {"EAFNOSUPPORT", "ArgumentError"}


def test_only_files_of_python_are_visible(launcher: Launcher, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("42")
    places = ["/etc", "/home", "/root", "/proc", "/sys", "/tmp", "/var", "/run", "/usr/bin", "/bin", "/usr/lib", "/mnt"]
    hidden = [f"os.stat({path!r})" for path in [*places, str(secret), __file__, str(SOURCE), f"{sys.prefix}/bin"]]
    assert {*attempt(launcher, *hidden).values()} == {"ENOENT"}
    walk = (
        "import os, json\nfiles = [os.path.join(d, f) for d, _, fs in os.walk('/') for f in fs]\n"
        "print(json.dumps([f for f in files if not f.startswith(('/python/', '/usr/share/zoneinfo/')) "
        "or '/site-packages/' in f or '/dist-packages/' in f]))"
    )
    found = {file for file in json.loads(output_of(launcher, walk)) if "/ld-" not in file}
    assert found == {"/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"}


def test_only_the_work_folder_is_writable(launcher: Launcher) -> None:
    codes = ["open('../x', 'w')", "open('/usr/x', 'w')", "open(json.__file__, 'a')", "os.mkdir('/python/x')",
             "os.mkdir(os.path.dirname(os.__file__) + '/site-packages/x')", "os.remove(json.__file__)",
             "os.chmod('/python', 0o777)", "os.rename('/work', '/x')", "os.mkdir('/x')", "os.link(json.__file__, 'x')",
             "os.mknod('x', 0o20666, os.makedev(1, 1))"]  # fmt: skip
    assert {*attempt(launcher, *codes).values()} <= {"EROFS", "EACCES", "EPERM", "EXDEV", "EBUSY", "ENOENT"}
    assert output_of(launcher, "import os; open('x', 'w').close(); print(os.listdir('/work'))") == "['x']"


def test_there_are_no_namespaces_and_mounts_from_inside(launcher: Launcher) -> None:
    clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    flags = [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80]
    unshare = [f"call('unshare', {flag})" for flag in flags]
    clones = [f"call('syscall', {clone}, {flag | 17}, 0, 0, 0, 0)" for flag in flags[:-1]]
    mounts = [
        "call('mount', b'none', b'/', b'none', 32 | 4096, b'')", "call('mount', b'x', b'/work', b'tmpfs', 0, b'')",
        "call('umount2', b'/work', 2)", "call('chroot', b'..')", "call('setns', 0, 0)", "call('sethostname', b'x', 1)",
        *(f"call('syscall', {number}, 0, 0, 0, 0, 0)" for number in (428, 429, 430, 431, 432, 433, 435, 442)),
    ]  # fmt: skip
    found = attempt(launcher, *unshare, *clones, *mounts)
    assert {found[code] for code in unshare + mounts} == {"ENOSYS"}, found
    assert {found[code] for code in clones} == {"EPERM"}, found


def test_system_calls_that_python_does_not_use_do_not_exist(launcher: Launcher) -> None:
    """io_uring, pidfd_getfd, pidfd_open; bpf, perf_event_open, userfaultfd, and those of the future."""
    numbers = [425, 426, 427, 434, 438, 450, 500, 1000]
    numbers += {"x86_64": [321, 298, 323, 310, 311, 272, 135, 304, 162], "aarch64": [280, 241, 282]}[platform.machine()]
    found = attempt(launcher, *(f"call('syscall', {number}, 0, 0, 0, 0, 0)" for number in numbers))
    assert {*found.values()} == {"ENOSYS"}, found


@pytest.mark.skipif(platform.machine() != "x86_64", reason="an ABI of x86_64")
@pytest.mark.parametrize("abi", ["x32", "i386"])
def test_calls_of_another_abi_kill(launcher: Launcher, abi: str) -> None:
    code = {
        "x32": "import ctypes; ctypes.CDLL(None).syscall(0x40000000 | 39)",
        "i386": "import ctypes, mmap\npage = mmap.mmap(-1, 4096, prot=7)\n"
        "page.write(bytes.fromhex('b814000000cd80c3'))\n"  # mov eax, 20 (getpid); int 0x80; ret
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()",
    }[abi]
    assert launch_program(launcher, code + "\nprint('done')", AMPLE).exit_code == 128 + signal.SIGSYS


def test_keys_cannot_be_reached(launcher: Launcher) -> None:
    numbers = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}[platform.machine()]
    add, request, control = (f"call('syscall', {number}" for number in numbers)
    codes = [f"{add}, b'user', b'x', b'y', 1, -3)", f"{request}, b'user', b'whet', 0, 0)"]
    codes += [f"{control}, {operation}, -3, 0, 0, 0)" for operation in (0, 5, 6, 10, 11, 18)]
    codes += [f"{control}, 1, b'name')"]
    assert {*attempt(launcher, *codes).values()} == {"ENOSYS"}


KEYRINGS = """
import ctypes, sys
from whet.inference.sandbox import sandbox_child
libc, keyctl = ctypes.CDLL(None), sandbox_child._KEYCTL[__import__('platform').machine()]
libc.syscall(keyctl, 1, None)
before = libc.syscall(keyctl, 0, -3, 0)
key = libc.syscall(keyctl - 2, b'user', b'whet-test', b'secret', 6, -3)
sandbox_child.leave_session()
print(before != libc.syscall(keyctl, 0, -3, 0), key > 0, libc.syscall(keyctl, 10, -3, b'user', b'whet-test', 0))
"""


def test_a_sandbox_has_a_new_session_keyring() -> None:
    command = [sys.executable, "-c", KEYRINGS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(SOURCE)})
    if "False" in done.stdout:
        pytest.skip("keyctl is not permitted here")
    assert done.stdout == "True True -1\n"


def test_there_are_no_privileges(launcher: Launcher) -> None:
    codes = ["os.setresuid(0, 0, 0)", "os.setgroups([0])", "os.chown('/work', 0, 0)", "os.chown('/dev/null', 1, 1)",
             "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (65, 65))",
             "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))"]  # fmt: skip
    assert {*attempt(launcher, *codes).values()} <= {"EPERM", "EINVAL", "EROFS", "ValueError"}
    assert output_of(launcher, "import os; print(0 in (*os.getresuid(), *os.getresgid(), *os.getgroups()))") == "False"


def test_the_environment_is_empty(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    names = json.loads(output_of(launcher, "import os, json; print(json.dumps([*os.environ]))"))
    assert {*names} <= {"PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PWD"}


def test_other_processes_can_neither_be_seen_nor_killed(launcher: Launcher) -> None:
    codes = [f"os.kill({pid}, 9)" for pid in (os.getpid(), os.getppid())]
    assert {*attempt(launcher, *codes).values()} == {"ESRCH"}
    assert int(output_of(launcher, "import os; print(os.getpid())")) < 20


DAEMON = """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, b'NAME', 0, 0, 0)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
time.sleep(0.2)
print('left')
"""


def _called(name: str) -> list[str]:
    """The processes of this machine with a name."""
    found = []
    for file in Path("/proc").glob("[0-9]*/comm"):
        try:
            found += [file.parent.name] if file.read_text().strip() == name else []
        except OSError:
            continue
    return found


def test_a_daemon_is_killed(launcher: Launcher) -> None:
    """It leaves its session and its parent and keeps stdout open."""
    name, began = f"{launcher[0]}{os.getpid()}", time.monotonic()
    result = launch_program(launcher, DAEMON.replace("NAME", name), AMPLE)
    assert (result.exit_code, result.out) == (0, "left\n")
    assert time.monotonic() - began < 60
    assert _called(name) == []


def test_a_daemon_is_killed_in_mode_limits() -> None:
    if why_not("limits"):
        pytest.skip(why_not("limits"))
    name = f"l{os.getpid()}"
    assert run_program(DAEMON.replace("NAME", name), AMPLE, "limits").out == "left\n"
    assert _called(name) == []


WHET = """
import sys
from whet.inference.sandbox.sandbox import SandboxLimits, launch_program
launch_program(sys.argv[1], sys.argv[2], SandboxLimits(seconds=100))
"""


def test_all_processes_die_with_whet(launcher: Launcher) -> None:
    name = f"k{launcher[0]}{os.getpid()}"
    command = [sys.executable, "-c", WHET, launcher, DAEMON.replace("NAME", name).replace("0.2", "99")]
    whet = subprocess.Popen(command, env={"PYTHONPATH": str(SOURCE), "PATH": os.environ["PATH"]})
    _wait_for(lambda: len(_called(name)) >= 2)  # which also proves that the tests above can fail
    whet.kill()
    whet.wait()
    _wait_for(lambda: not _called(name))


def _wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@strict
def test_output_is_limited() -> None:
    result = run_program("while True: print('x' * 1000)", SandboxLimits(seconds=0.5))
    assert result.timed_out
    assert len(result.out) == 64 * 1024


@strict
def test_concurrent_sandboxes_are_independent() -> None:
    found: list[ProgramResult] = []
    threads = [Thread(target=lambda n=n: found.append(run_program(f"print({n})"))) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result.out for result in found) == [f"{n}\n" for n in range(6)]


FORBIDDEN = """
import platform
from whet.inference.sandbox.sandbox import SandboxError, run_program
from whet.inference.sandbox.namespaces import install_seccomp_filter
from whet.inference.sandbox.seccomp import seccomp_filter
install_seccomp_filter(seccomp_filter(platform.machine()))
try:
    print(run_program("print('ran')"))
except SandboxError as error:
    print(error)
"""


def test_nothing_runs_without_namespaces() -> None:
    """As in a container whose seccomp profile lacks them."""
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(SOURCE), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.stdout.startswith("eval.sandbox: strict does not work on this machine, so generated code is not run (")
    assert "the sandbox cannot be set up by namespaces: [Errno 38] unshare: Function not implemented" in done.stdout
    assert "eval.sandbox=limits" in done.stdout
    assert "ran" not in done.stdout.replace("rand", "")


FULL = """
import os, resource, sys
from whet.inference.sandbox.sandbox import SandboxError, SandboxLimits, launch_program
resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
try:
    launch_program(sys.argv[1], "", SandboxLimits())
except SandboxError as error:
    print(error)
"""


def test_a_sandbox_that_cannot_be_set_up_is_no_wrong_answer(launcher: Launcher) -> None:
    """But an error: the score would look like the model's."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, launcher], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(SOURCE), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.stdout == f"the sandbox cannot be set up by {launcher}: [Errno 24] Too many open files\n"


def test_bubblewrap_is_used_where_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why_not("bubblewrap") or why_not("namespaces"):
        pytest.skip(why_not("bubblewrap") or why_not("namespaces"))
    choose = require_sandbox.__wrapped__
    assert choose("strict") == "bubblewrap"
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: no' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert choose("strict") == "namespaces"
    broken.unlink()
    assert choose("strict") == "namespaces"


FUNCTION = Example(
    (Message("user", "?"),), ("",), "x:1",
    extra={
        "prompt": 'from math import pi\n\n\ndef area(r):\n    """The area of a circle."""\n', "entry_point": "area",
        "test": "def check(candidate):\n    assert abs(candidate(1) - 3.14159) < 1e-3\n    assert candidate(0) == 0\n",
    },
)  # fmt: skip


@strict
@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("    return pi * r * r\n", 1),
        ("```python\ndef area(r):\n    return pi * r ** 2\n```\nThat is it.", 1),
        ("Here:\n```python\nfrom math import pi as p\n\ndef area(r):\n    return p * r * r\n```", 1),
        ("```python\ndef area(r):\n    return 3 * r\n```", 0),
        ("", 0),
        ("def area(r):\n    import os\n    os._exit(0)", 0),
        ("def area(r):\n    raise SystemExit(0)", 0),
        ("def area(r):\n    import time\n    time.sleep(99)", 0),
        ("I cannot do that.", 0),
    ],
)
def test_generated_functions_are_scored_by_their_tests(answer: str, right: int) -> None:
    assert make_unit_test_scorer("strict").score(answer, FUNCTION) == right


@strict
def test_a_human_eval_file_is_a_task(tmp_path: Path) -> None:
    file = tmp_path / "HumanEval.jsonl"
    file.write_text(json.dumps({"task_id": "x/0", "canonical_solution": "    return pi * r * r\n", **FUNCTION.extra}))
    task = load_file_task(TaskConfig(path=str(file)), 5, "strict")
    (found,) = task.examples(5)
    assert "def area(r)" in found.prompt
    assert task.scorer.score(found.expected, found) == 1
