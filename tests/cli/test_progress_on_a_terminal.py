"""Progress bars on a real terminal (a pty): the last thing that each shows before it goes away is N/N."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

import pytest

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run_on_terminal(python: str, folder: Path, *words: str) -> str:
    """What `whet …` writes to a terminal of 160 columns, without colours and cursor movements."""
    outside, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    process = subprocess.Popen(
        [python, "-m", "whet", *words], cwd=folder, env={**os.environ, "TERM": "xterm-256color"},
        stdin=inside, stdout=inside, stderr=inside,
    )  # fmt: skip
    os.close(inside)
    written = b""
    while True:
        try:
            part = os.read(outside, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
    os.close(outside)
    text = _CONTROL.sub("", written.decode())
    assert process.wait() == 0, text
    return text


def counts(shown: str, title: str) -> list[tuple[int, int]]:
    """(done, total) of each picture of a bar, in order."""
    return [(int(done), int(total)) for done, total in re.findall(rf"{title} [━╸╺ ]+ +(\d+)/(\d+)", shown)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A table whose lines are more than its records, so that the total is an estimate at first."""
    rows = "".join(f'Wie heißt {n}?;"Es heißt\n{n},\nbitte."\n' for n in range(45))
    (tmp_path / "fragen.csv").write_text("Frage;Antwort\n" + rows)
    (tmp_path / "fragen.yaml").write_text(
        "model: {path: builtin:tiny}\nexport: {at_end: none}\ntrain: {steps: 7, batch: {conversations: 2}}\n"
        "data:\n  validation: {fraction: 0.2}\n"
        "  sources: [{path: fragen.csv, format: prompt-completion, fields: {prompt: Frage, completion: Antwort}}]\n"
    )
    return tmp_path


def test_the_bars_of_prepare_and_train_end_at_all_of_all(folder: Path, real_python: str) -> None:
    shown = run_on_terminal(real_python, folder, "train", "fragen.yaml")
    assert counts(shown, "preparing")[-1] == (45, 45)
    trained = counts(shown, "training")
    assert trained[-1] == (7, 7)
    assert {total for _, total in trained} == {7}
    before, _, during = shown.partition("training ")  # a bar of its own, and one below that of the training
    for part in (before, during):
        validated = counts(part, "validating")
        assert validated[-1][0] == validated[-1][1] > 0, validated
    assert "done: runs/fragen" in shown
