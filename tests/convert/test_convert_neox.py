"""GPT-NeoX checkpoints: the imported model computes the same logits, for every layout; ambiguous ones are refused."""

from __future__ import annotations

import dataclasses
import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from neox_writer import Layers, write
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from whet.convert import neox
from whet.convert.converter import convert_checkpoint
from whet.convert.foreign_checkpoint import TargetTensor

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
LLAMA = {"num_key_value_heads": 4, "tie_word_embeddings": False, "rms_norm_eps": 1e-5}
NEOX: dict[str, Any] = {"use_parallel_residual": True, "tie_word_embeddings": False}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama, two ranks, by layer": ("llama", {}, {"ranks": 2}),
    "llama, fewer keys, four ranks, by rank": (
        "llama", {"num_key_value_heads": 4, "num_attention_heads": 8}, {"ranks": 4, "by_layer": False},
    ),
    "llama, one rank, tied, biases": (
        "llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, {},
    ),
    "llama, older names": ("llama", {}, {"ranks": 2, "old": True, "by_layer": False}),
    "neox, parallel residual, two ranks": ("gpt_neox", {}, {"ranks": 2}),
    "neox, sequential residual": (
        "gpt_neox", {"use_parallel_residual": False, "hidden_act": "gelu_pytorch_tanh"},
        {"ranks": 2, "by_layer": False},
    ),
    "neox, older names": ("gpt_neox", {}, {"old": True}),
}  # fmt: skip


