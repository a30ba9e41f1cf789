"""Small random models of several architectures, documents to run through them, and Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

_SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="session")
def make_model() -> Callable[..., nn.Module]:
    """A random model: `make_model("Llama", tie_word_embeddings=True)`; fp64, not training."""
    import transformers

    def make(architecture: str, dtype: torch.dtype = torch.float64, **settings: Any) -> nn.Module:
        config = getattr(transformers, f"{architecture}Config")(**{**_SHAPE, **settings})
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()

    return make


@pytest.fixture(scope="session")
def make_documents() -> Callable[..., list[Tensor]]:
    """Random documents of the given lengths."""

    def make(*lengths: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        return [torch.randint(3, 64, (length,), generator=generator) for length in lengths]

    return make


@pytest.fixture(scope="session")
def pack() -> Callable[[Sequence[Tensor]], SimpleNamespace]:
    """Documents as one batch in which every token but the first of each document is learned."""

    def make(documents: Sequence[Tensor]) -> SimpleNamespace:
        edges = [0]
        for document in documents:
            edges.append(edges[-1] + len(document))
        labels = torch.cat([torch.cat([document[1:], torch.tensor([-100])]) for document in documents])
        return SimpleNamespace(
            documents=np.arange(len(documents)),
            tokens=torch.cat(list(documents)),
            labels=labels,
            positions=torch.cat([torch.arange(len(document)) for document in documents]),
            cu_seqlens=torch.tensor(edges, dtype=torch.int32),
            max_seqlen=max(map(len, documents)),
            supervised_at=torch.nonzero(labels >= 0)[:, 0],
            cu_seqlens_host=tuple(edges),
        )

    return make


@pytest.fixture(scope="session")
def in_tritons_interpreter() -> Callable[[str, str], str]:
    """in_tritons_interpreter(__file__, "compute(1)"): call a function of the test file on the CPU, and return what it
    prints. In a new interpreter, no fork: Triton decides when it is imported whether it interprets."""
    if find_spec("triton") is None:
        pytest.skip("needs Triton, to interpret its kernels")
    if tuple(int(part) for part in np.__version__.split(".")[:2]) >= (2, 4):
        pytest.skip("Triton's interpreter cannot count loops with numpy 2.4 or later")

    def call(file: str, what: str) -> str:
        path = os.pathsep.join(filter(None, sys.path))
        told = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        ended = subprocess.run(
            [os.environ["WHET_TEST_PYTHON"], "-c", f"import {Path(file).stem} as cases; cases.{what}"],
            cwd=Path(file).parent, env={**os.environ, **told}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return call
