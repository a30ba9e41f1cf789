"""`whet merge`: the weighted sum of adapters, in a folder that transformers loads; mismatches are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiny_architectures import save_tiny_model
from whet.checkpoint.directory import checkpoint_name
from whet.compat.peft_private import param_wrapper_type
from whet.core.checksums import write_hashed_json
from whet.core.errors import RunFailedError
from whet.exporting.merge_adapters import merge_adapter_folders
from whet.model.config import AdapterConfig, ModelConfig
from whet.model.load.builtin_models import builtin_folder
from whet.model.load.pretrained import load_model, trainable_token_ids
from whet.model.load.tokenizer import load_tokenizer
from whet.model.load.weight_files import weights_hash
from whet.model.lora.peft_adapters import add_adapter

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make_adapter(tmp_path_factory: pytest.TempPathFactory) -> Make:
    def make(seed: int, tokens: tuple[str, ...] = (), **settings: Any) -> Path:
        folder = tmp_path_factory.mktemp("adapter")
        config = ModelConfig(path="builtin:tiny", add_tokens=list(tokens))
        model = load_model(config, torch.float32)
        ids = trainable_token_ids(config, [])
        model = add_adapter(model, AdapterConfig(**{"rank": 3, "alpha": 5.0, **settings}), seed, ids)
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn(parameter.shape)
        model.save_pretrained(folder)
        load_tokenizer(config).save_pretrained(folder)
        return folder

    return make


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def delta(adapter: Path, layer: str, scale: float) -> torch.Tensor:
    """scale · B·A, from the tensors in the file."""
    found = load_file(adapter / "adapter_model.safetensors")
    a, b = (found[f"base_model.model.{layer}.lora_{side}.weight"] for side in "AB")
    return scale * b @ a


def test_cat_is_the_weighted_sum_whatever_the_ranks(make_adapter: Make, whet: Any, tmp_path: Path) -> None:
    one, two = (
        make_adapter(1),
        make_adapter(2, rank=4, method="rslora", ranks={"q_proj": 2}, targets=["q_proj", "o_proj"]),
    )
    ended = whet(
        "merge", "builtin:tiny", "--adapter", one, "--adapter", f"{two}=-0.5", "--out", tmp_path / "m", "--json"
    )
    assert ended.code == 0, ended.err
    certificate = json.loads(ended.out)["certificate"]
    assert certificate["verified"]
    assert [part["weight"] for part in certificate["adapters"]] == [1.0, -0.5]
    before, after = weights(builtin_folder("builtin:tiny")), weights(tmp_path / "m")
    for layer, scales in (
        ("model.layers.0.self_attn.q_proj", (5 / 3, 5 / 2**0.5)),
        ("model.layers.1.self_attn.o_proj", (5 / 3, 5 / 4**0.5)),
    ):
        expected = delta(one, layer, scales[0]) - 0.5 * delta(two, layer, scales[1])
        torch.testing.assert_close(after[f"{layer}.weight"] - before[f"{layer}.weight"], expected, rtol=1e-4, atol=1e-5)
    only_in_one = "model.layers.0.mlp.up_proj"
    torch.testing.assert_close(
        after[f"{only_in_one}.weight"], before[f"{only_in_one}.weight"] + delta(one, only_in_one, 5 / 3)
    )
    AutoModelForCausalLM.from_pretrained(tmp_path / "m")


def test_linear_averages_the_matrices(make_adapter: Make, whet: Any, tmp_path: Path) -> None:
    one, two = make_adapter(1), make_adapter(2)
    arguments = ("--adapter", f"{one}=0.25", "--adapter", f"{two}=0.75", "--how", "linear", "--out", tmp_path / "m")
    ended = whet("merge", "builtin:tiny", *arguments)
    assert ended.code == 0, ended.err
    layer = "model.layers.0.self_attn.q_proj"
    files = [load_file(adapter / "adapter_model.safetensors") for adapter in (one, two)]
    a, b = (
        sum(
            (w * 5 / 3) ** 0.5 * file[f"base_model.model.{layer}.lora_{side}.weight"]
            for w, file in zip((0.25, 0.75), files, strict=True)
        )
        for side in "AB"
    )
    changed = weights(tmp_path / "m")[f"{layer}.weight"] - weights(builtin_folder("builtin:tiny"))[f"{layer}.weight"]
    torch.testing.assert_close(changed, b @ a, rtol=1e-4, atol=1e-5)


def test_an_adapter_with_added_tokens_brings_its_tokenizer(make_adapter: Make, whet: Any, tmp_path: Path) -> None:
    adapter = make_adapter(1, ("<|tool|>",), method="dora")
    ended = whet("merge", "builtin:tiny", "--adapter", adapter, "--out", tmp_path / "m")
    assert ended.code == 0, ended.err
    assert len(AutoTokenizer.from_pretrained(tmp_path / "m")) == 417
    assert len(weights(tmp_path / "m")["model.embed_tokens.weight"]) == 417


def test_mismatched_adapters_are_refused(make_adapter: Make, whet: Any, tmp_path: Path) -> None:
    one, tokens, dora = (
        make_adapter(1),
        make_adapter(1, ("<|a|>",), also_train=["embed_tokens"]),
        make_adapter(2, method="dora"),
    )
    bare, elsewhere, nothing = tmp_path / "bare", tmp_path / "elsewhere", tmp_path / "nothing"
    shutil.copytree(make_adapter(3, ("<|b|>",)), bare)
    (bare / "tokenizer_config.json").unlink()
    (bare / "tokenizer.json").unlink()
    other = tmp_path / "other"
    shutil.copytree(builtin_folder("builtin:tiny"), other)
    model = AutoModelForCausalLM.from_pretrained(other)
    model.model.norm.weight.data += 1
    model.save_pretrained(other)
    shutil.copytree(one, elsewhere)
    settings = json.loads((elsewhere / "adapter_config.json").read_text())
    (elsewhere / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": str(other)}))
    nothing.mkdir()
    wide = make_adapter(4, rank=5)

    def error_of(*adapters: Any, how: str = "cat") -> str:
        options = [text for adapter in adapters for text in ("--adapter", adapter)]
        ended = whet("merge", "builtin:tiny", *options, "--how", how, "--out", tmp_path / "m")
        assert ended.code == 1
        assert not (tmp_path / "m").exists()
        return " ".join(ended.err.split())

    assert "not an adapter folder, adapter_config.json is missing" in error_of(nothing)
    assert "whose weights differ from those of builtin:tiny" in error_of(elsewhere)
    assert "it has DoRA, which can be neither added" in error_of(one, dora)
    assert "it has DoRA" in error_of(f"{dora}=0.5")
    assert "it has modules_to_save" in error_of(one, tokens)
    assert "it trained token 416, the model has 416 tokens, and the folder has no tokenizer" in error_of(bare)
    assert "'x' is not a number" in error_of(f"{one}=x")
    assert "Use --how cat" in error_of(one, wide, how="linear")
    known = load_tokenizer(ModelConfig(path="builtin:tiny"))
    known.add_tokens(["<|c|>"])
    changed = tmp_path / "changed"
    shutil.copytree(one, changed)
    known.save_pretrained(changed)
    assert "its vocabulary of 418 tokens differs from that of" in error_of(changed, make_adapter_with_two(make_adapter))


def test_an_adapter_is_not_merged_into_a_base_that_has_changed_since(
    make_adapter: Make, whet: Any, tmp_path: Path
) -> None:
    base, adapter = tmp_path / "base", Path(shutil.copytree(make_adapter(1), tmp_path / "adapter"))
    shutil.copytree(builtin_folder("builtin:tiny"), base)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": str(base)}))
    weights_then = weights_hash(ModelConfig(path=str(base)))
    write_hashed_json(adapter / "certificate.json", {"files": {}, "base": weights_then})
    model = AutoModelForCausalLM.from_pretrained(base)
    model.model.norm.weight.data += 1
    model.save_pretrained(base)
    ended = whet("merge", base, "--adapter", adapter, "--out", tmp_path / "m")
    assert ended.code == 1
    assert f"with other weights than those that {base} has now" in " ".join(ended.err.split())
    ended = whet("chat", base, "--adapter", f"mine={adapter}", "--prompt", "Hi", "--max-new-tokens", "2")
    assert f"the weights of {base} are not those that it was trained on" in " ".join(ended.err.split())
    ended = whet("merge", "builtin:tiny", "--adapter", adapter, "--out", tmp_path / "m")  # the same weights elsewhere
    assert ended.code == 0, ended.err


def test_the_earlier_adapter_of_a_run_that_trained_on_is_not_merged(
    make_adapter: Make, whet: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    exported = Path(shutil.copytree(make_adapter(1), run / "exports" / "adapter"))
    write_hashed_json(exported / "certificate.json", {"files": {}, "step": 2})
    (run / "config.yaml").touch()
    for step in (2, 4):
        (run / "checkpoints" / checkpoint_name(step)).mkdir(parents=True)
        (run / "checkpoints" / checkpoint_name(step) / "manifest.json").touch()
    ended = whet("merge", "builtin:tiny", "--adapter", run, "--out", tmp_path / "m")
    assert ended.code == 1
    assert "has the adapter after step 2, but the run has trained to step 4" in " ".join(ended.err.split())
    ended = whet("merge", "builtin:tiny", "--adapter", exported, "--out", tmp_path / "m")
    assert ended.code == 0, ended.err


def make_adapter_with_two(make_adapter: Make) -> Path:
    """An adapter whose tokenizer has two more tokens, neither of them trained."""
    folder = make_adapter(5)
    tokenizer = load_tokenizer(ModelConfig(path="builtin:tiny"))
    tokenizer.add_tokens(["<|d|>", "<|e|>"])
    tokenizer.save_pretrained(folder)
    return folder


def test_generation_settings_that_transformers_does_not_save_are_kept(
    make_adapter: Make, whet: Any, tmp_path: Path
) -> None:
    """Models are published with a temperature for greedy decoding."""
    base = Path(shutil.copytree(builtin_folder("builtin:tiny"), tmp_path / "base"))
    settings = {"do_sample": False, "temperature": 0.6, "eos_token_id": 2}
    (base / "generation_config.json").write_text(json.dumps(settings))
    ended = whet("merge", base, "--adapter", make_adapter(1), "--out", tmp_path / "m")
    assert ended.code == 0, ended.err
    merged = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    assert merged["temperature"] == 0.6


def test_stop_tokens_of_the_adapter_are_merged(make_adapter: Make, whet: Any, tmp_path: Path) -> None:
    base = shutil.copytree(builtin_folder("builtin:tiny"), tmp_path / "base")
    settings = json.loads((base / "generation_config.json").read_text())
    (base / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": 0}))
    adapter = make_adapter(1)
    (adapter / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [0, 2]}))
    ended = whet("merge", base, "--adapter", adapter, "--out", tmp_path / "m")
    assert ended.code == 0, ended.err
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "m").generation_config.eos_token_id == [0, 2]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(base, adapter of its experts)"""
    base, adapter = tmp_path_factory.mktemp("mixture"), tmp_path_factory.mktemp("experts")
    save_tiny_model("qwen3_moe", base)
    model: Any = add_adapter(load_model(ModelConfig(path=str(base)), torch.float32), AdapterConfig(rank=2), seed=0)
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data = 1e-4 * torch.randn(weight.shape)
    model.save_pretrained(adapter)
    return base, adapter


def test_the_certificate_of_a_merge_has_the_effect_on_every_weight(mixture: Any, tmp_path: Path) -> None:
    base, adapter = mixture
    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    effect = merge_adapter_folders(str(base), [str(adapter)], "cat", tmp_path / "out")["certificate"]["effect"]
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert effect["exported"] == effect["moved"] == effect["weights"] == len(effect["modules"])
    moved = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert moved == {each["module"] for each in effect["modules"]}
    assert sum("experts" in name for name in moved) == 4
    for each in effect["modules"]:
        old, new = before[each["module"]], after[each["module"]]
        assert each["change"] == pytest.approx(((new - old).norm() / old.norm()).item(), rel=1e-3)


def test_a_merge_that_misses_the_experts_is_refused(
    mixture: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their updates are too small to show in the logits."""
    base, adapter = mixture
    monkeypatch.setattr(param_wrapper_type(), "merge", lambda *_, **__: None)
    with pytest.raises(RunFailedError, match=r"those of the base: .*experts.*4 of 4 experts.*Nothing was written"):
        merge_adapter_folders(str(base), [str(adapter)], "cat", tmp_path / "out")
    assert not (tmp_path / "out").exists()
