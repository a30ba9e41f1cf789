"""Programs that try to escape the sandbox, to outlive it, or to exhaust the machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import pytest

from whet.inference.config import TaskConfig
from whet.inference.sandbox import ProgramResult, SandboxError, SandboxLimits, require_sandbox, run_program
from whet.inference.tasks.load_tasks import load_file_task
from whet.inference.tasks.scorers import make_unit_test_scorer
from whet.inference.tasks.task import Example

AMPLE = SandboxLimits(seconds=20)  # enough on a busy machine


def _permitted() -> bool:
    try:
        require_sandbox("strict")
    except SandboxError:
        return False
    return True


strict = pytest.mark.skipif(not _permitted(), reason="namespaces are not permitted here")


def output_of(code: str, limits: SandboxLimits = AMPLE) -> str:
    """The output of a program that must exit with 0."""
    result = run_program(code, limits)
    assert result.exit_code == 0, result
    return result.out.strip()


def attempt(code: str) -> str:
    """The result of an attempt: `done`, or the name of the exception."""
    indented = "\n".join(f"    {line}" for line in code.splitlines())
    return output_of(
        f"try:\n{indented}\n    print('done')\nexcept BaseException as error:\n    print(type(error).__name__)"
    )


@strict
def test_an_honest_program_runs_with_the_standard_library() -> None:
    result = run_program(
        "import json, math, re, collections, random, itertools\nprint(json.dumps({'a': math.sqrt(4)}))"
    )
    assert (result.exit_code, result.out, result.timed_out) == (0, '{"a": 2.0}\n', False)
    assert result.enforced == {"network": True, "files": True, "processes": True}


@strict
@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("raise SystemExit(3)", 3),
        ("import os; os._exit(7)", 7),
        ("raise SystemExit(97)", 97),
        ("raise SystemExit(98)", 98),
        ("1 / 0", 1),
        ("def", 1),
    ],
)
def test_the_exit_code_is_reported(code: str, ending: int) -> None:
    result = run_program(code)
    assert (result.exit_code, result.timed_out) == (ending, False)


@strict
def test_a_program_cannot_write_its_own_status() -> None:
    write = """os.write(number, b'{"error": "x"}\\n'); print(number)"""
    lie = f"import os\nfor number in range(3, 60):\n    try: {write}\n    except OSError: pass"
    result = run_program(lie)
    assert (result.exit_code, result.out) == (0, "")


@strict
def test_an_endless_loop_is_stopped() -> None:
    began = time.monotonic()
    assert run_program("while True: pass", SandboxLimits(seconds=0.5)).timed_out
    assert time.monotonic() - began < 5  # before the kill from outside


@strict
def test_a_program_that_ignores_signals_is_killed() -> None:
    ignore = "import signal, time\nfor n in {*range(1, 32)} - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
    assert run_program(ignore + "while True: time.sleep(1)", SandboxLimits(seconds=0.5)).timed_out


@strict
def test_a_fork_bomb_is_limited() -> None:
    result = run_program("import os\nwhile True:\n    os.fork()", AMPLE)
    assert result.timed_out or "BlockingIOError" in result.err
    assert output_of("import os\nfor n in range(50):\n    try: pid = os.fork()\n    except OSError: break\n"
                "    if not pid: __import__('time').sleep(9)\nprint(n)") in ("2", "3", "4", "5")  # fmt: skip


@strict
def test_memory_and_files_are_limited() -> None:
    assert attempt("bytearray(2**31)") == "MemoryError"
    assert attempt("f = open('x', 'wb')\nfor _ in range(64): f.write(bytes(2**20))") == "OSError"
    assert attempt("for n in range(9): open(f'{n}', 'wb').write(bytes(4 * 2**20))") == "OSError"
    assert attempt("for n in range(5000): open(f'{n}', 'w').close()") == "OSError"


@strict
def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert attempt(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)") in (
            "OSError",
            "ConnectionRefusedError",
        )
        with socket.create_connection(("127.0.0.1", port), 1):  # from here it can be reached
            pass
    assert attempt("import socket; socket.create_connection(('1.1.1.1', 53), 1)") == "OSError"
    name = f"\0whet-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as local:
        local.bind(name)
        local.listen()
        found = attempt(f"import socket; socket.socket(socket.AF_UNIX).connect({name!r})")
    assert found == "ConnectionRefusedError"


@strict
def test_files_of_this_machine_are_invisible(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("42")
    assert attempt(f"open({str(secret)!r})") == "FileNotFoundError"
    assert attempt(f"open({__file__!r})") == "FileNotFoundError"
    assert attempt("open('/etc/passwd')") == "FileNotFoundError"
    assert attempt("open('/etc/shadow')") == "FileNotFoundError"
    assert attempt("open('../outside', 'w')") in ("OSError", "PermissionError")
    assert attempt("open('/usr/outside', 'w')") in ("OSError", "PermissionError")
    assert attempt("import json; open(json.__file__, 'a')") in ("OSError", "PermissionError")
    assert output_of("import os; print(sorted(os.listdir('/work')))") == "[]"


@strict
def test_isolation_cannot_be_undone(tmp_path: Path) -> None:
    libc = "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
    for call in (
        "libc.mount(b'none', b'/', b'none', 32 | 4096, b'')",  # writable again
        "libc.umount2(b'/work', 2)",
        "libc.sethostname(b'x', 1)",
        "libc.setuid(1)",
        "libc.chroot(b'..')",
        "libc.unshare(0x10000000) or libc.mount(b'none', b'/usr', b'none', 32 | 4096, b'')",  # as root
    ):
        assert output_of(f"{libc}print({call})") == "-1", call
    outside = tmp_path / "mark"
    run_program(f"{libc}import os\nos.chdir('/')\nfor _ in range(20): os.chdir('..')\nopen('mark', 'w')")
    assert not outside.exists()


ENVIRONMENTS = """
import os, glob
print(os.environ)
for file in glob.glob('/proc/*/environ'):
    try:
        print(open(file, errors='replace').read())
    except OSError:
        pass
