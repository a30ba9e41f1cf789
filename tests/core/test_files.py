"""Files are whole or absent; locks hold."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples import examples
from whet.core import files
from whet.core.errors import WhetError, os_error
from whet.core.files import (
    atomic_dir,
    atomic_write,
    cache_dir,
    file_lock,
    hash_file,
    hash_json,
    read_json,
    require_disk_space,
    write_json,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class _BreakError(Exception):
    pass


def fail(*_: Any, **__: Any) -> None:
    raise _BreakError


# Whole or absent


@pytest.mark.parametrize(("content", "written"), [("é\n", "é\n".encode()), (b"\x00\xff", b"\x00\xff"), ("", b"")])
def test_an_atomic_write_leaves_no_temporary_file(tmp_path: Path, content: str | bytes, written: bytes) -> None:
    file = tmp_path / "f"
    file.write_text("old and longer")
    atomic_write(file, content)
    assert file.read_bytes() == written
    assert names(tmp_path) == ["f"]


@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    file = tmp_path / "f"
    file.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        with pytest.raises(_BreakError):
            atomic_write(file, "new")
    assert file.read_text() == "old"
    assert names(tmp_path) == ["f"]


def test_content_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("os.fsync", lambda _: seen.append("sync"))
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, target: (seen.append("rename"), replace(self, target))[1])
    atomic_write(tmp_path / "f", "new")
    assert seen == ["sync", "rename"]


def test_a_folder_appears_when_its_block_succeeds(tmp_path: Path) -> None:
    target = tmp_path / "very" / "deep" / "store"
    with atomic_dir(target) as temporary:
        (temporary / "f").write_text("x")
        assert not target.exists()
        assert temporary.parent == target.parent, "renaming works within one file system only"
    assert (target / "f").read_text() == "x"
    assert names(target.parent) == ["store"]


def test_files_are_on_the_disk_before_their_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr("os.fsync", lambda number: seen.append(Path(f"/proc/self/fd/{number}").readlink().name))
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, target: (seen.append("rename"), rename(self, target))[1])
    with atomic_dir(tmp_path / "store") as temporary:
        (temporary / "below").mkdir()
        for name in ("a", "below/b"):
            (temporary / name).touch()
    assert sorted(seen[:2]) == ["a", "b"]
    assert seen[2:] == ["below", temporary.name, "rename", tmp_path.name]  # the names in folders too


@pytest.mark.parametrize("error", [_BreakError, KeyboardInterrupt])
def test_a_folder_whose_block_fails_is_deleted(tmp_path: Path, error: type[BaseException]) -> None:
    def fill() -> None:
        with atomic_dir(tmp_path / "store") as temporary:
            (temporary / "f").write_text("x")
            raise error

    with pytest.raises(error):
        fill()
    assert names(tmp_path) == []


def test_a_folder_is_replaced_atomically_and_kept_when_its_successor_fails(tmp_path: Path) -> None:
    target = tmp_path / "store"
    with atomic_dir(target) as temporary:
        (temporary / "old").touch()
    with pytest.raises(_BreakError), atomic_dir(target) as temporary:
        raise _BreakError
    assert names(target) == ["old"]
    with atomic_dir(target) as temporary:
        (temporary / "new").touch()
    assert names(target) == ["new"]
    assert names(tmp_path) == ["store"]


def test_leftovers_of_a_killed_process_do_not_get_into_the_folder(tmp_path: Path) -> None:
    left = tmp_path / f".store.{os.getpid()}"
    left.mkdir()
    (left / "junk").touch()
    with atomic_dir(tmp_path / "store") as temporary:
        (temporary / "f").touch()
    assert names(tmp_path / "store") == ["f"]


def die_in_replacement(target: Path, moment: int, exchanges: bool) -> bool:
    """Replace the folder in a process that dies before the given rename or deletion; tells whether it came so far."""
    pid = os.fork()
    if pid == 0:
        if not exchanges:
            files._exchange = lambda *_: False
        moments = itertools.count()
        for owner, name in ((Path, "rename"), (files, "_exchange"), (os, "unlink"), (os, "rmdir")):
            setattr(owner, name, _dying(getattr(owner, name), moments, moment))
        with atomic_dir(target) as temporary:
            (temporary / "f").write_text("new")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def _dying(function: Any, moments: Iterator[int], moment: int) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if next(moments) == moment:
            os._exit(9)
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_is_never_lost_while_it_is_replaced(tmp_path: Path, exchanges: bool) -> None:
    """With an exchange of names it is always there; without, the next writer puts it back."""
    moment, died = 0, True
    while died:
        target = tmp_path / str(moment) / "export"
        target.mkdir(parents=True)
        (target / "f").write_text("old")
        died = die_in_replacement(target, moment, exchanges)
        if exchanges:
            assert (target / "f").read_text() in ("old", "new")
        with pytest.raises(_BreakError), atomic_dir(target):
            raise _BreakError
        assert (target / "f").read_text() in ("old", "new")
        assert names(target.parent) == ["export"]
        moment += 1
    assert (target / "f").read_text() == "new"
    assert moment > 3


def test_an_export_that_an_earlier_version_lost_is_put_back(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f".export.old-{dead.pid}").mkdir()
    (tmp_path / f".export.old-{dead.pid}" / "f").touch()
    with pytest.raises(_BreakError), atomic_dir(tmp_path / "export"):
        raise _BreakError
    assert names(tmp_path / "export") == ["f"]
    assert names(tmp_path) == ["export"]


# JSON


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("aé\n", max_size=3), inner, max_size=3),
        max_leaves=8,
    )
)
def test_json_is_read_back_as_it_was(tmp_path: Path, value: Any) -> None:
    write_json(tmp_path / "f.json", value)
    assert read_json(tmp_path / "f.json") == value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_json_does_not_have_is_refused_and_the_old_file_stays(tmp_path: Path, value: float) -> None:
    write_json(tmp_path / "f.json", {"a": 1})
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "f.json", {"a": value})
    assert read_json(tmp_path / "f.json") == {"a": 1}
    assert names(tmp_path) == ["f.json"]


@pytest.mark.parametrize(
    ("content", "line"), [(b"", 1), (b"{", 1), (b'{"a": 1,\n "b": }', 2), (b"{}\n\n x", 3), (b'"\xff"', 1)]
)
def test_damaged_json_is_an_error_with_file_and_line(tmp_path: Path, content: bytes, line: int) -> None:
    file = tmp_path / "f.json"
    file.write_bytes(content)
    with pytest.raises(WhetError) as caught:
        read_json(file)
    assert str(caught.value).startswith(f"{file}:{line}: not valid JSON (")
    assert "damaged or edited by hand" in str(caught.value)


def test_a_missing_json_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=rf"{tmp_path}/nope\.json: no such file"):
        read_json(tmp_path / "nope.json")


# Locks


def _enter(lock: Path, log: Path) -> None:
    with file_lock(lock):
        before = log.read_text()
        time.sleep(0.05)
        log.write_text(before + "x")  # a lost update if two are inside


def test_a_waiting_lock_lets_one_process_in_at_a_time(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_enter, args=(tmp_path / "very" / "deep" / "l.lock", log)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert log.read_text() == "xxxx"


# Space, hashes, the cache


def test_a_disk_with_room_is_accepted_even_for_folders_that_are_not_there_yet(tmp_path: Path) -> None:
    require_disk_space(tmp_path / "a" / "b", 1, "a test")
    assert names(tmp_path) == []


def test_a_disk_without_room_is_refused_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 3 * 2**20})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage if path == tmp_path else None)
    require_disk_space(tmp_path / "a" / "b", 3 * 2**20, "a test")
    with pytest.raises(WhetError) as caught:
        require_disk_space(tmp_path / "a" / "b", 5 * 2**20, "a test")
    told = str(caught.value)
    assert told.startswith(f"{tmp_path}/a/b: the disk is too full for a test: 5 MiB needed, 3 MiB free.")
    assert "WHET_CACHE" in told


def test_hashes_are_of_content_alone(tmp_path: Path) -> None:
    for name, content in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / name).write_text(content)
    a, b, c = (hash_file(tmp_path / name) for name in "abc")
    assert a == b != c
    assert hash_json({"a": 1, "b": [2]}) == hash_json({"b": [2], "a": 1}) != hash_json({"a": 1, "b": [3]})
    assert hash_json([1, 2]) != hash_json([2, 1])
    assert hash_json("é") == hash_json(json.loads('"\\u00e9"'))


def test_hashes_are_the_same_in_every_version(tmp_path: Path) -> None:
    """They name stores on people's disks."""
    (tmp_path / "f").write_bytes(b"whet")
    assert hash_file(tmp_path / "f") == "23109c5ca069f8955bbd90f51c633ecf031d4970"
    assert hash_json({"a": [1, "é"]}) == "72ef2862b9ca894d0a6fcf3d8523d87bf4944beb"


def test_whet_cache_sets_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_CACHE", "/some/where")
    assert cache_dir() == Path("/some/where")
    monkeypatch.setenv("WHET_CACHE", "")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_dir() == Path("/home/me/.cache/whet")
    monkeypatch.delenv("WHET_CACHE")
    assert cache_dir() == Path("/home/me/.cache/whet")


def test_below_a_link_that_leads_nowhere_is_no_place_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "unmounted").symlink_to(tmp_path / "nowhere")
    for place in (atomic_dir(tmp_path / "unmounted" / "x"), file_lock(tmp_path / "unmounted" / "x")):
        with pytest.raises(NotADirectoryError) as caught, place:
            pass
        told = str(os_error(caught.value, "saving", tmp_path))
        assert "a part of the path is not a folder while saving" in told
