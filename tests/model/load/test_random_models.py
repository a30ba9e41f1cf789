"""Models with random weights: known shapes and config.json files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from small_models import smollm2_folder
from whet.core.errors import WhetError
from whet.model.config import ModelConfig
from whet.model.load.builtin_models import builtin_folder
from whet.model.load.pretrained import load_model
from whet.model.load.random_models import random_model_config
from whet.model.load.tokenizer import load_tokenizer, stop_ids, tokenizer_hashes

TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 49152,
}  # fmt: skip


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    """A folder with a config.json and nothing else."""
    LlamaConfig(**TINY).save_pretrained(tmp_path / "shape")
    return tmp_path / "shape"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # of Llama-3.2-1B, Llama-3.1-8B, Qwen3-8B and SmolLM2-135M as their makers count them
        ("llama-1b", 1_235_814_400),
        ("llama-8b", 8_030_261_248),
        ("qwen3-8b", 8_190_735_360),
        ("smollm-135m", 134_515_008),
    ],
)
def test_a_named_shape_has_the_number_of_weights_of_the_real_model(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(random_model_config(f"random:{name}"), dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_rope_follows_the_config() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(random_model_config("random:qwen3-8b"))
    assert model.config.rope_parameters["rope_theta"] == 1e6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_random_weights_have_the_requested_dtype_and_rope_stays_fp32(shape: Path, dtype: torch.dtype) -> None:
    model = load_model(ModelConfig(path=f"random:{shape}"), dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_the_same_weights_every_time_and_no_other_random_number_changes(shape: Path) -> None:
    config = ModelConfig(path=f"random:{shape}")
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    one = load_model(config, torch.float32)
    assert torch.equal(torch.rand(3), wanted)
    other = load_model(config, "auto")
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name]), name
    assert one.model.layers[0].mlp.up_proj.weight.std() > 0


def test_random_weights_are_initialised_on_the_device(shape: Path) -> None:
    model = load_model(ModelConfig(path=f"random:{shape}"), torch.float32, torch.device("meta"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_a_file_and_its_folder_mean_the_same(shape: Path) -> None:
    file = shape / "config.json"
    assert random_model_config(f"random:{file}").to_dict() == random_model_config(f"random:{shape}").to_dict()


def test_the_quantization_of_a_config_is_ignored(shape: Path) -> None:
    file = shape / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    load_model(ModelConfig(path=f"random:{shape}"), torch.float32)


def test_random_models_use_smollm2s_tokenizer_unless_the_folder_has_one(shape: Path) -> None:
    smollm2 = ModelConfig(path="builtin:smollm2")
    smollm2_folder()
    for path in ("random:llama-8b", f"random:{shape}", f"random:{shape}/config.json"):
        config = ModelConfig(path=path)
        assert len(load_tokenizer(config)) == len(load_tokenizer(smollm2))
        assert tokenizer_hashes(config) == tokenizer_hashes(smollm2)
        assert stop_ids(config) == stop_ids(smollm2)
    tiny = str(builtin_folder("builtin:tiny"))
    assert len(load_tokenizer(ModelConfig(path=f"random:{tiny}"))) < 1000
    assert len(load_tokenizer(ModelConfig(path="random:llama-8b", tokenizer=tiny))) < 1000


@pytest.mark.parametrize(("name", "first"), [("llama-7b", "llama-70b"), ("qwen-8b", "qwen3-8b"), ("", "llama")])
def test_an_unknown_shape_names_the_known_ones_nearest_first(name: str, first: str) -> None:
    with pytest.raises(
        WhetError, match=rf"^model.path: random:{name}: there is no such.*Known shapes: random:{first}.*smollm"
    ):
        load_model(ModelConfig(path=f"random:{name}"), "auto")


@pytest.mark.parametrize("text", ["{broken", '{"model_type": "no-such-kind"}', "[]", '{"model_type": "vit"}'])
def test_a_file_that_is_no_configuration_of_a_language_model_is_an_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "shape.json"
    file.write_text(text)
    with pytest.raises(WhetError, match=r"model\.path: .*shape\.json"):
        load_model(ModelConfig(path=f"random:{file}"), "auto")


def test_a_run_on_random_weights_warns(
    whet: Callable[..., Any], recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(builtin_folder("builtin:tiny").parent)
    relative = builtin_folder("builtin:tiny").name
    ended = whet("train", recipe, f"model.path=random:{relative}", f"run.dir={tmp_path / 'run'}", "train.steps=2")
    assert ended.code == 0, ended.err
    assert ended.err.count("the weights are random") == 1
    monkeypatch.chdir(tmp_path)  # its own config.yaml means the same from any folder
    assert whet("train", "run/config.yaml", "--resume").code == 0
    assert whet("eval", "run").code == 0