"""


@strict
def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    result = run_program(ENVIRONMENTS)
    assert "HOME" in result.out
    assert "hunter2" not in result.out + result.err


@strict
def test_other_processes_can_neither_be_seen_nor_killed() -> None:
    assert attempt(f"import os; os.kill({os.getpid()}, 9)") == "ProcessLookupError"
    assert attempt(f"import os; os.kill({os.getppid()}, 9)") == "ProcessLookupError"
    assert int(output_of("import os; print(max(int(n) for n in os.listdir('/proc') if n.isdigit()))")) < 20
    assert run_program("import os; os.kill(os.getppid(), 9)", AMPLE).exit_code in (0, 137)


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


@strict
def test_a_daemon_is_killed() -> None:
    """It leaves its session and its parent and keeps stdout open."""
    name, began = f"d{os.getpid()}", time.monotonic()
    result = run_program(DAEMON.replace("NAME", name), AMPLE)
    assert (result.exit_code, result.out) == (0, "left\n")
    assert time.monotonic() - began < 15
    assert _called(name) == []


def test_a_daemon_is_killed_in_mode_limits() -> None:
    name = f"l{os.getpid()}"
    try:
        result = run_program(DAEMON.replace("NAME", name), AMPLE, "limits")
    except SandboxError as error:
        pytest.skip(str(error))
    assert result.out == "left\n"
    assert result.enforced == {"network": False, "files": False, "processes": False}
    assert _called(name) == []


@strict
def test_a_running_daemon_is_found() -> None:
    """Proves that the two tests above can fail."""
    name = f"w{os.getpid()}"
    thread = Thread(target=run_program, args=(DAEMON.replace("NAME", name).replace("0.2", "2"), AMPLE))
    thread.start()
    until = time.monotonic() + 15
    while not (found := _called(name)) and time.monotonic() < until:
        time.sleep(0.05)
    thread.join()
    assert found
    assert _called(name) == []


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
import ctypes, os, sys
from whet.inference import sandbox_child
libc = ctypes.CDLL(None)
for number in range(64):
    libc.prctl(24, number, 0, 0, 0)  # no capability can come back
if os.getuid() == 0:
    os.setgroups([])
    os.setresgid(4242, 4242, 4242)
    os.setresuid(4242, 4242, 4242)
sandbox_child._NEWUSER, sandbox_child._STATUS_FD = 0, 1
request = {"strict": True, "number": 1, "seconds": 1, "folder": "/tmp", "python": [], "code": "print('ran')"}
sys.exit(sandbox_child.supervisor_process(request))
"""


def test_nothing_runs_without_namespaces() -> None:
    """As for an unprivileged user on a system without user namespaces."""
    done = subprocess.run([sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, check=False)
    assert done.returncode == 97, done.stderr
    assert done.stdout == '{"error": "[Errno 1] unshare: Operation not permitted"}\n'


FUNCTION = Example(
    ({"role": "user", "content": "?"},), ("",), "x:1",
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
