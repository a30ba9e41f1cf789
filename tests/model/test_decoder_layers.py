"""decoder_layers finds the layers of every architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from whet.core.errors import WhetError
from whet.model.loss.loss_model import LossModel
from whet.model.modules import decoder_layers

Make = Callable[..., LossModel]


@pytest.mark.parametrize("dropout", [None, 0.0], ids=["whole", "lora"])
@pytest.mark.parametrize(
    ("architecture", "settings", "name"),
    [
        ("Llama", {}, "LlamaDecoderLayer"),
        ("Qwen3", {"head_dim": 8}, "Qwen3DecoderLayer"),
        ("Gemma3Text", {"head_dim": 8}, "Gemma3DecoderLayer"),
        ("GPTNeoX", {}, "GPTNeoXLayer"),
        ("GPT2", {"n_embd": 32, "n_layer": 4, "n_head": 4}, "GPT2Block"),
        ("Mixtral", {"num_local_experts": 4}, "MixtralDecoderLayer"),
    ],
)
def test_the_layers_are_found(
    make_root: Make, architecture: str, settings: dict[str, Any], name: str, dropout: float | None
) -> None:
    layers = decoder_layers(make_root(architecture, dropout=dropout, **settings).language_model)
    assert [type(layer).__name__ for layer in layers] == [name] * 4


def test_a_list_of_experts_is_not_the_decoder_layers() -> None:
    layers = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(4, 4)] * 8)}) for _ in range(2))
    model = nn.ModuleDict({"side": nn.ModuleList([nn.Linear(2, 2)] * 9), "layers": layers})
    assert decoder_layers(model) == list(layers)


def test_a_model_without_decoder_layers_is_an_error_with_a_remedy() -> None:
    with pytest.raises(WhetError, match=r"model\.compile=false, parallel\.recompute=none"):
        decoder_layers(nn.Linear(2, 2))
