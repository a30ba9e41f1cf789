"""The same terms in whet's words and in the others'."""

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
TERMS = BenchSettings(
    model="llama-8b", mode="full", data=None, rows=2, length=4096, steps=12, warm=4, precision="bf16",
    recompute="none", tokenizer=None, device="cuda",
)  # fmt: skip
TRL = Contender("trl", versions={"trl": "1.16.0", "flash-attn": "2.8.3", "liger-kernel": "0.8.5"})
UNSLOTH = Contender("unsloth", versions={"unsloth": "2026.10.9"})


def of(peer: Contender, **changes: Any) -> dict[str, Any]:
    return peer_config(peer, dataclasses.replace(TERMS, **changes), Path("model"), Path("talks.jsonl"), Path("scratch"))


def recipe(tmp_path: Path, **changes: Any) -> Any:
    file = tmp_path / "whet.yaml"
    file.write_text(dump_yaml(dataclasses.replace(TERMS, **changes).recipe(tmp_path / "run")))
    return read_config(file)


def test_full_training_has_16_bit_weights_and_states_on_both_sides(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    assert (config.model.path, config.model.dtype, config.train.precision) == ("random:llama-8b", "bf16", "bf16")
    assert config.train.optimizer.name == "adamw16bit"
    assert of(TRL)["dtype"] == "bfloat16"  # torch's fused AdamW keeps its states in the type of the weights
    assert of(UNSLOTH)["from_pretrained"]["full_finetuning"] is True
    assert "get_peft_model" not in of(UNSLOTH)


def test_one_step_is_the_same_rows_of_the_same_length(tmp_path: Path) -> None:
    config = recipe(tmp_path, rows=3, length=512, steps=9)
    assert (config.train.batch.rows, config.train.micro_rows, config.row_length, config.train.steps) == (3, 3, 512, 9)
    for sft in (of(TRL, rows=3, length=512, steps=9), of(UNSLOTH, rows=3, length=512, steps=9)["SFTConfig"]):
        assert sft["per_device_train_batch_size"] * sft["gradient_accumulation_steps"] == 3
        assert (sft["max_length"], sft["max_steps"], sft["packing_strategy"]) == (512, 9, "bfd")
        assert sft["learning_rate"] == config.train.optimizer.lr


def test_the_adapter_is_the_same(tmp_path: Path) -> None:
    config, trl, unsloth = recipe(tmp_path, mode="lora"), of(TRL, mode="lora"), of(UNSLOTH, mode="lora")
    assert config.adapter is not None
    assert config.adapter.rank == trl["lora_r"] == unsloth["get_peft_model"]["r"] == 16
    assert config.adapter.alpha == trl["lora_alpha"] == unsloth["get_peft_model"]["lora_alpha"] == 32
    assert config.adapter.dropout == trl["lora_dropout"] == unsloth["get_peft_model"]["lora_dropout"] == 0
    assert config.adapter.targets == trl["lora_target_modules"] == "all-linear"
    assert len(unsloth["get_peft_model"]["target_modules"]) == 7
    assert (config.model.dtype, config.train.optimizer.name) == ("auto", "adamw")


def test_four_bits_are_four_bits_everywhere() -> None:
    assert dataclasses.replace(TERMS, mode="qlora").recipe(Path("run"))["quantize"] == "nf4"
    assert of(TRL, mode="qlora")["bnb_4bit_quant_type"] == "nf4"
    assert of(UNSLOTH, mode="qlora")["from_pretrained"]["load_in_4bit"] is True
    assert [needs_weight_files(TRL, dataclasses.replace(TERMS, mode=mode)) for mode in ("full", "lora", "qlora")] == [
        False, False, True,
    ]  # fmt: skip
    assert needs_weight_files(UNSLOTH, TERMS)


@pytest.mark.parametrize(("recompute", "wanted"), [("none", False), ("full", True)])
def test_recomputing_is_asked_of_everyone_or_of_nobody(tmp_path: Path, recompute: str, wanted: bool) -> None:
    assert recipe(tmp_path, recompute=recompute).parallel.recompute == recompute
    assert of(TRL, recompute=recompute)["gradient_checkpointing"] is wanted
    unsloth = of(UNSLOTH, recompute=recompute, mode="lora")
    assert unsloth["SFTConfig"]["gradient_checkpointing"] is wanted
    for call in ("from_pretrained", "get_peft_model"):  # by default both recompute
        assert unsloth[call]["use_gradient_checkpointing"] == ("unsloth" if wanted else False)


def test_trl_gets_the_fast_kernels_that_it_has_and_a_note_where_it_lacks_them() -> None:
    assert (of(TRL)["attn_implementation"], of(TRL)["use_liger_kernel"]) == ("flash_attention_2", True)
    bare = Contender("trl", versions={"trl": "1.16.0"})
    assert (of(bare)["attn_implementation"], of(bare).get("use_liger_kernel")) == ("sdpa", None)
    assert [note.split()[0] for note in peer_notes(bare, TERMS)] == ["flash-attn", "liger-kernel"]
    assert peer_notes(TRL, TERMS) == []


def test_who_runs_in_bf16_beside_fp8_is_told() -> None:
    eight = dataclasses.replace(TERMS, precision="fp8")
    assert eight.recipe(Path("run"))["train"]["precision"] == "fp8"
    assert of(TRL, precision="fp8")["bf16"] is True
    assert any("bf16" in note for note in peer_notes(TRL, eight))


def test_trl_knows_every_argument() -> None:
    for arguments in (
        of(TRL, device="cpu", precision="fp32"),
        of(UNSLOTH, device="cpu", precision="fp32")["SFTConfig"],
    ):
        known = {field.name for field in dataclasses.fields(SFTConfig)}
        others = {"model_name_or_path", "dtype", "attn_implementation", "datasets"}
        assert set(arguments) - others <= known


def test_there_must_be_something_to_measure() -> None:
    with pytest.raises(WhetError, match=r"--steps 4: the first 4 .* Give more than 4"):
        dataclasses.replace(TERMS, steps=4)
    with pytest.raises(WhetError, match="--mode qlora"):
        dataclasses.replace(TERMS, mode="qlora", precision="fp32")
