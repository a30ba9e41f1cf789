"""Small random models of several architectures, and documents to run through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

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
            tokens=torch.cat(list(documents)),
            labels=labels,
            positions=torch.cat([torch.arange(len(document)) for document in documents]),
            cu_seqlens=torch.tensor(edges, dtype=torch.int32),
            max_seqlen=max(map(len, documents)),
            supervised_at=torch.nonzero(labels >= 0)[:, 0],
            cu_seqlens_host=tuple(edges),
        )

    return make
