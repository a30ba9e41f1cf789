"""Exit codes, disk errors and descriptions of errors."""

from __future__ import annotations

import errno
import json

import pytest

from whet.core.errors import (
    CancelledError,
    ExitCode,
    RunFailedError,
    StoppedError,
    UsageError,
    WhetError,
    describe_error,
    first_line,
    os_error,
)


def test_exit_codes_have_their_documented_values() -> None:
    codes = {code.name: code.value for code in ExitCode}
    assert codes == {"DONE": 0, "INPUT": 1, "USAGE": 2, "FAILED": 3, "STOPPED": 75, "INTERRUPTED": 130}
    errors = (WhetError, UsageError, RunFailedError, StoppedError, CancelledError)
    assert [error.exit_code for error in errors] == [1, 2, 3, 75, 130]
    assert all(issubclass(error, WhetError) for error in errors)
    assert json.dumps({"exit_code": ExitCode.STOPPED}) == '{"exit_code": 75}'


@pytest.mark.parametrize(
    ("code", "says", "remedy"),
    [
        (errno.ENOSPC, "the disk is full", "Free some space"),
        (errno.EDQUOT, "your disk quota is used up", "Free some space"),
        (errno.EIO, "the disk or its file system fails", "Check the system log"),
        (errno.ESTALE, "the network file system lost", "Mount it again"),
        (errno.EROFS, "the file system is read-only", "a folder you may write to"),
        (errno.EACCES, "permission denied", "a folder you may write to"),
        (errno.EPERM, "permission denied", "a folder you may write to"),
    ],
)
def test_a_disk_error_names_place_and_remedy(code: int, says: str, remedy: str) -> None:
    told = str(os_error(OSError(code, "x"), "saving", "/there"))
    assert told.startswith(f"/there: {says}")
    assert " while saving. " in told
    assert remedy in told
    assert "run.dir" in told
    assert "WHET_CACHE" in told


@pytest.mark.parametrize(
    ("code", "says", "remedy"),
    [
        (errno.EMFILE, "this process has too many open files", "ulimit -n"),
        (errno.ENFILE, "this machine has too many open files", "fs.file-max"),
        (errno.ENAMETOOLONG, "the path is too long", "shorter"),
        (errno.ELOOP, "its symbolic links lead in a circle", "Remove one"),
    ],
)
def test_what_is_not_the_disk_does_not_ask_for_another(code: int, says: str, remedy: str) -> None:
    told = str(os_error(OSError(code, "x"), "reading", "/there"))
    assert told.startswith(f"/there: {says}")
    assert remedy in told
    assert "run.dir" not in told
    assert "elete" not in told


def test_the_file_name_of_the_os_error_is_the_place() -> None:
    assert str(os_error(OSError(errno.ENOSPC, "x", "/there/file"), "saving", "/there")).startswith("/there/file: ")


def _raised(outer: Exception, inner: Exception, explicit: bool) -> Exception:
    try:
        try:
            raise inner
        except Exception as caught:
            if explicit:
                raise outer from caught
            raise outer  # noqa: B904
    except Exception as both:
        return both


@pytest.mark.parametrize("explicit", [True, False])
def test_a_disk_error_wrapped_by_a_library_is_found(explicit: bool) -> None:
    wrapped = _raised(RuntimeError("save failed"), OSError(errno.ENOSPC, "x"), explicit)
    twice = _raised(ValueError("again"), wrapped, explicit)
    assert "the disk is full" in str(os_error(twice, "saving", "/there"))


@pytest.mark.parametrize(
    ("text", "says"),
    [("I/O error: No space left on device (os error 28)", "disk is full"), ("Read-only file system", "read-only")],
)
def test_a_disk_error_that_a_library_reports_as_text_is_found(text: str, says: str) -> None:
    assert says in str(os_error(RuntimeError(text), "saving", "/there"))


@pytest.mark.parametrize("error", [ValueError("x"), OSError(errno.ENOENT, "x"), OSError("x"), KeyboardInterrupt()])
def test_other_errors_are_not_disk_errors(error: BaseException) -> None:
    assert os_error(error, "saving", "/there") is None


def test_the_first_line_of_an_error_is_its_first_text_or_its_type() -> None:
    assert first_line(ValueError("\n  a  \nb")) == "a"
    assert first_line(ValueError(" \n")) == first_line(ValueError()) == "ValueError"
    assert describe_error(ValueError("a\nb")) == "ValueError: a"
    assert describe_error(ValueError()) == "ValueError"
