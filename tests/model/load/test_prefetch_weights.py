"""Prefetching of weight files into the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path

import pytest

from whet.model.load.weight_files import prefetch_weights

SIZE = 2**22


def weights(folder: Path) -> Path:
    """A file that is on the disk and not in memory."""
    folder.mkdir(parents=True)
    file = folder / "model.safetensors"
    with file.open("wb") as handle:
        handle.write(os.urandom(SIZE))
        handle.flush()
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return file


def in_memory(file: Path) -> float:
    """The part of a file that the system holds in memory."""
    pages = SIZE // mmap.PAGESIZE
    held = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    with file.open("rb") as handle:
        place = libc.mmap(None, SIZE, mmap.PROT_READ, mmap.MAP_SHARED, handle.fileno(), 0)
        assert libc.mincore(place, SIZE, held) == 0
        libc.munmap(place, SIZE)
    return sum(byte & 1 for byte in held) / pages


@pytest.mark.parametrize("place", ["folder", "hub", "revision"])
def test_prefetched_weights_are_in_the_page_cache(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--maker--name"
    folder = {"folder": tmp_path / "model", "hub": kept / "snapshots" / "abc", "revision": kept / "snapshots" / "v2"}
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc\n")
    file = weights(folder[place])
    if in_memory(file) > 0.5:
        pytest.skip("this file system keeps its files in memory")
    path = str(file.parent) if place == "folder" else "maker/name"
    thread = prefetch_weights(path, "v2" if place == "revision" else None)
    assert thread is not None
    thread.join()
    until = time.monotonic() + 20
    while in_memory(file) < 1 and time.monotonic() < until:  # the disk is still at it
        time.sleep(0.01)
    assert in_memory(file) == 1


@pytest.mark.parametrize("path", ["builtin:tiny", "/no/such/folder", "maker/nothing", "nonsense"])
def test_prefetching_missing_files_is_not_an_error(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert prefetch_weights(path) is None


def test_weights_larger_than_half_the_memory_are_not_prefetched(tmp_path: Path) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(memory // 2 + 1)  # sparse: it takes no space
    assert prefetch_weights(str(tmp_path)) is None
