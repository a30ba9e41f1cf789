"""Hardware and libraries of this machine, the back-ends that a run will use, and how to install what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch

import whet
from whet.core.files import cache_dir
from whet.core.resources import available_cores, available_memory, has_triton, multiplies_bf16
from whet.execution.compile import should_compile
from whet.model.attention.backends import active_flash_attention
from whet.model.attention.dispatch import choose_backend
from whet.model.flops import device_peak_flops

_EXTRAS = {
    "cyllama": ("export", "llama.cpp, which quantizes GGUF files and loads them back"),
    "pyarrow": ("data", "Parquet, Arrow and .zst files"),
    "datasets": ("data", "datasets on the hub, hub:OWNER/NAME"),
    "sentencepiece": ("data", "SentencePiece tokenizers"),
    "openpyxl": ("xlsx", "Excel files"),
    "tensorboard": ("track", "curves in TensorBoard"),
    "wandb": ("wandb", "track: [wandb]"),
    "mlflow": ("mlflow", "track: [mlflow]"),
    "trackio": ("trackio", "track: [trackio]"),
    "bitsandbytes": ("quantize", "QLoRA: quantize: nf4"),
    "optuna": ("search", "`whet search`"),
    "jsonschema": ("eval", "scores by JSON schema"),
    "sacrebleu": ("eval", "scores by BLEU and chrF"),
    "rouge_score": ("eval", "scores by ROUGE"),
    "lm_eval": ("lm-eval", "`whet eval --lm-eval`"),
    "fla": ("hybrid", "fast linear attention on a GPU"),
    "cutlass": ("flash", "flash attention 4 for long documents, on Hopper GPUs and newer"),
}
"""Packages of extras by the name they are imported by: the extra, and what it is for."""
_PROGRAMS = {
    "sbatch": "`whet launch --on slurm`",
    "bwrap": "running code that a model writes in `whet eval` (Debian: apt install bubblewrap)",
}
_GIB, _LOW_DISK = 2**30, 20 * 2**30

Level = Literal["ok", "missing", "warning"]


class Fact(NamedTuple):
    """A line of `whet doctor`."""

    subject: str
    level: Level
    text: str


def examine_machine() -> Iterator[Fact]:
    """Versions, devices, back-ends, memory, caches, and what is not installed."""
    yield Fact("whet", "ok", f"{whet.__version__}, Python {platform.python_version()}, {platform.platform()}")
    libraries = ("torch", "transformers", "peft", "triton", "accelerate")
    found = [f"{name} {_version(name)}" for name in libraries if _version(name)]
    yield Fact("libraries", "ok", ", ".join(found))
    yield from _devices()
    yield _memory()
    yield from _folders()
    for module, (extra, purpose) in _EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            yield Fact(module, "missing", f"{purpose}. To install it: pip install 'whet[{extra}]'")
        else:
            yield Fact(module, "ok", purpose)
    for program, purpose in _PROGRAMS.items():
        path = shutil.which(program)
        yield Fact(program, "ok" if path else "missing", f"{purpose}{'' if path is None else f': {path}'}")
    yield from _environment()


def _devices() -> Iterator[Fact]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        reason = "torch is built without CUDA" if built is None else f"torch is built for CUDA {built}, but sees no GPU"
        yield Fact("device", "ok", f"cpu, {torch.get_num_threads()} threads: {reason}")
        yield from _back_ends(torch.device("cpu"))
        return
    for number in range(torch.cuda.device_count()):
        device, properties = torch.device("cuda", number), torch.cuda.get_device_properties(number)
        peak = device_peak_flops(device, "bf16")
        speed = "" if peak is None else f", {peak / 1e12:,.0f} TFLOP/s in bf16"
        capability = f"compute capability {properties.major}.{properties.minor}"
        yield Fact(
            f"cuda:{number}", "ok", f"{properties.name}, {properties.total_memory / _GIB:.0f} GiB, {capability}{speed}"
        )
    yield from _back_ends(torch.device("cuda", 0))


def _back_ends(device: torch.device) -> Iterator[Fact]:
    """What a run with default settings would use."""
    is_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if is_cuda and torch.cuda.is_bf16_supported() else torch.float32
    name = str(dtype).removeprefix("torch.")
    hint = "; train.precision=bf16 is faster on this CPU" if device.type == "cpu" and multiplies_bf16() else ""
    yield Fact("precision", "ok", f"{name}{hint}")
    newest = active_flash_attention() if is_cuda else None
    note = f" (flash attention {newest})" if newest else ""
    yield Fact("attention", "ok", f"{choose_backend('auto', device, dtype)}{note}")
    compiles = should_compile("auto", device, dtype)
    why_not = (
        "" if compiles else ": layers are compiled on CUDA with Triton only" if not is_cuda else ": no Triton here"
    )
    yield Fact(
        "torch.compile", "ok" if compiles or not is_cuda else "warning", f"{'on' if compiles else 'off'}{why_not}"
    )
    if is_cuda:
        has_fp8 = torch.cuda.get_device_capability(device) >= (8, 9)
        yield Fact(
            "fp8", "ok", "train.precision=fp8 works" if has_fp8 else "not on this GPU; it needs Ada, Hopper or newer"
        )
        if not has_triton():
            yield Fact(
                "triton", "warning", "not installed: whet's own kernels cannot run. To install it: pip install triton"
            )


def _memory() -> Fact:
    memory = available_memory()
    size = "unknown" if memory is None else f"{memory / _GIB:.1f} GiB available"
    return Fact("host", "ok", f"{available_cores()} cores, {size}")


def _folders() -> Iterator[Fact]:
    folder = cache_dir()
    free = shutil.disk_usage(_existing(folder)).free
    parts = [f"{each.name} {_size(each) / _GIB:.1f} GiB" for each in sorted(folder.glob("*")) if each.is_dir()]
    text = f"{folder}: {', '.join(parts) or 'empty'}; {free / _GIB:.0f} GiB free. WHET_CACHE moves it"
    yield Fact("cache", "ok" if free > _LOW_DISK else "warning", text)
    here = shutil.disk_usage(Path.cwd()).free
    yield Fact("runs", "ok" if here > _LOW_DISK else "warning", f"{Path.cwd() / 'runs'}: {here / _GIB:.0f} GiB free")


def _existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if each.exists())


def _size(folder: Path) -> int:
    """Bytes of the files in a folder; one that disappears meanwhile counts nothing."""
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            path = Path(root) / file
            total += path.lstat().st_size if path.exists() else 0
    return total


def _environment() -> Iterator[Fact]:
    for name in ("CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "HF_HOME", "OMP_NUM_THREADS", "WHET_CACHE", "SLURM_JOB_ID"):
        if name in os.environ:
            yield Fact(name, "ok", os.environ[name])


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
