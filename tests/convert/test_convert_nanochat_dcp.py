"""nanochat and torch.distributed checkpoints: the imported model is the same, or the import is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from transformers import AutoModelForCausalLM, NanoChatConfig

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


def test_nanochat_is_imported(nano: Any, whet: Any, tmp_path: Path) -> None:
    tensors = nanochat_names(nano)
    tensors["_orig_mod.transformer.wte.weight"] = tensors[
        "_orig_mod.transformer.wte.weight"
    ].bfloat16()  # nanochat's dtype
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


def test_bad_nanochat_checkpoints_are_refused(nano: Any, whet: Any, tmp_path: Path) -> None:
    tensors = nanochat_names(nano)

    def error_of() -> str:
        ended = whet("import", "checkpoint", "nanochat", tmp_path / "d2", "--out", tmp_path / "out")
        assert ended.code == 1
        return " ".join(ended.err.split())

    write_nano(tmp_path / "d2", tensors, window_pattern="SXL")
    assert "window_pattern is 'SXL', but whet knows S and L only" in error_of()
    write_nano(tmp_path / "d2", tensors, window_pattern="SL")
    assert "no tensor maps to model.resid_lambdas" in error_of()
    write_nano(tmp_path / "d2", {**tensors, "value_embeds.1.weight": torch.ones(64, 16)})
    assert "maps to model.value_embeds.1.weight, which the configured model does not have" in error_of()
    write_nano(tmp_path / "d2", tensors, vocab_size=70)
    assert "vocab_size is 70, 6 more than the tensors" in error_of()
    write_nano(tmp_path / "d2", {name: t for name, t in tensors.items() if "h.1.mlp.c_fc" not in name})
    assert "no tensor maps to model.layers.1.mlp.fc1.weight (1 of 14" in error_of()
    write_nano(tmp_path / "d2", tensors, n_layer=1)
    assert "maps to model.layers.1." in error_of()
    write_nano(tmp_path / "d2", {**tensors, "_orig_mod.lm_head.weight": torch.full((64, 32), torch.nan)})
    assert "not finite" in error_of()
    (tmp_path / "d2/meta_000650.json").write_text("{}")
    assert "model_config is missing or malformed" in error_of()


def save_dcp(folder: Path, **state: Any) -> Path:
    dcp_save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.fixture
def tiny() -> Any:
    return AutoModelForCausalLM.from_pretrained(builtin_folder("builtin:tiny"))


def config_file() -> Path:
    return builtin_folder("builtin:tiny") / "config.json"


def test_a_mindspeed_checkpoint_is_imported_without_its_optimizer(tiny: Any, whet: Any, tmp_path: Path) -> None:
    """MindSpeed writes to global_step_N, with weights under `model`."""
    state = {"model": tiny.state_dict(), "optimizer": {"state": {"model.norm.weight": {"exp_avg": torch.ones(64)}}}}
    save_dcp(tmp_path / "run/global_step_5", **state)
    tiny.model.norm.weight.data += 1
    save_dcp(tmp_path / "run/global_step_20", **{**state, "model": tiny.state_dict()})
    options = ("--config", config_file(), "--tokenizer", builtin_folder("builtin:tiny"))
    ended = whet("import", "checkpoint", "mindspeed", tmp_path / "run", "--out", tmp_path / "out", "--json", *options)
    assert ended.code == 0, ended.err
    certificate = json.loads(ended.out)["certificate"]
    assert (certificate["compared"], certificate["verified"], certificate["tensors"]) == ("tensors", True, 20)
    assert certificate["left_out"] == {"model.lm_head.weight": "tied to the embedding", "optimizer.*": "not weights"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (name, one), (_, other) in zip(tiny.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    ended = whet("chat", tmp_path / "out", "--prompt", "hi", "--json")
    assert ended.code == 0, ended.err


def test_a_dcp_checkpoint_in_bf16_without_a_prefix_is_imported(tiny: Any, whet: Any, tmp_path: Path) -> None:
    save_dcp(tmp_path / "in", **{name: tensor.bfloat16() for name, tensor in tiny.state_dict().items()})
    ended = whet(
        "import", "checkpoint", "dcp", tmp_path / "in", "--out", tmp_path / "out", "--config", config_file(), "--json"
    )
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["certificate"]["dtype"] == "bfloat16"


class Code:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("code ran",)


def test_bad_dcp_checkpoints_are_refused(tiny: Any, whet: Any, tmp_path: Path) -> None:
    def error_of(*options: Any) -> str:
        given = options or ("--config", config_file())
        ended = whet("import", "checkpoint", "dcp", tmp_path / "in", "--out", tmp_path / "out", *given)
        assert ended.code == 1, ended.err
        assert "code ran" not in ended.err
        assert not (tmp_path / "out").exists()
        return " ".join(ended.err.split())

    (tmp_path / "in").mkdir()
    assert "not a complete torch.distributed.checkpoint" in error_of()
    save_dcp(tmp_path / "in", model={**tiny.state_dict(), "model.ghost.weight": torch.ones(2)})
    assert "the configured model has no tensor model.model.ghost.weight" in error_of()
    save_dcp(tmp_path / "in", model={name: t for name, t in tiny.state_dict().items() if "layers.1.mlp" not in name})
    assert "no tensor maps to model.layers.1.mlp." in error_of()
    save_dcp(tmp_path / "in", model={**tiny.state_dict(), "model.norm.weight": torch.ones(63)})
    assert "gives model.norm.weight the shape [63]" in error_of()
    save_dcp(tmp_path / "in", other={"x": torch.ones(2)})
    assert "no tensor is called model.embed_tokens.weight" in error_of()
    save_dcp(tmp_path / "in", model=tiny.state_dict())
    assert "config.json is missing" in error_of("--json")
    (file,) = (tmp_path / "in").glob("*.distcp")
    whole = file.read_bytes()
    file.write_bytes(whole[:-5000])
    assert "truncated" in error_of()
    file.write_bytes(bytes(len(whole)))
    assert "cannot read " in error_of()
    file.unlink()
    assert "listed in .metadata but missing" in error_of()
    (tmp_path / "in/.metadata").write_bytes(pickle.dumps(Code()))
    assert "builtins.print is not allowed in a checkpoint" in error_of()


def test_only_an_empty_folder_is_written_to(tiny: Any, whet: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("precious")
    ended = whet("import", "checkpoint", "dcp", tmp_path, "--out", tmp_path / "out")
    assert ended.code == 1
    assert "not an empty folder" in ended.err
    assert (tmp_path / "out/mine").read_text() == "precious"
