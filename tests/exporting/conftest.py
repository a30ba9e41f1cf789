"""Small random models of several families, and specs of their export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def random_model() -> Callable[..., Any]:
    """random_model("qwen3", tie_word_embeddings=True): two layers, with the vocabulary of builtin:tiny."""

    def make(kind: str, **settings: Any) -> Any:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from whet.model.config import ModelConfig
        from whet.model.load.tokenizer import load_tokenizer

        shape = AutoConfig.for_model(
            kind, **{
                "vocab_size": len(load_tokenizer(ModelConfig(path="builtin:tiny"))) + 3, "hidden_size": 64,
                "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": False, **settings,
            },
        )  # fmt: skip
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(shape).eval()
        for name, weight in model.named_parameters():  # norms and biases that have an effect
            if weight.dim() == 1:
                torch.nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.2)
        return model

    return make


@pytest.fixture(scope="session")
def export_spec_of() -> Callable[..., Any]:
    """export_spec_of(model, "f16"): the spec of its export, with the tokenizer of builtin:tiny."""

    def make(model: Any, dtype: str = "f32", tokenizer: Any = None, **more: Any) -> Any:
        from whet.exporting.dtypes import EXPORT_DTYPES
        from whet.exporting.spec import ExportSpec, GenerationSettings
        from whet.exporting.trained_model import TrainedModel
        from whet.model.config import ModelConfig
        from whet.model.load.tokenizer import load_tokenizer

        tokenizer = tokenizer or load_tokenizer(ModelConfig(path="builtin:tiny"))
        return ExportSpec(
            TrainedModel(model), GenerationSettings(tokenizer, [2, 5], 2, {}), EXPORT_DTYPES[dtype], 7, **more
        )

    return make
