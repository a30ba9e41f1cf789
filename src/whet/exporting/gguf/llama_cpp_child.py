"""llama.cpp in a process of its own: it ends the process on errors that it deems fatal.

python -m whet.exporting.gguf.llama_cpp_child quantize|read takes its arguments as JSON on stdin and logs to stderr.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from whet.compat.cyllama_private import load_llama_model, set_importance_matrix


def quantize(source: str, target: str, ftype: int, threads: int, importance_matrix: str | None) -> None:
    """Quantize a GGUF file, as the program llama-quantize does."""
    from cyllama.llama.llama_cpp import LlamaModelQuantizeParams, model_quantize

    settings = LlamaModelQuantizeParams()
    settings.ftype, settings.nthread = ftype, threads
    held = None
    if importance_matrix is not None:
        held = set_importance_matrix(settings, read_importance_matrix(importance_matrix))
    model_quantize(source, target, settings)
    del held


def read_importance_matrix(file: str) -> dict[str, np.ndarray[Any, Any]]:
    """The mean square of each input column of each tensor; for stacked experts one expert after the other, and ones for
    an expert without a token. As llama-quantize reads it."""
    from gguf import GGUFReader

    tensors = {tensor.name: np.asarray(tensor.data, dtype=np.float32) for tensor in GGUFReader(file).tensors}
    means = {}
    for name, sums in tensors.items():
        if name.endswith(".in_sum2"):
            counts = tensors[name.removesuffix("in_sum2") + "counts"].reshape(-1, 1)
            rows = sums.reshape(len(counts), -1)
            means[name.removesuffix(".in_sum2")] = np.where(counts > 0, rows / np.maximum(counts, 1), 1.0).ravel()
    return means


def read(file: str, texts: list[str], probes: list[list[int]], positions: int, threads: int, ends: list[int]) -> None:
    """Write to stdout: a line of JSON about the model, and the logits at the last positions of each probe in fp32.

    With a cache in fp32 and without flash attention: rounding would add to the differences that are looked for.
    """
    from cyllama.llama import llama_cpp

    loading = llama_cpp.LlamaModelParams()
    loading.n_gpu_layers, loading.check_tensors = 0, True
    model = load_llama_model(file, loading)
    vocabulary = model.get_vocab()
    about = {
        "vocabulary": vocabulary.n_vocab,
        "ids": [list(vocabulary.tokenize(text, False, True)) if text else [] for text in texts],
        "template": model.get_default_chat_template(),
        "ends": [number for number in ends if vocabulary.is_eog(number)],
    }
    sys.stdout.buffer.write(json.dumps(about).encode() + b"\n")
    longest = max(map(len, probes))
    settings = llama_cpp.LlamaContextParams()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = longest
    settings.n_threads = settings.n_threads_batch = threads
    settings.type_k = settings.type_v = 0  # GGML_TYPE_F32
    settings.flash_attn_type = 0  # LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.LlamaContext(model, settings)
    batch = llama_cpp.LlamaBatch(n_tokens=longest, embd=0, n_seq_max=1)
    for ids in probes:
        first = max(0, len(ids) - positions)
        context.kv_cache_clear()
        batch.clear()
        for place, number in enumerate(ids):
            batch.add(number, place, [0], place >= first)
        if context.decode(batch) != 0:
            raise RuntimeError("llama_decode failed")
        for place in range(first, len(ids)):
            sys.stdout.buffer.write(np.asarray(context.get_logits_ith(place), dtype=np.float32).tobytes())
    sys.stdout.buffer.flush()


def main() -> None:
    """Run one command."""
    commands: dict[str, Any] = {"quantize": quantize, "read": read}
    try:
        commands[sys.argv[1]](**json.load(sys.stdin))
    except Exception as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