def make(kind: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    rope = ROPE if kind == "llama" else {**ROPE, "partial_rotary_factor": 0.5}
    own = LLAMA if kind == "llama" else NEOX
    config = AutoConfig.for_model(kind, **{**SIZES, **own, "rope_parameters": rope, **settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():  # norms and biases too, which are initialised to ones and zeros
        weight.data = (weight.data + 0.1 * torch.randn(weight.shape)).to(dtype)
    return model.to(dtype).eval()


def imported(whet: Any, folder: Path, out: Path, *options: Any) -> dict[str, Any]:
    ended = whet("import", "checkpoint", "neox", folder, "--out", out, "--json", *options)
    assert ended.code == 0, ended.err
    return dict(json.loads(ended.out)["certificate"])


def test_a_folder_with_a_link_to_the_start_checkpoint_and_latest(whet: Any, tmp_path: Path) -> None:
    """As on LUMI: a new folder has a symlink to the checkpoint to start from, and `latest` names it."""
    model = make("llama")
    write(model, tmp_path / "final_train_v2")
    start = tmp_path / "translate_sft_v1"
    start.mkdir()
    (start / "global_step423858").symlink_to("../final_train_v2/global_step7")
    (start / "latest").write_text("global_step423858\n")
    certificate = imported(whet, start, tmp_path / "out")
    assert certificate["verified"]
    assert {Path(name).parent.name for name in certificate["sources"]} == {"global_step423858"}
    (start / "global_step423858").unlink()
    (start / "global_step423858").symlink_to("../moved/global_step7")
    assert "names 'global_step423858', which is not a folder here" in error_of(whet, start, tmp_path / "other")


def error_of(whet: Any, folder: Path, out: Path, *options: Any) -> str:
    ended = whet("import", "checkpoint", "neox", folder, "--out", out, *options)
    assert ended.code == 1, ended.err
    assert not out.exists()
    return " ".join(ended.err.split())


@pytest.mark.parametrize("kind", KINDS)
def test_the_imported_model_computes_the_same_logits(kind: str, whet: Any, tmp_path: Path) -> None:
    architecture, settings, layout = KINDS[kind]
    model = make(architecture, **settings)
    certificate = imported(whet, write(model, tmp_path / "in", **layout), tmp_path / "out")
    assert certificate["verified"]
    assert certificate["compared"] == "logits"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[1, 5, 60, 4, 9, 33, 2]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    with safe_open(tmp_path / "out/model.safetensors", framework="pt") as file:
        names = set(file.keys())
    head = "embed_out.weight" if architecture == "gpt_neox" else "lm_head.weight"
    assert (head in names) != model.config.tie_word_embeddings
    used = {name.partition(":")[2] for sources in certificate["mapped"].values() for name in sources}
    assert any("query_key_value" in name for name in used)
    assert set(certificate["sources"]) == {
        str(path.relative_to(tmp_path / "in"))
        for path in (tmp_path / "in/global_step7").glob("layer_*.pt" if layout.get("by_layer", True) else "mp_*.pt")
    }


def test_dtype_and_every_bit_are_kept(whet: Any, tmp_path: Path) -> None:
    model = make("llama", torch.bfloat16)
    certificate = imported(whet, write(model, tmp_path / "in", ranks=2), tmp_path / "out")
    assert certificate["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for (name, one), (_, other) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def drift(rank: int, layers: Layers) -> None:
    layers[3]["post_attention_layernorm.scale"] += 0.25 * rank
    layers[5]["norm.scale"] += 0.125 * rank


def test_norms_that_differ_between_ranks_are_averaged_only_on_request(whet: Any, tmp_path: Path) -> None:
    model = make("llama")
    folder = write(model, tmp_path / "in", ranks=2, change=drift)
    text = error_of(whet, folder, tmp_path / "out")
    assert "2 of 5 norms differ" in text
    assert "layer 3 post_attention_layernorm.scale, by 0.25" in text
    assert "--average-norms" in text
    certificate = imported(whet, folder, tmp_path / "out", "--average-norms")
    assert certificate["averaged"] == pytest.approx(
        {"layer 3 post_attention_layernorm.scale": 0.25, "layer 5 norm.scale": 0.125}
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(loaded.model.norm.weight, model.model.norm.weight + 0.0625)


class Code:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch /tmp/whet-was-here",)


def test_missing_extra_and_dangerous_content_is_refused(whet: Any, tmp_path: Path) -> None:
    model = make("llama")
    files = tmp_path / "in/global_step7"
    folder, out = write(model, tmp_path / "in", ranks=2), tmp_path / "out"
    layer = files / "layer_03-model_01-model_states.pt"
    whole = layer.read_bytes()

    layer.unlink()
    assert "layer_03-model_01-model_states.pt: missing" in error_of(whet, folder, out)
    layer.write_bytes(whole[: len(whole) // 2])
    assert "layer_03-model_01-model_states.pt: truncated or damaged" in error_of(whet, folder, out)
    torch.save({"x": Code()}, layer)
    text = error_of(whet, folder, out)
    assert "layer_03-model_01-model_states.pt: contains more than weights" in text
    assert "system" in text
    assert not Path("/tmp/whet-was-here").exists()
    tensors = llama_layer(whole, tmp_path)
    torch.save({**tensors, "attention.alibi": torch.ones(3)}, layer)
    assert "attention.alibi of layer 3 is missing, but other ranks have it" in error_of(whet, folder, out)
    torch.save({name: t for name, t in tensors.items() if "dense" not in name}, layer)
    assert "attention.dense.weight of layer 3 is missing" in error_of(whet, folder, out)
    torch.save({**tensors, "attention.dense.weight": torch.ones(32, 15)}, layer)
    assert "different shapes on ranks" in error_of(whet, folder, out)
    layer.write_bytes(whole)
    (tmp_path / "other.yml").write_text(
        (files / "configs/run.yml").read_text().replace("num-layers: 2", "num-layers: 1")
    )
    assert "1 transformer layers ends at 5" in error_of(whet, folder, out, "--config", tmp_path / "other.yml")
    (tmp_path / "other.yml").write_text((files / "configs/run.yml").read_text().replace("size: 2", "size: 4"))
    assert "model_parallel_size: 4" in error_of(whet, folder, out, "--config", tmp_path / "other.yml")
    assert "no such file" in error_of(whet, folder, out, "--config", tmp_path / "nothing.yml")
    assert "no such folder" in error_of(whet, tmp_path / "nothing", out)
    (tmp_path / "empty").mkdir()
    assert "not a GPT-NeoX checkpoint" in error_of(whet, tmp_path / "empty", out)


def llama_layer(content: bytes, folder: Path) -> dict[str, torch.Tensor]:
    (folder / "layer.pt").write_bytes(content)
    return dict(torch.load(folder / "layer.pt", weights_only=True))


def test_features_that_transformers_lacks_are_refused(whet: Any, tmp_path: Path) -> None:
    def extra(rank: int, layers: Layers) -> None:
        layers[2]["attention.q_layernorm.weight"] = torch.ones(8)

    model = make("llama")
    text = error_of(whet, write(model, tmp_path / "extra", change=extra), tmp_path / "out")
    assert "layer_02-model_00-model_states.pt:attention.q_layernorm.weight maps to no tensor of llama" in text
    for key, value in {"pos_emb": "alibi", "use_mup": True, "activation": "geglu", "yarn": True}.items():
        folder = write(model, tmp_path / key, **{key: value, "pos-emb": value if key == "pos_emb" else "rotary"})
        assert f"{key} is {value!r} in its settings" in error_of(whet, folder, tmp_path / "out")


def test_a_wrong_configuration_is_detected(whet: Any, tmp_path: Path) -> None:
    model = make("llama", num_key_value_heads=2)
    folder = write(model, tmp_path / "in")
    config = json.loads(model.config.to_json_string())
    for change, words in (
        ({"num_key_value_heads": 4}, "cannot build model.layers.0.self_attn.q_proj.weight"),
        ({"intermediate_size": 40}, "but the configuration has [40, 32]"),
        ({"model_type": "gpt_neox"}, "the tensors are those of llama"),
        ({"rope_parameters": {**ROPE, "rope_theta": 10000.0}}, "does not match the rotary base 10000"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        assert words in error_of(whet, folder, tmp_path / "out", "--config", tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert imported(whet, folder, tmp_path / "out", "--config", tmp_path / "config.json")["verified"]


@pytest.mark.parametrize("fault", ["_join_halves", "_join_columns"])
def test_wrongly_joined_matrices_are_detected_by_the_logits(
    fault: str, whet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = {
        "_join_halves": lambda number: lambda tensors: torch.cat(tensors).chunk(2)[number],  # as if there were one rank
        "_join_columns": lambda tensors: torch.cat(tensors[::-1], dim=1),
    }
    monkeypatch.setattr(neox, fault, planted[fault])
    folder = write(make("llama"), tmp_path / "in", ranks=2)
    ended = whet("import", "checkpoint", "neox", folder, "--out", tmp_path / "out")
    assert ended.code == 3
    assert "the imported model does not match the checkpoint: its logits differ" in " ".join(ended.err.split())
    assert not (tmp_path / "out").exists()


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    checkpoint = neox.NeoXCheckpoint(write(make("llama"), tmp_path / "in", ranks=2), None, average_norms=False)
    alive: list[weakref.ref[torch.Tensor]] = []

    def watched(target: TargetTensor) -> TargetTensor:
        def build() -> torch.Tensor:
            assert not any(reference() is not None for reference in alive), "the previous tensor is still alive"
            tensor = target.build()
            if tensor.numel() > 100:  # norms are views of the file
                alive.append(weakref.ref(tensor))
            return tensor

        return dataclasses.replace(target, build=build)

    targets = checkpoint.targets()
    checkpoint.targets = lambda: [watched(target) for target in targets]  # type: ignore[method-assign]
    convert_checkpoint("neox", tmp_path / "in", checkpoint, None, tmp_path / "out")
    assert len(alive) == 2 * 7 + 2
