"""nanochat's and torch's distributed checkpoints: what comes out computes what went in, or it is refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from transformers import AutoModelForCausalLM, NanoChatConfig

from whet.exporting.safetensors_writer import PreallocatedSafetensorsWriter
from whet.model.load.builtin_models import builtin_folder

NANO = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "vocab_size": 64, "sequence_len": 64}


@pytest.fixture(scope="module")
def nano() -> Any:
    config = NanoChatConfig(
        vocab_size=64, hidden_size=32, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        weight.data += 0.2 * torch.randn(weight.shape)
    return model


def nanochat_names(model: Any) -> dict[str, torch.Tensor]:
    """As nanochat's GPT calls them."""
    inner = {
        "self_attn.q_proj": "attn.c_q", "self_attn.k_proj": "attn.c_k", "self_attn.v_proj": "attn.c_v",
        "self_attn.o_proj": "attn.c_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
    }  # fmt: skip
    found = {}
    for name, tensor in model.state_dict().items():
        to = name.replace("model.embed_tokens", "transformer.wte").replace("model.layers", "transformer.h")
        for theirs, own in inner.items():
            to = to.replace(theirs, own)
        found[f"_orig_mod.{to}"] = tensor
    return found


def write_nano(folder: Path, tensors: dict[str, torch.Tensor], **sizes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save({}, folder / "model_000100.pt")
    torch.save(tensors, folder / "model_000650.pt")
    (folder / "meta_000650.json").write_text(json.dumps({"step": 650, "model_config": {**NANO, **sizes}}))
    return folder


def test_nanochat_becomes_a_model_of_transformers(nano: Any, whet: Any, tmp_path: Path) -> None:
    tensors = nanochat_names(nano)
    tensors["_orig_mod.transformer.wte.weight"] = tensors[
        "_orig_mod.transformer.wte.weight"
    ].bfloat16()  # as it keeps it
    folder = write_nano(tmp_path / "d2", tensors)
    ended = whet("import", "checkpoint", "nanochat", folder, "--out", tmp_path / "out", "--json")
    assert ended.code == 0, ended.err
    certificate = json.loads(ended.out)["certificate"]
    assert certificate["verified"]
    assert (certificate["compared"], certificate["dtype"]) == ("logits", "float32")
    assert certificate["mapped"]["lm_head.weight"] == ["model_000650.pt:lm_head.weight"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[1, 5, 60, 4, 9, 33, 2]])
    with torch.no_grad():
        nano.model.embed_tokens.weight.data = nano.model.embed_tokens.weight.data.bfloat16().float()
        torch.testing.assert_close(loaded(input_ids=ids).logits, nano(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["resid_lambdas", "value_embeds.1.weight", "transformer.h.1.attn.ve_gate.weight"])
def test_what_later_nanochats_added_is_refused_by_name(name: str, nano: Any, whet: Any, tmp_path: Path) -> None:
    folder = write_nano(tmp_path / "d2", {**nanochat_names(nano), name: torch.ones(2)})
    ended = whet("import", "checkpoint", "nanochat", folder, "--out", tmp_path / "out")
    assert ended.code == 1
    assert f"the tensor {name} belongs to a nanochat" in " ".join(ended.err.split())
    assert not (tmp_path / "out").exists()


def test_nanochat_with_windows_missing_tensors_or_sizes_is_refused(nano: Any, whet: Any, tmp_path: Path) -> None:
    tensors = nanochat_names(nano)

    def said() -> str:
        ended = whet("import", "checkpoint", "nanochat", tmp_path / "d2", "--out", tmp_path / "out")
        assert ended.code == 1
        return " ".join(ended.err.split())

    write_nano(tmp_path / "d2", tensors, window_pattern="SSSL")
    assert "window_pattern SSSL" in said()
    write_nano(tmp_path / "d2", {name: t for name, t in tensors.items() if "h.1.mlp.c_fc" not in name})
    assert "nothing there gives model.layers.1.mlp.fc1.weight (1 of 14" in said()
    write_nano(tmp_path / "d2", tensors, n_layer=1)
    assert "would be model.layers.1." in said()
    write_nano(tmp_path / "d2", {**tensors, "_orig_mod.lm_head.weight": torch.full((64, 32), torch.nan)})
    assert "not finite" in said()
    (tmp_path / "d2/meta_000650.json").write_text("{}")
    assert "model_config is not there" in said()


def save_dcp(folder: Path, **state: Any) -> Path:
    dcp_save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.fixture
def tiny() -> Any:
    return AutoModelForCausalLM.from_pretrained(builtin_folder("builtin:tiny"))


CONFIG: Callable[[], Path] = lambda: builtin_folder("builtin:tiny") / "config.json"


def test_a_distributed_checkpoint_with_its_optimizer_left_out(tiny: Any, whet: Any, tmp_path: Path) -> None:
    """As MindSpeed writes it: below global_step_N, weights under `model`."""
    state = {"model": tiny.state_dict(), "optimizer": {"state": {"model.norm.weight": {"exp_avg": torch.ones(64)}}}}
    save_dcp(tmp_path / "run/global_step_5", **state)
    tiny.model.norm.weight.data += 1
    save_dcp(tmp_path / "run/global_step_20", **{**state, "model": tiny.state_dict()})
    options = ("--config", CONFIG(), "--tokenizer", builtin_folder("builtin:tiny"))
    ended = whet("import", "checkpoint", "mindspeed", tmp_path / "run", "--out", tmp_path / "out", "--json", *options)
    assert ended.code == 0, ended.err
    certificate = json.loads(ended.out)["certificate"]
    assert (certificate["compared"], certificate["verified"], certificate["tensors"]) == ("tensors", True, 20)
    assert certificate["left_out"] == {"model.lm_head.weight": "the embedding once more", "optimizer.*": "no weights"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (name, one), (_, other) in zip(tiny.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    ended = whet("chat", tmp_path / "out", "--prompt", "hi", "--json")
    assert ended.code == 0, ended.err


def test_names_without_a_prefix_and_16_bits(tiny: Any, whet: Any, tmp_path: Path) -> None:
    save_dcp(tmp_path / "in", **{name: tensor.bfloat16() for name, tensor in tiny.state_dict().items()})
    ended = whet(
        "import", "checkpoint", "dcp", tmp_path / "in", "--out", tmp_path / "out", "--config", CONFIG(), "--json"
    )
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["certificate"]["dtype"] == "bfloat16"


class Code:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("code ran",)


def test_bad_distributed_checkpoints_are_named(tiny: Any, whet: Any, tmp_path: Path) -> None:
    def said(*options: Any) -> str:
        given = options or ("--config", CONFIG())
        ended = whet("import", "checkpoint", "dcp", tmp_path / "in", "--out", tmp_path / "out", *given)
        assert ended.code == 1, ended.err
        assert "code ran" not in ended.err
        assert not (tmp_path / "out").exists()
        return " ".join(ended.err.split())

    (tmp_path / "in").mkdir()
    assert "no complete checkpoint" in said()
    save_dcp(tmp_path / "in", model={**tiny.state_dict(), "model.ghost.weight": torch.ones(2)})
    assert "model.model.ghost.weight has no place" in said()
    save_dcp(tmp_path / "in", model={name: t for name, t in tiny.state_dict().items() if "layers.1.mlp" not in name})
    assert "nothing there gives model.layers.1.mlp." in said()
    save_dcp(tmp_path / "in", model={**tiny.state_dict(), "model.norm.weight": torch.ones(63)})
    assert "gives model.norm.weight of the shape [63]" in said()
    save_dcp(tmp_path / "in", other={"x": torch.ones(2)})
    assert "nothing there is called like model.embed_tokens.weight" in said()
    save_dcp(tmp_path / "in", model=tiny.state_dict())
    assert "no config.json there" in said("--json")
    (file,) = (tmp_path / "in").glob("*.distcp")
    whole = file.read_bytes()
    file.write_bytes(whole[:-5000])
    assert "cut off" in said()
    file.write_bytes(bytes(len(whole)))
    assert "cannot be read" in said()
    file.unlink()
    assert "named in .metadata and not there" in said()
    (tmp_path / "in/.metadata").write_bytes(pickle.dumps(Code()))
    assert "builtins.print is not allowed in a checkpoint" in said()


def test_shards_are_what_safetensors_reads(tmp_path: Path) -> None:
    shapes = {"a": (3, 4), "b": (5,), "c": (2, 2, 2), "d": ()}
    shards = PreallocatedSafetensorsWriter(tmp_path, shapes, torch.bfloat16, largest=30)
    drawn = {name: torch.randn(shape) for name, shape in shapes.items()}
    for name in reversed(shapes):
        shards.write(name, drawn[name])
    from safetensors.torch import load_file

    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], drawn[name].bfloat16())
    assert index["metadata"]["total_size"] == 2 * (12 + 5 + 8 + 1)


def test_only_an_empty_folder_is_written_to(tiny: Any, whet: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("precious")
    ended = whet("import", "checkpoint", "dcp", tmp_path, "--out", tmp_path / "out")
    assert ended.code == 1
    assert "not an empty folder" in ended.err
    assert (tmp_path / "out/mine").read_text() == "precious"
