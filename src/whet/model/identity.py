"""Which weights a model has: the hash of its files, for adapters that are nothing without them."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from whet.core.files import atomic_write, cache_dir, hash_file, hash_json
from whet.model.config import ModelConfig
from whet.model.read_ahead import folder_of
from whet.model.shapes import is_random
from whet.model.tokenizer import locate

_WEIGHTS = ("*.safetensors", "*.bin", "config.json")


def weights_hash(config: ModelConfig) -> str | None:
    """Of all files with weights, and config.json; None for random weights, and where the files are not at hand."""
    if is_random(config.path):
        return None
    folder = folder_of(locate(config.path), config.revision)
    files = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)})
    if len(files) < 2:
        return None
    with ThreadPoolExecutor(8) as pool:
        hashes = pool.map(_remembered_hash, files)
    return hash_json({file.name: digest for file, digest in zip(files, hashes, strict=True)})


def _remembered_hash(file: Path) -> str:
    """Computed once for a file of this name, size and time: a base of 100 GB takes minutes to read."""
    about = file.resolve().stat()
    key = hash_json([str(file.resolve()), about.st_size, about.st_mtime_ns, about.st_ino])
    kept = cache_dir() / "hashes" / key
    if kept.exists():
        return kept.read_text().strip()
    digest = hash_file(file, sha256=True)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, nothing else
        kept.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(kept, digest + "\n")
    return digest
