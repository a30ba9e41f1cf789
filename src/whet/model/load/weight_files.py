"""A model's files: where they are, prefetching into the page cache, and their hash. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from whet.core import launch_env
from whet.core.checksums import read_hashed_json
from whet.core.errors import WhetError, describe_error, first_line, os_error, refused_pickle
from whet.core.files import atomic_write, cache_dir, hash_file, hash_json, read_json, resolve_path, user_path
from whet.core.hub import is_hub_name, reach_hub
from whet.core.run_folder import suggest_runs
from whet.model.config import ModelConfig
from whet.model.load.builtin_models import builtin_folder
from whet.model.load.random_models import is_random_model
from whet.registry.references import local_path


def locate_model(path: str) -> str:
    """The folder or hub id that transformers loads for a model.path."""
    if path.startswith("builtin:"):
        return str(builtin_folder(path))
    folder = local_path(path)
    if folder.is_dir():
        if (folder / "adapter_config.json").exists():
            if any(True for name in _WEIGHT_FILES for _ in folder.glob(name)):
                raise WhetError(
                    f"model.path: {path}: the folder has an adapter next to its weights, and transformers would load "
                    "both. Remove adapter_config.json to use the model without it, or merge them: whet merge"
                )
            raise WhetError(
                f"model.path: {path}: this is an adapter, not a whole model. Give a merged one: whet export RUN "
                "--to merged, or whet merge"
            )
        if not (folder / "config.json").exists():
            if (folder / "config.yaml").exists():
                raise WhetError(f"model.path: {path}: this is a run folder. Give its export: {path}/exports/merged")
            if file := next(iter(sorted(folder.glob("*.gguf"))), None):
                raise WhetError(
                    f"model.path: {path}: this folder holds a GGUF file, which llama.cpp, Ollama and LM Studio run: "
                    f"llama-server -m {file}. Give the run or a merged export"
                )
            raise WhetError(f"model.path: {path}: no config.json in this folder. Give the folder of a model")
        return str(folder)
    if folder.is_file() and folder.suffix == ".gguf":
        raise WhetError(
            f"model.path: {path}: a GGUF file, which llama.cpp, Ollama and LM Studio run. Give the folder of the model "
            "that it was made from"
        )
    if folder.is_file():
        raise WhetError(
            f"model.path: {path}: this is a file; give the folder that holds the model, or that of a run."
            f"{suggest_runs(folder)}"
        )
    require_no_typo(path)
    if not is_hub_name(path):
        raise WhetError(
            f"model.path: {path}: no such folder (looked in {Path.cwd()}), and not a hub id of the form OWNER/NAME."
            f"{suggest_runs(Path(path))}"
        )
    return path


_WEIGHT_FILES = ("model*.safetensors", "pytorch_model*.bin")

NANOCHAT_MODEL_TYPE = "whet-nanochat"
"""model_type in config.json of nanochat's models that transformers has no class for."""


def register_model_code(folder: str | Path) -> None:
    """Let transformers' auto classes load a folder whose model is whet's own code."""
    file = Path(folder) / "config.json"
    if file.is_file() and NANOCHAT_MODEL_TYPE in file.read_text(encoding="utf-8", errors="replace"):
        from whet.model.nanochat import register_nanochat  # imports torch

        register_nanochat()


def reach_model(path: str) -> str:
    """`locate_model`, before something reads it: checks that the hub has the model, and shows the wait."""
    place = locate_model(path)
    if not Path(place).exists():
        reach_hub(place)
    return place


