"""Fixtures for all tests: small random models of several architectures, and padded batches of documents.

builtin:smollm2 is here too: small, real, and not to be had everywhere.

They import torch and transformers when they are used, so that tests without them start at once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from whet.model.loss.loss_model import LossModel

_SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def smollm2_folder() -> Path:
    """builtin:smollm2; where it cannot be had, the test is skipped."""
    folder, reason = _find_smollm2()
    return folder or pytest.skip(f"builtin:smollm2 cannot be had here: {reason}")


@functools.cache
def _find_smollm2() -> tuple[Path | None, str]:
    from whet.core.errors import WhetError
    from whet.model.load.builtin_models import builtin_folder

    try:
        return builtin_folder("builtin:smollm2"), ""
    except WhetError as error:
        return None, str(error)


@pytest.fixture(scope="session")
def make_root() -> Callable[..., LossModel]:
    """A random model in training: `make_root("Llama", dropout=0.1, num_hidden_layers=2)`; a dropout makes it LoRA."""
    import torch
    import transformers

    from whet.model import attention
    from whet.model.config import AdapterConfig
    from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
    from whet.model.loss.loss_model import LossModel

    def make(
        architecture: str = "Llama", dtype: torch.dtype = torch.float64, dropout: float | None = None,
        backend: str = "sdpa", **settings: Any,
    ) -> LossModel:  # fmt: skip
        config = getattr(transformers, f"{architecture}Config")(**{**_SHAPE, **settings})
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
        attention.install_backend(model, backend)
        if dropout is not None:
            model = add_adapter(model, AdapterConfig(rank=4, dropout=dropout), seed=0).to(dtype)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.1)  # zero at first: the dropout would not be seen
        return LossModel(unwrap_peft(model)).train()

    return make


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., SimpleNamespace]:
    """Documents of the given lengths and padding, `total` tokens and always ten edges; all else is supervised."""
    import torch

    def make(lengths: Sequence[int], total: int = 48) -> SimpleNamespace:
        starts = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
        edges = (starts + [total] * 10)[:10]
        generator = torch.Generator().manual_seed(sum(length**2 for length in lengths))
        tokens = torch.randint(3, 64, (total,), generator=generator)
        labels = tokens.roll(-1)
        labels[[start - 1 for start in starts]] = -100
        labels[starts[-1] :] = -100
        sizes = [b - a for a, b in itertools.pairwise(edges)]
        return SimpleNamespace(
            tokens=tokens,
            labels=labels,
            positions=torch.cat([torch.arange(size) for size in sizes]),
            cu_seqlens=torch.tensor(edges, dtype=torch.int32),
            max_seqlen=total,
            supervised_at=torch.nonzero(labels >= 0)[:, 0],
            cu_seqlens_host=tuple(edges),
        )

    return make
