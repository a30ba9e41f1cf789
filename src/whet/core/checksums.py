"""Checksums: sizes and SHA-256 of files, and JSON files with a hash of their own content. They find damage: a flipped
bit, a truncated file, an edit. Whoever can write the files can write the checksums, so they say nothing about trust."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from whet.core.errors import WhetError, first_line
from whet.core.files import UnreadableError, hash_json, read_json, read_with_retries, write_json

FileRecords = dict[str, dict[str, Any]]
"""Path in a folder → {"bytes": size, "hash": SHA-256 of the content}. With "block", the number of bytes in a block, the
hash is that of each block, joined by a dash: the blocks of a large file are hashed in parallel."""

_THREADS = 8  # one core hashes more slowly than a disk reads
_READ_BYTES = 2**20


def hash_files(folder: Path, paths: Iterable[Path], block: int | None = None) -> FileRecords:
    """The checksums of these files of a folder, computed in parallel; with `block`, in blocks of so many bytes."""
    listed = sorted(paths)
    extra = {} if block is None else {"block": block}
    records: FileRecords = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "hash": "", **extra} for path in listed
    }
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = pool.map(lambda part: hash_block(*part), _blocks(folder, records))
        for name, digest in zip([name for name, *_ in _named_blocks(records)], hashes, strict=True):
            known = records[name]["hash"]
            records[name]["hash"] = f"{known}-{digest}" if known else digest
    return records


def find_damage(
    folder: Path, records: FileRecords, names: Iterable[str] | None = None, stop: threading.Event | None = None
) -> list[str]:
    """One message for each file (of `names`, or of all) that is missing, truncated or altered. `stop` ends it early.
    Raises UnreadableError if the disk fails."""
    chosen = {name: records[name] for name in (sorted(records) if names is None else names)}
    found = {name: _size_damage(folder / name, record) for name, record in chosen.items()}
    whole = {name: record for name, record in chosen.items() if found[name] is None}
    hashes: dict[str, list[str]] = {name: [] for name in whole}

    def hash_part(path: Path, start: int, end: int) -> str:
        try:
            return read_with_retries(lambda: hash_block(path, start, end, stop), path)
        except OSError:  # deleted meanwhile
            return ""

    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(lambda part: hash_part(*part), _blocks(folder, whole))
        for (name, *_), digest in zip(_named_blocks(whole), digests, strict=True):
            hashes[name].append(digest)
    for name, record in whole.items():
        if "-".join(hashes[name]) != record["hash"] and not (stop is not None and stop.is_set()):
            found[name] = f"{folder / name}: altered after it was written (hash mismatch)"
    return [message for message in found.values() if message is not None]


def hash_block(path: Path, start: int, end: int, stop: threading.Event | None = None) -> str:
    """The SHA-256 of the bytes from `start` to `end`; of a part of them, if `stop` is set meanwhile."""
    digest, buffer = hashlib.sha256(), bytearray(_READ_BYTES)
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while start < end and not (stop is not None and stop.is_set()):
            count = file.readinto(memoryview(buffer)[: end - start])
            if not count:
                break
            digest.update(memoryview(buffer)[:count])
            start += count
    return digest.hexdigest()


def _named_blocks(records: FileRecords) -> Iterator[tuple[str, int, int]]:
    """(name, first byte, end) of every block; an empty file has one."""
    for name, record in records.items():
        size = record["bytes"]
        block = record.get("block") or max(1, size)
        yield from ((name, start, min(start + block, size)) for start in range(0, max(1, size), block))


def _blocks(folder: Path, records: FileRecords) -> Iterator[tuple[Path, int, int]]:
    return ((folder / name, start, end) for name, start, end in _named_blocks(records))


def _size_damage(path: Path, record: dict[str, Any]) -> str | None:
    try:
        size = read_with_retries(lambda: path.stat().st_size, path)
    except FileNotFoundError:
        return f"{path}: no such file"
    except UnreadableError:
        raise
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    return None if size == record["bytes"] else f"{path}: {size:,} bytes instead of {record['bytes']:,}"


# JSON with a hash of itself.


def write_hashed_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object atomically, with the hash of its content under the key `hash`."""
    plain = json.loads(json.dumps(value))
    write_json(path, {**plain, "hash": hash_json(plain)})


def read_hashed_json(
    path: Path, remedy: str = "Bring it back from a copy", **types: type | tuple[type, ...]
) -> dict[str, Any]:
    """An object that `write_hashed_json` wrote, without its hash; one that earlier versions wrote has none. Raises a
    WhetError with the remedy if the file was altered, or if one of these keys is missing or has another type."""
    try:
        found = read_json(path)
    except WhetError as error:
        raise WhetError(f"{first_line(error).rstrip('.')}. {remedy}") from None
    known = found.pop("hash", None) if isinstance(found, dict) else ""
    if known is not None and known != hash_json(found):
        raise WhetError(f"{path}: altered after it was written (hash mismatch). {remedy}")
    for key, known_type in types.items():
        if not isinstance(found.get(key), known_type):
            raise WhetError(f"{path}: damaged: `{key}` is missing or of a wrong type. {remedy}")
    return dict(found)
