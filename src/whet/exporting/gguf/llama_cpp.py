"""llama.cpp in an export: its quantizer with an importance matrix, and loading the finished file with it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from whet.core.console import progress
from whet.core.errors import WhetError
from whet.core.resources import available_cores
from whet.exporting.dtypes import ExportDtype
from whet.exporting.gguf.families import GGUFLayout, text_config
from whet.exporting.trained_model import TrainedModel

INSTALL = "pip install 'whet[export]'"
_PROGRAM = "llama-quantize"
_CHILD = (sys.executable, "-m", "whet.exporting.gguf.llama_cpp_child")
_STEP = re.compile(r"\[\s*\d+/\s*\d+\]")
"""The log of the quantizer: [  12/ 290] blk.0.attn_k.weight - …"""
_KEPT_LINES = 40
_LEAST_FREE_BYTES = 2**16
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "GGML_NO_BACKTRACE": "1"}
"""Threads that wait by computing make a busy machine 50 times slower; llama.cpp starts a debugger when it aborts."""


class LlamaCppError(Exception):
    """llama.cpp failed; the text is its own reason."""


@dataclass(frozen=True, slots=True)
class LlamaCppReading:
    """What llama.cpp makes of a GGUF file."""

    vocabulary: int
    ids: list[list[int]]
    """Of the texts."""
    template: str | None
    ends: list[int]
    """Those of the given tokens at which generation ends."""
    logits: Tensor
    """[N, V] at the last positions of each probe."""


def is_installed() -> bool:
    """Whether llama.cpp can read files here."""
    return find_spec("cyllama") is not None


def require_quantizer(dtype: ExportDtype) -> None:
    """Raise if nothing here can write this type."""
    if not is_installed() and shutil.which(_PROGRAM) is None:
        raise WhetError(
            f"--dtype: {dtype.name} is written by llama.cpp's quantizer, and neither the package cyllama nor the "
            f"program {_PROGRAM} is here. {INSTALL}; or use --dtype q8_0, which whet writes itself"
        )


def quantize_file(source: Path, target: Path, dtype: ExportDtype, importance_matrix: Path | None, tensors: int) -> None:
    """Write `target`, a quantized copy of a GGUF file with so many tensors. Raises LlamaCppError."""
    arguments: str | None = None
    if is_installed():
        command = [*_CHILD, "quantize"]
        settings = {"source": str(source), "target": str(target), "ftype": dtype.llama_ftype}
        matrix = None if importance_matrix is None else str(importance_matrix)
        arguments = json.dumps({**settings, "threads": available_cores(), "importance_matrix": matrix})
    else:
        matrix_option = [] if importance_matrix is None else ["--imatrix", str(importance_matrix)]
        command = [_PROGRAM, *matrix_option, str(source), str(target), dtype.name.upper(), str(available_cores())]
    lines: list[str] = []
    with (
        _process(command, arguments, subprocess.STDOUT) as process,
        progress(f"quantizing to {dtype.name}", tensors, ends_with_line=False) as bar,
    ):
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.decode(errors="replace").strip()
            lines = [*lines[1 - _KEPT_LINES :], line]
            if _STEP.search(line):
                bar.advance()
    if shutil.disk_usage(target.parent).free < _LEAST_FREE_BYTES:  # llama.cpp may end a file early and say nothing
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
    if process.returncode != 0 or not target.exists():
        raise LlamaCppError(_reason(lines, process.returncode))


def read_file(
    file: Path, texts: Sequence[str], probes: Sequence[Sequence[int]], positions: int, ends: Sequence[int]
) -> LlamaCppReading:
    """Load a GGUF file in llama.cpp: ids of the texts, logits at the last `positions` of each probe. Raises
    LlamaCppError."""
    arguments = {
        "file": str(file), "texts": list(texts), "probes": [list(ids) for ids in probes], "positions": positions,
        "threads": available_cores(), "ends": list(ends),
    }  # fmt: skip
    rows = sum(min(len(ids), positions) for ids in probes)
    about: dict[str, Any] = {}
    logits, received = bytearray(), 0
    with tempfile.TemporaryFile() as log, _process([*_CHILD, "read"], json.dumps(arguments), log) as process:
        assert process.stdout is not None
        if first := process.stdout.readline():
            about = json.loads(first)
            logits = bytearray(4 * rows * about["vocabulary"])
            received = _read_into(process.stdout, logits)
        process.wait()
        log.seek(0)
        lines = log.read().decode(errors="replace").splitlines()
    if process.returncode != 0 or not about or received < len(logits):
        raise LlamaCppError(_reason(lines, process.returncode))
    table = torch.frombuffer(logits, dtype=torch.float32).view(rows, about["vocabulary"])
    return LlamaCppReading(about["vocabulary"], about["ids"], about["template"], about["ends"], table)


@contextmanager
def _process(command: Sequence[str], arguments: str | None, log: int | IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive the block: Ctrl-C reaches llama.cpp only between two calls of Python."""
    with tempfile.TemporaryFile() as stdin:
        stdin.write((arguments or "").encode())
        stdin.seek(0)
        environment = {**os.environ, **_ENVIRONMENT}
        process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=log, env=environment)
        try:
            yield process
            process.wait()
        finally:
            process.kill()
            process.wait()


