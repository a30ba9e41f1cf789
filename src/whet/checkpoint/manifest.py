"""manifest.json: what a checkpoint contains, and the SHA-256 of every file. It is written last: a checkpoint with a
manifest is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whet.core.errors import WhetError
from whet.core.files import UnreadableError, hash_json, read_json, read_with_retries, write_json

MANIFEST_NAME = "manifest.json"
_FORMAT_VERSION = 1


class DamagedCheckpointError(WhetError):
    """A file of a checkpoint is missing or was altered."""


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write `content`, which has `step` and `files`, with a hash of itself: its values steer a resumed run."""
    body = {"format": _FORMAT_VERSION, **content}
    write_json(folder / MANIFEST_NAME, {**body, "hash": hash_json(body)})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest. Raises DamagedCheckpointError if it was altered, and UnreadableError if the disk fails."""
    file = folder / MANIFEST_NAME
    try:
        found = read_with_retries(lambda: read_json(file), file)
        if not isinstance(found, dict) or hash_json({k: v for k, v in found.items() if k != "hash"}) != found["hash"]:
            raise WhetError(f"{file}: altered after it was written (hash mismatch)")
    except UnreadableError:
        raise
    except (WhetError, KeyError) as error:
        reason = str(error) if isinstance(error, WhetError) else f"{file}: the key `hash` is missing"
        raise DamagedCheckpointError(f"{reason}. {_REMEDY}") from None
    except OSError as error:
        raise DamagedCheckpointError(f"{file}: cannot be read: {error.strerror}. {_REMEDY}") from None
    if found["format"] != _FORMAT_VERSION:
        raise WhetError(
            f"{file}: checkpoint format {found['format']}, but this version of whet reads format {_FORMAT_VERSION}. "
            "Use the version that wrote it (`versions` in the manifest)"
        )
    if not _is_wellformed(found):
        raise DamagedCheckpointError(f"{file}: not the manifest of a checkpoint. {_REMEDY}")
    return found


def _is_wellformed(manifest: dict[str, Any]) -> bool:
    """Whether the keys that locate and verify files have the right types, and the files are in the checkpoint."""
    parts, files = manifest.get("parts"), manifest.get("files")
    return (
        isinstance(manifest.get("step"), int)
        and isinstance(parts, list)
        and isinstance(files, dict)
        and all(isinstance(record, dict) and isinstance(record.get("bytes"), int) for record in files.values())
        and all(isinstance(record.get("hash"), str) and "block" not in record for record in files.values())
        and not any(Path(name).is_absolute() or ".." in Path(name).parts for name in files)
    )


def damaged_error(message: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{message}. {_REMEDY}")


_REMEDY = "The checkpoint is damaged; use another one (RUN@STEP)"
