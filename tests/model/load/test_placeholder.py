"""Placeholder models and the sources of their weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from whet.core.errors import WhetError
from whet.model.config import AdapterConfig, ModelConfig
from whet.model.load.builtin_models import builtin_folder
from whet.model.load.placeholder import (
    InMemorySource,
    SafetensorsSource,
    is_placeholder,
    load_placeholder_model,
    move_real_tensors_,
    replace_with_placeholders_,
)
from whet.model.load.pretrained import load_model
from whet.model.lora.peft_adapters import add_adapter

TINY = ModelConfig(path="builtin:tiny")


def test_a_placeholder_model_takes_no_memory_and_keeps_computed_buffers() -> None:
    model, source = load_placeholder_model(TINY, torch.float32)
    whole = load_model(TINY, torch.float32)
    assert isinstance(source, SafetensorsSource)
    assert sum(weight.untyped_storage().nbytes() for weight in model.parameters()) < 1000
    for (name, weight), (other, real) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert (name, weight.shape, weight.dtype) == (other, real.shape, real.dtype)
        assert torch.equal(source.read_rows(name, 1, 5), real[1:5])
        if real.ndim == 2:
            for each in (source, InMemorySource(whole)):
                assert torch.equal(each.read_rows(name, 1, 5, slice(2, 9)), real[1:5, 2:9])
    for (name, buffer), (other, real) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
        assert name == other
        assert torch.equal(buffer, real)


def test_scalars_and_buffers_come_from_the_files(tmp_path: Path) -> None:
    """Gemma 4 keeps a buffer of one number in the weights of each layer, which no placeholder can stand for."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    shape = Gemma4TextConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, hidden_size_per_layer_input=0, vocab_size_per_layer_input=64,
    )  # fmt: skip
    model = Gemma4ForCausalLM(shape)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.25)
    model.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    placeholder, whole = load_placeholder_model(config, torch.float32)[0], load_model(config, torch.float32)
    ours, theirs = dict(placeholder.named_buffers()), dict(whole.named_buffers())
    assert any(name.endswith("layer_scalar") for name in ours)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    single = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor([3.0])), torch.nn.Parameter(torch.ones(4))])
    replace_with_placeholders_(single)
    assert single[0].item() == 3
    assert is_placeholder(single[1])


def test_files_with_scaled_dtypes_do_not_match(tmp_path: Path) -> None:
    """Numbers with a scale beside them mean nothing by themselves."""
    file = tmp_path / "model.safetensors"
    save_file({"coded": torch.ones(4, 4).to(torch.float8_e4m3fn), "plain": torch.ones(4, 4)}, file)
    files = SafetensorsSource(tmp_path)
    assert files.has_matching("plain", torch.empty(4, 4))
    assert not files.has_matching("plain", torch.empty(4, 5))
    assert not files.has_matching("coded", torch.empty(4, 4))
    assert not files.has_matching("missing", torch.empty(4, 4))


def test_tied_weights_stay_tied() -> None:
    model, _ = load_placeholder_model(TINY, torch.float32)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_a_head_of_its_own_is_not_tied_by_config_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers leaves weights apart that differ in the files. A placeholder model that ties them would be another
    model than the one that was trained, and so would its export."""
    head = 1.5 * load_file(builtin_folder("builtin:tiny") / "model.safetensors")["model.embed_tokens.weight"]
    config = copy_tiny(tmp_path, lm_head__weight=head)
    placeholder, source = load_placeholder_model(config, torch.float32)
    assert "config.json ties lm_head.weight to the embedding" in capsys.readouterr().err
    assert torch.equal(source.read_rows("lm_head.weight", 0, len(head)), head)
    for model in (placeholder, load_model(config, torch.float32)):
        assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
        assert not model.config.tie_word_embeddings
        model.resize_token_embeddings(len(head) + 8)
        assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight


def test_weights_that_the_model_has_no_place_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = copy_tiny(tmp_path / "layer", model__layers__9__mlp__up_proj__weight=torch.ones(4, 4))
    assert isinstance(load_placeholder_model(config, torch.float32)[1], SafetensorsSource)
    printed = capsys.readouterr().err
    assert "weights that are not part of LlamaForCausalLM according to config.json" in printed
    assert printed.endswith("and that are left out: model.layers.9.mlp.up_proj.weight\n")
    config = copy_tiny(tmp_path / "bias", model__layers__0__self_attn__q_proj__bias=torch.ones(64))
    with pytest.raises(WhetError, match=r"some layers lack weights that the files contain \(.*q_proj\.bias\)"):
        load_placeholder_model(config, torch.float32)
    config = copy_tiny(tmp_path / "old", model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    load_placeholder_model(config, torch.float32)
    assert capsys.readouterr().err == ""


def copy_tiny(folder: Path, **weights: torch.Tensor) -> ModelConfig:
    """builtin:tiny with these weights too."""
    shutil.copytree(builtin_folder("builtin:tiny"), folder, dirs_exist_ok=True)
    (folder / "certificate.json").unlink(missing_ok=True)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name.replace("__", "."): weight for name, weight in weights.items()}, file,
              metadata={"format": "pt"})  # fmt: skip
    return ModelConfig(path=str(folder))


def test_adapters_of_a_placeholder_model_start_like_those_of_a_real_one() -> None:
    placeholder = add_adapter(load_placeholder_model(TINY, torch.float32)[0], AdapterConfig(rank=4), 3)
    real = add_adapter(load_model(TINY, torch.float32), AdapterConfig(rank=4), 3)
    move_real_tensors_(placeholder, torch.device("cpu"))
    ours, theirs = (
        {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        for model in (placeholder, real)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not any(map(is_placeholder, ours.values()))


@pytest.mark.parametrize("several", [False, True])
def test_sharded_files_are_found(tmp_path: Path, several: bool) -> None:
    model = load_model(TINY, torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="100KB" if several else "5GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == several
    config = ModelConfig(path=str(tmp_path))
    _, source = load_placeholder_model(config, torch.float32)
    assert isinstance(source, SafetensorsSource)
    for name, weight in model.named_parameters():
        assert torch.equal(source.read_rows(name, 0, len(weight)), weight)


def test_files_with_another_layout_are_read_into_memory(tmp_path: Path) -> None:
    folder = builtin_folder("builtin:tiny")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")  # as old checkpoints have them: without the body's prefix
    save_file({name.removeprefix("model."): weight for name, weight in weights.items()}, tmp_path / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    model, source = load_placeholder_model(ModelConfig(path=str(tmp_path)), torch.float32)
    assert isinstance(source, InMemorySource)
    whole = load_model(TINY, torch.float32)
    for name, weight in whole.named_parameters():
        assert torch.equal(source.read_rows(name, 0, len(weight)), weight)
    assert all(map(is_placeholder, (weight for weight in model.parameters() if weight.numel() > 1)))