def _read_into(stream: IO[bytes], buffer: bytearray) -> int:
    """Fill the buffer; fewer bytes if the stream ends before."""
    view, filled = memoryview(buffer), 0
    while filled < len(buffer) and (count := stream.readinto(view[filled:])):  # type: ignore[attr-defined]
        filled += count
    return filled


def _reason(lines: Sequence[str], code: int | None) -> str:
    """llama.cpp's own words for what went wrong."""
    wrong = [line for line in lines if re.search(r"\berror|failed|GGML_ASSERT|Missing", line)]
    told = [line for line in wrong if not line.startswith("error: ")]  # of the child, which has seen a code only
    found = next(iter(told or wrong or [line for line in reversed(lines) if line]), "")
    return " ".join(found.removeprefix("warning:").split()) or f"it ended with code {code}"


# An importance matrix for llama.cpp's quantizer: how large the inputs of each weight are in the run's conversations.
#
# Rounding errors of a column count as much as the numbers that it multiplies. The quantizer minimizes them weighted by
# the mean square of each input, which the trained model shows on its own training data.

_CHUNK_TOKENS = 512
"""As llama-imatrix has them: conversations one after another, cut."""


def write_importance_matrix(
    model: TrainedModel, layout: GGUFLayout, conversations: Sequence[Sequence[int]], file: Path
) -> dict[str, int]:
    """Write what `llama-imatrix` would for these conversations. Returns how much went into it, for the certificate.
    Stacked experts get none: the quantizer then weighs their columns equally."""
    from gguf import GGUFWriter

    ids = [number for conversation in conversations for number in conversation]
    length = min(_CHUNK_TOKENS, text_config(model.language_model.config).max_position_embeddings)
    chunks = [ids[start : start + length] for start in range(0, len(ids), length)]
    title = "importance matrix from training conversations"
    with (
        progress(title, len(chunks), ends_with_line=False) as bar,
        _collect(model.language_model, bar.advance) as squares,
    ):
        model.logits(chunks)
    writer = GGUFWriter(file, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["training data of the run"])
    writer.add_uint32("imatrix.chunk_count", len(chunks))
    writer.add_uint32("imatrix.chunk_size", length)
    entries = 0
    for weight in model.weights():
        if len(weight.shape) != 2 or weight.name not in squares:
            continue
        total, count = squares[weight.name]
        for name in layout.split(weight.name, torch.empty(weight.shape, device="meta")):
            writer.add_tensor(f"{name}.in_sum2", total.numpy()[None])
            writer.add_tensor(f"{name}.counts", torch.tensor([[float(count)]]).numpy())
            entries += 1
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"conversations": len(conversations), "tokens": len(ids), "tensors": entries}


@contextlib.contextmanager
def _collect(model: Any, on_chunk: Callable[[], None]) -> Iterator[dict[str, tuple[Tensor, int]]]:
    """Inside this context, sums of squares of the inputs of every linear layer, by the name of its weight, and their
    number."""
    found: dict[str, tuple[Tensor, int]] = {}

    def hook(name: str) -> Any:
        def add(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            rows = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
            total = rows.float().square().sum(0).cpu()
            before, count = found.get(name, (torch.zeros_like(total), 0))
            found[name] = (before + total, count + len(rows))

        return add

    # An adapter wraps its layer and gets the same input; its parts are inside, under other names.
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or hasattr(module, "get_base_layer")
    }
    hooks = [module.register_forward_pre_hook(hook(f"{name}.weight")) for name, module in layers.items()]
    hooks.append(model.get_input_embeddings().register_forward_pre_hook(lambda *_: on_chunk()))
    try:
        yield found
    finally:
        for each in hooks:
            each.remove()
