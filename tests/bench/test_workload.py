"""The same settings as whet's recipe and as the peers' configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from whet.bench.contenders import Contender, needs_weight_files, peer_config, peer_notes
from whet.bench.workload import BenchSettings
from whet.config import read_config
from whet.core.errors import WhetError
from whet.core.yaml import dump_yaml

SFTConfig = pytest.importorskip("trl").SFTConfig
SETTINGS = BenchSettings(
    model="llama-8b", mode="full", data=None, rows=2, length=4096, steps=12, warm=4, precision="bf16",
    recompute="none", tokenizer=None, device="cuda",
)  # fmt: skip
TRL = Contender("trl", versions={"trl": "1.16.0", "flash-attn": "2.8.3", "liger-kernel": "0.8.5"})
UNSLOTH = Contender("unsloth", versions={"unsloth": "2026.10.9"})


def config_of(peer: Contender, **changes: Any) -> dict[str, Any]:
    return peer_config(
        peer, dataclasses.replace(SETTINGS, **changes), Path("model"), Path("conversations.jsonl"), Path("scratch")
    )


def recipe(tmp_path: Path, **changes: Any) -> Any:
    file = tmp_path / "whet.yaml"
    file.write_text(dump_yaml(dataclasses.replace(SETTINGS, **changes).recipe(tmp_path / "run")))
    return read_config(file)


def test_full_training_has_16_bit_weights_and_states(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    assert (config.model.path, config.model.dtype, config.train.precision) == ("random:llama-8b", "bf16", "bf16")
    assert config.train.optimizer.name == "adamw16bit"
    assert config_of(TRL)["dtype"] == "bfloat16"  # the states of torch's fused AdamW have the dtype of the weights
    assert config_of(UNSLOTH)["from_pretrained"]["full_finetuning"] is True
    assert "get_peft_model" not in config_of(UNSLOTH)


def test_a_step_has_the_same_rows_and_length(tmp_path: Path) -> None:
    config = recipe(tmp_path, rows=3, length=512, steps=9)
    assert (config.train.batch.rows, config.train.micro_rows, config.row_length, config.train.steps) == (3, 3, 512, 9)
    for sft in (
        config_of(TRL, rows=3, length=512, steps=9),
        config_of(UNSLOTH, rows=3, length=512, steps=9)["SFTConfig"],
    ):
        assert sft["per_device_train_batch_size"] * sft["gradient_accumulation_steps"] == 3
        assert (sft["max_length"], sft["max_steps"], sft["packing_strategy"]) == (512, 9, "bfd")
        assert sft["learning_rate"] == config.train.optimizer.lr


def test_the_adapter_is_the_same(tmp_path: Path) -> None:
    config, trl, unsloth = recipe(tmp_path, mode="lora"), config_of(TRL, mode="lora"), config_of(UNSLOTH, mode="lora")
    assert config.adapter is not None
    assert config.adapter.rank == trl["lora_r"] == unsloth["get_peft_model"]["r"] == 16
    assert config.adapter.alpha == trl["lora_alpha"] == unsloth["get_peft_model"]["lora_alpha"] == 32
    assert config.adapter.dropout == trl["lora_dropout"] == unsloth["get_peft_model"]["lora_dropout"] == 0
    assert config.adapter.targets == trl["lora_target_modules"] == "all-linear"
    assert len(unsloth["get_peft_model"]["target_modules"]) == 7
    assert (config.model.dtype, config.train.optimizer.name) == ("auto", "adamw")


def test_4_bit_weights() -> None:
    assert dataclasses.replace(SETTINGS, mode="qlora").recipe(Path("run"))["quantize"] == "nf4"
    assert config_of(TRL, mode="qlora")["bnb_4bit_quant_type"] == "nf4"
    assert config_of(UNSLOTH, mode="qlora")["from_pretrained"]["load_in_4bit"] is True
    needs_files = {
        mode: needs_weight_files(TRL, dataclasses.replace(SETTINGS, mode=mode)) for mode in ("full", "qlora")
    }
    assert needs_files == {"full": False, "qlora": True}
    assert not needs_weight_files(TRL, dataclasses.replace(SETTINGS, mode="lora"))
    assert needs_weight_files(UNSLOTH, SETTINGS)


@pytest.mark.parametrize(("recompute", "wanted"), [("none", False), ("full", True)])
def test_recomputation(tmp_path: Path, recompute: str, wanted: bool) -> None:
    assert recipe(tmp_path, recompute=recompute).parallel.recompute == recompute
    assert config_of(TRL, recompute=recompute)["gradient_checkpointing"] is wanted
    unsloth = config_of(UNSLOTH, recompute=recompute, mode="lora")
    assert unsloth["SFTConfig"]["gradient_checkpointing"] is wanted
    for call in ("from_pretrained", "get_peft_model"):  # by default both recompute
        assert unsloth[call]["use_gradient_checkpointing"] == ("unsloth" if wanted else False)


def test_trl_uses_installed_kernels_and_notes_missing_ones() -> None:
    assert (config_of(TRL)["attn_implementation"], config_of(TRL)["use_liger_kernel"]) == ("flash_attention_2", True)
    bare = Contender("trl", versions={"trl": "1.16.0"})
    assert (config_of(bare)["attn_implementation"], config_of(bare).get("use_liger_kernel")) == ("sdpa", None)
    assert [note.split()[0] for note in peer_notes(bare, SETTINGS)] == ["flash-attn", "liger-kernel"]
    assert peer_notes(TRL, SETTINGS) == []


def test_peers_without_fp8_get_a_note() -> None:
    eight = dataclasses.replace(SETTINGS, precision="fp8")
    assert eight.recipe(Path("run"))["train"]["precision"] == "fp8"
    assert config_of(TRL, precision="fp8")["bf16"] is True
    assert any("bf16" in note for note in peer_notes(TRL, eight))


def test_trl_accepts_every_argument() -> None:
    for arguments in (
        config_of(TRL, device="cpu", precision="fp32"),
        config_of(UNSLOTH, device="cpu", precision="fp32")["SFTConfig"],
    ):
        known = {field.name for field in dataclasses.fields(SFTConfig)}
        others = {"model_name_or_path", "dtype", "attn_implementation", "datasets"}
        assert set(arguments) - others <= known


def test_invalid_settings_are_errors() -> None:
    with pytest.raises(WhetError, match=r"--steps 4: the first 4 .* Use more than 4"):
        dataclasses.replace(SETTINGS, steps=4)
    with pytest.raises(WhetError, match="--mode qlora"):
        dataclasses.replace(SETTINGS, mode="qlora", precision="fp32")
