"""manifest.json: what a checkpoint contains and the SHA-256 of each file. Written last: its presence means complete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from whet.core.errors import WhetError
from whet.core.files import hash_file, hash_json, read_json, write_json
from whet.core.retry import UnreadableError, read_with_retries

MANIFEST_NAME = "manifest.json"
_FORMAT_VERSION = 1
_HASH_THREADS = 8

FileRecords = dict[str, dict[str, Any]]
"""By path inside the checkpoint: {"bytes": size, "hash": SHA-256 of the content}."""


class DamagedCheckpointError(WhetError):
    """A file of a checkpoint is not what was written."""


def hash_files(folder: Path, paths: Iterable[Path]) -> FileRecords:
    """Several at a time: a hash takes a core, and disks are faster than one."""
    listed = sorted(paths)
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        hashes = list(pool.map(lambda path: hash_file(path, sha256=True), listed))
    return {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "hash": digest}
        for path, digest in zip(listed, hashes, strict=True)
    }


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """`content` must have `step` and `files`. The manifest has a hash of itself: its numbers steer a resumed run."""
    body = {"format": _FORMAT_VERSION, **content}
    write_json(folder / MANIFEST_NAME, {**body, "hash": hash_json(body)})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest as it was written, or a DamagedError; an UnreadableError where the disk does not give it."""
    file = folder / MANIFEST_NAME
    try:
        found = read_with_retries(lambda: read_json(file), file)
        if not isinstance(found, dict) or hash_json({k: v for k, v in found.items() if k != "hash"}) != found["hash"]:
            raise WhetError(f"{file}: its content is not what was written")
    except UnreadableError:
        raise
    except (WhetError, KeyError) as error:
        reason = str(error) if isinstance(error, WhetError) else f"{file}: it has no hash of itself"
        raise DamagedCheckpointError(f"{reason}. {_REMEDY}") from None
    except OSError as error:
        raise DamagedCheckpointError(f"{file}: cannot be read: {error.strerror}. {_REMEDY}") from None
    if found["format"] != _FORMAT_VERSION:
        raise WhetError(f"{file}: this checkpoint has format {found['format']}, and this whet reads {_FORMAT_VERSION}")
    return found


def find_damage(folder: Path, files: FileRecords, names: Sequence[str]) -> list[str]:
    """What is wrong with these files, in words; nothing for those that are as they were written. A file that is not
    there, too short or other than it was is damaged; one that the disk does not give is an UnreadableError."""
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        found = pool.map(lambda name: _check_file(folder / name, files[name]), names)
    return [words for words in found if words is not None]


def damaged_error(words: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{words}. {_REMEDY}")


_REMEDY = "The checkpoint is damaged; use another one (RUN@STEP)"


def _check_file(path: Path, recorded: dict[str, Any]) -> str | None:
    try:
        size = read_with_retries(lambda: path.stat().st_size, path)
        if size != recorded["bytes"]:
            return f"{path}: it has {size:,} bytes and was written with {recorded['bytes']:,}"
        if read_with_retries(lambda: hash_file(path, sha256=True), path) != recorded["hash"]:
            return f"{path}: its content is not what was written (its hash differs)"
    except FileNotFoundError:
        return f"{path}: the file is gone"
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    return None
