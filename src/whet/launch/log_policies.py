"""launch.log_policies: what a line in the output of a crashed run means for its restart.

The output of the processes passes through a pipe, line by line, only if there are policies: without them the processes
write to the terminal themselves, with their progress bars.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whet.core.console import warn
from whet.core.display import mask_secrets
from whet.core.limits import limited
from whet.launch.config import LogPolicy

EXCLUDED_VARIABLE = "WHET_EXCLUDED_NODES"
"""Environment variable with the file to which a node is added that Slurm shall exclude; see slurm_script.py."""
_STDOUT, _STDERR = 1, 2
_MATCH_S = 1.0
_LINE_BYTES = 2**16
_SHOWN = 300
_NEVER = "(?!)"
_LINE_END = re.compile(rb"[\r\n]+")


@dataclass(frozen=True, slots=True)
class PolicyMatch:
    """A line that a policy matched."""

    pattern: str
    action: Literal["give_up", "exclude_node"]
    line: str

    def __str__(self) -> str:
        return f"launch.log_policies: {self.pattern!r} ({self.action}) matches the line {self.line!r}"


class ProcessOutput:
    """The output of one attempt: copied to where it would go, and compared with the policies. The first policy of the
    list that matches wins.

    `stdout` and `stderr` are for the processes.
    """

    def __init__(self, policies: Sequence[LogPolicy], stdout: int | None) -> None:
        self.stdout, self.stderr = stdout, _STDERR
        self._policies = list(policies)
        self._matches: dict[int, PolicyMatch] = {}
        self._targets: dict[int, int] = {}
        """Pipe → where its content is copied to."""
        self._rests: dict[int, bytes] = {}
        """Pipe → the beginning of a line."""
        if policies:
            self.stderr = self._make_pipe(_STDERR)
            self.stdout = self.stderr if stdout == _STDERR else self._make_pipe(_STDOUT if stdout is None else stdout)

    def _make_pipe(self, target: int) -> int:
        pipe, end = os.pipe()
        os.set_blocking(pipe, False)
        self._targets[pipe], self._rests[pipe] = target, b""
        return end

    @property
    def match(self) -> PolicyMatch | None:
        return self._matches[min(self._matches)] if self._matches else None

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """While the processes run, which have been started; at the end, what they left in the pipes is read too."""
        if self._targets:
            for end in {self.stdout, self.stderr}:
                os.close(end)  # type: ignore[arg-type]
        try:
            yield
        finally:
            for pipe in list(self._targets):
                while self._copy(pipe):
                    pass
                self._close(pipe)

    def wait(self, process: subprocess.Popen[bytes], seconds: float) -> int | None:
        """The exit code, or None if the process is still running after so many seconds or after some output."""
        if not self._targets:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=seconds)
            return None
        for pipe in select.select(list(self._targets), [], [], seconds)[0]:
            self._copy(pipe)
        return process.poll()

    def _copy(self, pipe: int) -> bool:
        """Copy what is there; False if nothing is, or nothing will come."""
        if pipe not in self._targets:
            return False
        try:
            data = os.read(pipe, _LINE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close(pipe)
            return False
        with contextlib.suppress(OSError):  # nobody reads it: the run goes on
            _write_all(self._targets[pipe], data)
        *lines, rest = _LINE_END.split(self._rests[pipe] + data)
        if len(rest) > _LINE_BYTES:
            lines, rest = [*lines, rest], b""
        self._rests[pipe] = rest
        for line in lines:
            self._compare(line)
        return True

    def _close(self, pipe: int) -> None:
        if self._targets.pop(pipe, None) is not None:
            self._compare(self._rests.pop(pipe))
            os.close(pipe)

    def _compare(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        for place, policy in enumerate(self._policies):
            if place in self._matches or policy.pattern == _NEVER:
                continue
            try:
                with limited(_MATCH_S, TimeoutError):
                    found = re.search(policy.pattern, text)
            except TimeoutError as error:
                warn(f"launch.log_policies: {policy.pattern!r}: {error} on one line. It is not used any more")
                self._policies[place] = policy.model_copy(update={"pattern": _NEVER})
                continue
            if found:
                shown = mask_secrets(text.strip()[:_SHOWN])
                self._matches[place] = PolicyMatch(policy.pattern, policy.action, shown)


def _write_all(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


def excludable_node() -> str | None:
    """The name of this node, if Slurm can run the job without it."""
    return os.environ.get("SLURMD_NODENAME") if EXCLUDED_VARIABLE in os.environ else None


def exclude_node(node: str) -> None:
    """Have the job's script queue it again without the node."""
    with Path(os.environ[EXCLUDED_VARIABLE]).open("a") as file:
        file.write(f"{node}\n")
