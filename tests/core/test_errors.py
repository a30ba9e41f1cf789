"""Errors carry the exit code; faults of the disk are told in words."""

from __future__ import annotations

import errno

import pytest

from whet.core.errors import ExitCode, RunFailedError, StoppedError, WhetError, disk_error


def test_exit_codes_have_their_documented_values() -> None:
    assert (ExitCode.DONE, ExitCode.INPUT, ExitCode.USAGE, ExitCode.FAILED, ExitCode.STOPPED) == (0, 1, 2, 3, 75)
    assert (WhetError.exit_code, RunFailedError.exit_code, StoppedError.exit_code) == (1, 3, 75)
    assert issubclass(RunFailedError, WhetError)
    assert issubclass(StoppedError, WhetError)


@pytest.mark.parametrize(
    ("code", "says", "remedy"),
    [
        (errno.ENOSPC, "the disk is full", "Free some space"),
        (errno.EDQUOT, "your disk quota is used up", "Free some space"),
        (errno.EROFS, "the file system is read-only", "a folder you may write to"),
        (errno.EACCES, "permission denied", "a folder you may write to"),
        (errno.EPERM, "permission denied", "a folder you may write to"),
    ],
)
def test_a_disk_error_names_place_and_remedy(code: int, says: str, remedy: str) -> None:
    told = str(disk_error(OSError(code, "x"), "saving", "/there"))
    assert told.startswith(f"/there: {says} while saving. ")
    assert remedy in told
    assert "run.dir" in told
    assert "WHET_CACHE" in told


def test_the_file_name_of_the_os_error_is_the_place() -> None:
    assert str(disk_error(OSError(errno.ENOSPC, "x", "/there/file"), "saving", "/there")).startswith("/there/file: ")


def _raised(outer: Exception, inner: Exception, explicit: bool) -> Exception:
    try:
        try:
            raise inner
        except Exception as caught:
            if explicit:
                raise outer from caught
            raise outer
    except Exception as both:
        return both


@pytest.mark.parametrize("explicit", [True, False])
def test_a_disk_error_wrapped_by_a_library_is_found(explicit: bool) -> None:
    wrapped = _raised(RuntimeError("save failed"), OSError(errno.ENOSPC, "x"), explicit)
    twice = _raised(ValueError("again"), wrapped, explicit)
    assert "the disk is full" in str(disk_error(twice, "saving", "/there"))


@pytest.mark.parametrize(
    ("text", "says"),
    [("I/O error: No space left on device (os error 28)", "disk is full"), ("Read-only file system", "read-only")],
)
def test_a_disk_error_that_a_library_reports_as_text_is_found(text: str, says: str) -> None:
    assert says in str(disk_error(RuntimeError(text), "saving", "/there"))


@pytest.mark.parametrize("error", [ValueError("x"), OSError(errno.ENOENT, "x"), OSError("x"), KeyboardInterrupt()])
def test_other_errors_are_not_disk_errors(error: BaseException) -> None:
    assert disk_error(error, "saving", "/there") is None
