"""A model's files: where they are, prefetching them into the page cache, their hash. Nothing here needs torch."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from whet.core.errors import WhetError, first_line
from whet.core.files import atomic_write, cache_dir, hash_file, hash_json
from whet.model.config import ModelConfig
from whet.model.load.builtin_models import builtin_folder
from whet.model.load.random_models import is_random_model


def locate_model(path: str) -> str:
    """A folder, or a hub id, that transformers can load."""
    if path.startswith("builtin:"):
        return str(builtin_folder(path))
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            if (folder / "config.yaml").exists():
                raise WhetError(f"model.path: {path}: this is a run; train on what it exported: {path}/exports/merged")
            raise WhetError(f"model.path: {path}: no config.json in this folder, so it is not a model folder")
        return str(folder)
    if folder.is_file():
        raise WhetError(f"model.path: {path}: this is a file; give the folder that holds the model")
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise WhetError(
            f"model.path: {path}: no such folder (looked in {Path.cwd()}), and not a hub id of the form OWNER/NAME"
        )
    return path


def load_error(path: str, what: str, error: Exception) -> WhetError:
    first = first_line(error)
    return WhetError(f"model.path: the {what} of {path} cannot be loaded: {first}")


# Have the system read a model's files from the disk while this process does something else, without torch.

_PREFETCH_BYTES = 2**26


def prefetch_weights(path: str, revision: str | None = None) -> threading.Thread | None:
    """Ask for the weights of a model folder or of a hub's model that is on this machine, to be in memory when they are
    loaded; a hint, which never fails. Nothing is asked where they would fill more than half of the memory.

    The thread makes system calls and nothing else, so it may be there when processes are forked.
    """
    with contextlib.suppress(OSError):
        files = sorted(local_model_folder(path, revision).glob("*.safetensors"))
        if 0 < sum(file.stat().st_size for file in files) < _physical_memory() // 2:
            thread = threading.Thread(target=_advise, args=(files,), name="read ahead", daemon=True)
            thread.start()
            return thread
    return None


def _advise(files: list[Path]) -> None:
    with contextlib.suppress(OSError):
        for path in files:
            with path.open("rb") as file:
                for start in range(
                    0, path.stat().st_size, _PREFETCH_BYTES
                ):  # the system may wait for the disk in each call
                    os.posix_fadvise(file.fileno(), start, _PREFETCH_BYTES, os.POSIX_FADV_WILLNEED)


def local_model_folder(path: str, revision: str | None) -> Path:
    """Where the files of a model are, if they are on this machine."""
    folder = Path(path).expanduser()
    if folder.is_dir() or path.count("/") != 1:
        return folder
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    kept = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{path.replace('/', '--')}"
    name = revision or "main"
    reference = kept / "refs" / name
    return kept / "snapshots" / (reference.read_text().strip() if reference.is_file() else name)


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# Which weights a model has: the hash of its files, for adapters that are nothing without them.

_HASHED_FILES = ("*.safetensors", "*.bin", "config.json")


def weights_hash(config: ModelConfig) -> str | None:
    """Of all files with weights, and config.json; None for random weights, and where the files are not at hand."""
    if is_random_model(config.path):
        return None
    folder = local_model_folder(locate_model(config.path), config.revision)
    files = sorted({file for pattern in _HASHED_FILES for file in folder.glob(pattern)})
    if len(files) < 2:
        return None
    with ThreadPoolExecutor(8) as pool:
        hashes = pool.map(_cached_file_hash, files)
    return hash_json({file.name: digest for file, digest in zip(files, hashes, strict=True)})


def _cached_file_hash(file: Path) -> str:
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
