"""What whet says goes to stderr; stdout belongs to results."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from whet.core import console
from whet.core.console import SafeConsole


@pytest.fixture
def spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A console that writes to the stderr of this test and is not silent."""
    monkeypatch.setattr(console, "_console", SafeConsole(stderr=True, width=200))
    monkeypatch.setattr(console, "_quiet", False)


@pytest.mark.usefixtures("spoken")
def test_messages_and_warnings_go_to_stderr_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    console.info("a [bold]b[/bold] [1, 2]")
    console.warn("look [here]")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "a [bold]b[/bold] [1, 2]\nwarning: look [here]\n")


@pytest.mark.usefixtures("spoken")
def test_quiet_prints_errors_only(capsys: pytest.CaptureFixture[str]) -> None:
    console.set_quiet()
    console.info("a")
    console.warn("b")
    with console.progress("work", 2) as bar:
        bar.advance()
    console.print_error("c [d]")
    assert capsys.readouterr() == ("", "c [d]\n")


@pytest.mark.usefixtures("spoken")
def test_a_long_error_is_not_broken_into_lines(capsys: pytest.CaptureFixture[str]) -> None:
    text = "word " * 100 + "end"
    console.print_error(text)
    assert capsys.readouterr().err == f"{text}\n"


def test_a_result_is_one_line_of_json_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"text": "é\n", "n": 1})
    out, err = capsys.readouterr()
    assert (out.count("\n"), err) == (1, "")
    assert json.loads(out) == {"text": "é\n", "n": 1}
    assert "é" in out


def test_a_result_that_is_not_json_is_refused() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        console.print_json({"loss": float("nan")})


def test_the_console_is_stderr_and_not_quiet_by_default() -> None:
    assert console._console.stderr
    found = subprocess.run(
        [sys.executable, "-c", "from whet.core.console import info; info('a', 1)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (found.stdout, found.stderr) == ("", "a 1\n")


@pytest.mark.usefixtures("spoken")
def test_progress_starts_at_zero_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("work", 5) as bar:
        bar.advance()
    assert "1/5" in capsys.readouterr().err


@pytest.mark.usefixtures("spoken")
def test_progress_leaves_one_line_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("work", 5, done=1) as bar:
        bar.advance(2, "half")
        bar.advance(note="more")
    out, err = capsys.readouterr()
    assert out == ""
    [line] = [line for line in err.splitlines() if line.strip()]
    assert line.startswith("work ")
    assert "4/5" in line
    assert line.rstrip().endswith("more")


@pytest.mark.usefixtures("spoken")
def test_a_log_line_has_elapsed_time_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with console.progress("work", 5, done=1) as bar:
        now[0] = 3700.0
        bar.advance(1, "half")  # one of the four that are left took so long
    assert capsys.readouterr().err.splitlines()[0] == "work 2/5 · 1:01:40, 3:05:00 left · half"
    now[0] = 0.0
    with console.progress("counting", None) as bar:
        now[0] = 65.0
        bar.advance(7)
    assert capsys.readouterr().err.splitlines()[0] == "counting 7 · 1:05"