def snapshot_folder(config: ModelConfig) -> Path:
    """The folder of a model, downloaded from the hub if it is not on this machine."""
    place = Path(reach_model(config.path))
    if place.is_dir():
        return place
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(str(place), revision=config.revision, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise WhetError(f"model.path: {config.path}: downloading from the hub failed: {error}") from None


def require_no_typo(reference: str) -> None:
    """A WhetError for a mistyped path, which must not become a hub id: one whose parent folder exists is a path."""
    path = user_path(reference)
    if ":" in reference or path.exists() or len(path.parts) < 2 or not path.parent.is_dir():
        return
    raise WhetError(f"{reference}: no such folder (in {Path.cwd()}).{suggest_runs(path)}")


def load_error(path: str, what: str, error: Exception) -> WhetError:
    """The WhetError for an exception of transformers."""
    if found := _undownloaded_file(local_path(path)):
        return WhetError(f"model.path: {found}")
    if refused := refused_pickle(error):
        return WhetError(
            f"model.path: the {what} of {path} {refused}. Use a model with .safetensors files; on a machine where you "
            "trust the file, save its state dict alone"
        )
    if "trust_remote_code" in str(error):
        return WhetError(
            f"model.path: the {what} of {path} comes with Python code, and whet runs none. If you have read and trust "
            "it: model.trust_remote_code=true"
        )
    is_plain = isinstance(error, OSError | ValueError | RuntimeError | ImportError)
    reason = first_line(error) if is_plain else describe_error(error)
    method = _quantization_method(local_path(path)) if what == "model" else None
    if method is not None:
        return quantized_weights(path, method, f"; loading them failed: {reason.rstrip('.')}")
    if what != "generation settings" and not _loads_config(path):
        what, reason = "config.json", f"{reason.rstrip('.')}. Correct it, or copy it again"
    if type(error).__name__ == "SafetensorError" or "PytorchStreamReader" in reason:
        reason = f"{reason.split('.')[0]}. A file is incomplete or damaged: copy it again"
    return os_error(error, f"loading the {what}", path) or WhetError(
        f"model.path: the {what} of {path} cannot be loaded: {reason}"
    )


def _loads_config(path: str) -> bool:
    """Whether the configuration is in order, on which transformers reads everything else."""
    from transformers import AutoConfig

    folder = local_path(path)
    try:
        if (folder / "config.json").is_file():
            AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of many kinds
        return any(word in str(error) for word in ("model_type", "model type", "trust_remote_code"))  # an unknown kind
    return True


def quantized_weights(path: str, method: str, failure: str = "") -> WhetError:
    """The WhetError for quantized weights."""
    return WhetError(
        f"model.path: {path}: its weights are quantized ({method}), and whet trains weights that are not{failure}. Use "
        "the model that they were quantized from; with an adapter, quantize: nf4 holds its weights in 4 bits, too"
    )


def _quantization_method(folder: Path) -> str | None:
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
        return str(settings.get("quant_method", "no quant_method in config.json, as of MLX")) if settings else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _undownloaded_file(folder: Path) -> str | None:
    """What a file of a model folder holds in its place, such as a web page."""
    for file in sorted(folder.glob("*")):
        if file.suffix in (".json", ".safetensors", ".bin", ".model") and file.is_file():
            with contextlib.suppress(OSError), file.open("rb") as opened:
                begin = opened.read(64).lstrip().lower()
                if begin.startswith(b"version https://git-lfs"):
                    return f"{file}: a pointer of Git LFS, not the file itself. Fetch it: git lfs pull"
                if begin.startswith((b"<html", b"<!doctype")):
                    return f"{file}: a web page, probably from a failed download. Download the file again"
    return None


def require_files_inside(path: str) -> None:
    """Raise a WhetError if the index of a model folder names weight files outside of the folder."""
    for index in sorted(Path(path).glob("*.index.json")):
        content = read_json(index)
        files = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
            raise WhetError(f"{index}: not the index of a model: weight_map is missing. Copy the file again")
        for name in sorted(set(files.values())):
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise WhetError(f"{index}: it names the file {name}, which is outside of the folder. Do not trust it")


# A folder that whet exported, merged or imported has a certificate with the hashes of its files.

_CERTIFICATE = "certificate.json"
_NOT_CERTIFIED = (_CERTIFICATE, "README.md", "Modelfile")


def hash_model_folder(folder: Path) -> dict[str, str]:
    """Path in the folder → hash of every file but the model card and the Modelfile, which their owner may edit."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name not in _NOT_CERTIFIED)
    return _hash_files(folder, [str(file.relative_to(folder)) for file in files])


def uncertified_files(folder: Path) -> list[str]:
    """The files in a folder that are not of the export that its certificate describes; of a damaged one nothing is
    known, so none."""
    present = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir())
    if _CERTIFICATE not in present:
        return present
    try:
        files = read_hashed_json(folder / _CERTIFICATE, files=dict)["files"]
    except WhetError:
        return []
    return [name for name in present if name not in files and Path(name).name not in _NOT_CERTIFIED]


def _hash_files(folder: Path, names: list[str]) -> dict[str, str]:
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(lambda name: hash_file(folder / name), names), strict=True))


def require_certified_files(folder: Path) -> None:
    """Raise a WhetError if a file has changed since the folder was certified. Folders without a certificate pass; the
    first process of a machine does it for all."""
    certificate = folder / _CERTIFICATE
    if not certificate.is_file() or launch_env.local_rank() != 0:
        return
    files = read_hashed_json(certificate, _EXPORT_AGAIN, files=dict)["files"]
    found = _hash_files(folder, [name for name in files if (folder / name).is_file()])
    changed = sorted(name for name, digest in files.items() if found.get(name) != digest)
    if changed:
        raise WhetError(f"{folder / changed[0]}: missing or altered since the export (hash mismatch). {_EXPORT_AGAIN}")


_EXPORT_AGAIN = f"Export the model again; if you changed it on purpose, delete {_CERTIFICATE} next to it"

_PREFETCH_BYTES = 2**26


def prefetch_weights(path: str, revision: str | None = None) -> threading.Thread | None:
    """Start reading a local model's weights into the page cache in the background; never fails.

    Does nothing if they exceed half of the physical memory. The thread only makes system calls, so forking is safe.
    """
    with contextlib.suppress(OSError, WhetError):
        files = sorted(local_model_folder(path, revision).glob("*.safetensors"))
        if 0 < sum(file.stat().st_size for file in files) < _physical_memory() // 2:
            thread = threading.Thread(target=_advise, args=(files,), name="prefetch weights", daemon=True)
            thread.start()
            return thread
    return None


def _advise(files: list[Path]) -> None:
    with contextlib.suppress(OSError):
        for path in files:
            with path.open("rb") as file:
                for start in range(0, path.stat().st_size, _PREFETCH_BYTES):  # each call may block on the disk
                    os.posix_fadvise(file.fileno(), start, _PREFETCH_BYTES, os.POSIX_FADV_WILLNEED)


def local_model_folder(path: str, revision: str | None) -> Path:
    """The folder of a model on this machine, also in the hub cache; it need not exist."""
    folder = local_path(path)
    if folder.is_dir() or path.count("/") != 1:
        return folder
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    kept = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{path.replace('/', '--')}"
    name = revision or "main"
    reference = kept / "refs" / name
    return kept / "snapshots" / (reference.read_text().strip() if reference.is_file() else name)


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_HASHED_FILES = ("*.safetensors", "*.bin", "config.json")


def weights_hash(config: ModelConfig) -> str | None:
    """Hash of all weight files and config.json, to identify an adapter's base model; None for random weights and if
    the files are not on this machine."""
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
    """Cached by path, size and modification time: 100 GB of weights take minutes to read."""
    about = resolve_path(file).stat()
    key = hash_json([str(resolve_path(file)), about.st_size, about.st_mtime_ns, about.st_ino])
    kept = cache_dir() / "hashes" / key
    if kept.exists():
        return kept.read_text().strip()
    digest = hash_file(file, sha256=True)
    with contextlib.suppress(OSError):  # an unwritable cache only costs time
        kept.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(kept, digest + "\n")
    return digest
