"""`whet import config`: one file of each kind, and what its values mean."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from whet.config import Config, read_config
from whet.convert import configs
from whet.convert.configs.importer import KINDS, fill, find_kind, import_config
from whet.convert.configs.read import read_tree
from whet.core.errors import WhetError
from whet.core.yaml import dump_yaml, parse_yaml

FILES = Path(__file__).parents[1] / "fixtures" / "configs"
EXAMPLES = {
    "trl": "trl.yaml", "axolotl": "axolotl.yaml", "llamafactory": "llamafactory.yaml", "deepspeed": "deepspeed.json",
    "neox": "neox.yml", "nanochat": "nanochat.sh", "mindspeed": "mindspeed.yaml", "determined": "determined.yaml",
}  # fmt: skip


def settings(kind: str, tree: dict[str, Any], onto: dict[str, Any] | None = None) -> dict[str, Any]:
    """The settings that a configuration becomes, by dotted key."""
    recipe = None if onto is None else parse_yaml(dump_yaml(onto), "recipe.yaml")
    draft = fill(KINDS[kind], parse_yaml(dump_yaml(tree), "given.yaml", expand="none"), recipe)
    return {key: node.plain() for key, node in draft.settings.items()}


def notes(kind: str, tree: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """(key, text) of the notes, by category."""
    found: dict[str, list[tuple[str, str]]] = {}
    for note in fill(KINDS[kind], parse_yaml(dump_yaml(tree), "given.yaml", expand="none")).notes:
        found.setdefault(note.category, []).append((note.key, note.text))
    return found


def imported(kind: str, tmp_path: Path) -> tuple[Config, dict[str, Any]]:
    """The example of a kind as a recipe that whet has read, and the result of the import."""
    result = import_config(kind, FILES / EXAMPLES[kind], out=tmp_path / "new.yaml")
    missing = ["model.path=builtin:tiny", "data.sources=[{path: builtin:orders}]"] if result["missing"] else []
    return read_config(tmp_path / "new.yaml", missing), result


# One file of each kind


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_result_is_a_recipe_with_a_comment_on_every_line(kind: str, tmp_path: Path) -> None:
    config, result = imported(kind, tmp_path)
    text = (tmp_path / "new.yaml").read_text()
    assert result["recipe"] == text
    assert parse_yaml(text, "").plain() == result["config"]
    assert config.train.steps == 6 or kind == "deepspeed"
    for line in text.splitlines():
        assert not line or line.startswith("#") or line.rstrip().endswith(":") or "  # " in line, line
    for note in result["notes"]:
        assert note["key"] in text, note


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_kind_is_told_by_the_keys(kind: str) -> None:
    assert import_config(None, FILES / EXAMPLES[kind])["kind"] == kind


def test_trl(tmp_path: Path) -> None:
    config, result = imported("trl", tmp_path)
    assert config.model.path == "some-org/some-model"
    assert (config.data.sources[0].path, config.data.sources[0].split) == ("hub:some-org/some-chats", "train")
    assert (config.data.train_on, config.data.packing, config.data.max_length) == ("assistant", "best-fit", 512)
    assert (config.train.batch.rows, config.train.micro_rows) == (8, 2)
    assert config.train.optimizer.betas == (0.9, 0.999)
    assert (config.train.schedule.name, config.train.schedule.warmup, config.train.schedule.min_frac) == (
        "cosine",
        2,
        0.1,
    )
    assert (config.train.precision, config.run.seed, config.train.clip_norm) == ("bf16", 7, 1.0)
    assert config.adapter is not None
    assert (config.adapter.rank, config.adapter.alpha, config.adapter.dropout) == (8, 16, 0.05)
    assert config.adapter.targets == ["q_proj", "k_proj", "v_proj", "o_proj"]
    lost = {note["key"] for note in result["notes"] if note["category"] == "no equivalent"}
    assert lost == {"push_to_hub"}
    assert config.track == ["wandb"]


def test_axolotl(tmp_path: Path) -> None:
    config, _ = imported("axolotl", tmp_path)
    assert (config.data.train_on, config.data.packing, config.data.too_long) == ("assistant", "best-fit", "drop")
    assert (config.train.batch.rows, config.train.micro_rows) == (4, 2)
    assert config.adapter is not None
    assert config.adapter.targets == "all-linear"
    assert (config.train.schedule.warmup, config.train.schedule.min_frac) == (3, 0.1)
    assert config.train.precision == "auto"
    assert config.data.validation is not None
    assert config.data.validation.fraction == 0.1


def test_axolotl_evaluates_every_eval_steps_without_a_strategy() -> None:
    """Its trainer takes the strategy from eval_steps; transformers would not evaluate."""
    assert settings("axolotl", {"eval_steps": 50})["eval.every"] == 50
    assert "eval.every" not in settings("axolotl", {})
    assert "eval.every" not in settings("trl", {"eval_steps": 50})


def test_llamafactory(tmp_path: Path) -> None:
    config, _ = imported("llamafactory", tmp_path)
    assert (config.data.train_on, config.data.packing) == ("assistant", "none")
    assert config.train.batch.conversations == 8
    assert config.adapter is not None
    assert (config.adapter.rank, config.adapter.alpha, config.adapter.targets) == (8, 16, "all-linear")
    assert [source.max_samples for source in config.data.sources] == [100, 100]


def test_llamafactory_finds_its_datasets(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    info = {
        "identity": {"file_name": "identity.json"},
        "orders": {
            "hf_hub_url": "org/orders",
            "split": "train",
            "columns": {"prompt": "question", "response": "answer"},
        },
    }
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    file = tmp_path / "lf.yaml"
    file.write_text("stage: sft\ndataset: identity, orders\nmodel_name_or_path: m\n")
    first, second = import_config("llamafactory", file)["config"]["data"]["sources"]
    assert first == {"path": "data/identity.json"}
    assert second == {
        "path": "hub:org/orders",
        "split": "train",
        "fields": {"instruction": "question", "output": "answer"},
    }


def test_what_llamafactory_says_of_a_dataset_lands_in_the_source_or_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    info = {
        "chats": {
            "file_name": "chats.json", "formatting": "sharegpt", "num_samples": 900,
            "columns": {"messages": "turns", "tools": "abilities", "images": "photos"},
            "tags": {"role_tag": "speaker", "content_tag": "value", "user_tag": "customer"},
        },
        "pairs": {"file_name": "pairs.json", "ranking": True, "folder": "new"},
    }  # fmt: skip
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    file = tmp_path / "lf.yaml"
    file.write_text("stage: sft\ndataset: chats, pairs\nmax_samples: 50\nmodel_name_or_path: m\n")
    result = import_config("llamafactory", file)
    first, second = result["config"]["data"]["sources"]
    assert first == {"path": "data/chats.json", "fields": {"messages": "turns", "tools": "abilities"},
                     "max_samples": 50}  # fmt: skip
    assert second == {"path": "data/pairs.json", "max_samples": 50}
    named = " ".join(note["text"] for note in result["notes"])
    for text in ("columns.images: 'photos'", "tags.role_tag: 'speaker'", "tags.user_tag: 'customer': whet reads human",
                 "pairs: ranking: True", "pairs: folder: 'new'"):  # fmt: skip
        assert text in named
    assert "content_tag" not in named


def test_llamafactory_mixes_by_a_list_of_shares_or_in_turns() -> None:
    def weights(**given: Any) -> list[Any]:
        found = settings("llamafactory", {"dataset": "a/b.json,a/c.json", **given})
        return [found.get(f"data.sources.{number}.weight") for number in (0, 1)]

    assert weights(mix_strategy="interleave_under", interleave_probs=[0.7, 0.3]) == [0.7, 0.3]
    assert weights(mix_strategy="interleave_under") == [1.0, 1.0]
    assert weights() == [None, None]


def test_neox_masks_by_its_mask_keys(tmp_path: Path) -> None:
    config, _ = imported("neox", tmp_path)
    (source,) = config.data.sources
    assert (source.path, source.format) == ("data/chats_text_document", "tokens")
    assert source.mask is not None
    assert (source.mask.pairs, source.mask.alternating) == ([(7, 7)], [8])
    assert (config.data.packing, config.train.batch.rows, config.train.clip_norm) == ("k-bin", 4, 1.0)
    assert (config.train.schedule.warmup, config.train.schedule.min_frac) == (3, 0.1)
    assert config.train.optimizer.weight_decay == 0.1


def test_nanochat(tmp_path: Path) -> None:
    config, _ = imported("nanochat", tmp_path)
    assert (config.train.batch.tokens, config.train.micro_rows, config.data.max_length) == (2048, 2, 512)
    assert config.train.steps == 6  # ⌈(13 − 1) / 2⌉: --num-iterations counts micro-batches and runs one short
    assert config.data.train_on == "assistant"
    assert [source.path for source in config.data.sources] == ["hub:HuggingFaceTB/smol-smoltalk", "hub:openai/gsm8k"]
    optimizer = config.train.optimizer
    assert (optimizer.flavour, optimizer.matrix_lr, optimizer.scalar_lr, optimizer.scale) == (
        "nanochat",
        0.02,
        0.5,
        0.8,
    )
    assert config.track == ["wandb"]
    assert (config.train.schedule.name, config.train.schedule.decay, config.train.schedule.init_frac) == ("wsd", 0.5, 0)


def test_mindspeed(tmp_path: Path) -> None:
    config, result = imported("mindspeed", tmp_path)
    assert (config.train.schedule.name, config.train.schedule.warmup, config.train.schedule.min_frac) == (
        "cosine",
        0,
        0.1,
    )
    assert config.train.batch.conversations == 4
    assert "FSDP module globs" in next(
        note["text"] for note in result["notes"] if note["key"] == "parallel.fsdp_modules"
    )


def test_determined_with_its_deepspeed_file(tmp_path: Path) -> None:
    config, result = imported("determined", tmp_path)
    assert config.train.optimizer.lr == 1e-4  # training_arguments are appended to the entrypoint, and win
    assert (config.data.train_on, config.data.max_length, config.train.batch.rows) == ("all", 512, 4)
    assert config.train.schedule.name == "constant"  # DeepSpeed's WarmupLR replaces the linear one of the arguments
    assert config.train.schedule.warmup == 2
    assert (config.train.precision, config.parallel.shard, config.launch.gpus) == ("fp16", 1, 1)
    assert config.launch.env == {"NCCL_DEBUG": "INFO"}
    lost = {note["key"]: note["text"] for note in result["notes"] if note["category"] == "no equivalent"}
    assert "remote checkpoint storage" in lost["checkpoint_storage.bucket"]


# What values mean


@pytest.mark.parametrize(
    ("given", "learned"),
    [
        ({}, "all"),
        ({"assistant_only_loss": True}, "assistant"),
        ({"completion_only_loss": True}, "last"),
        ({"completion_only_loss": False}, "all"),
    ],
)
def test_what_trl_learns(given: dict[str, Any], learned: str) -> None:
    assert settings("trl", given)["data.train_on"] == learned


@pytest.mark.parametrize(
    ("given", "learned"),
    [
        ({}, "assistant"),
        ({"train_on_inputs": True}, "all"),
        ({"datasets": [{"path": "a.jsonl", "type": "completion"}]}, "all"),
        ({"datasets": [{"path": "a.jsonl", "type": "chat_template", "roles_to_train": ["user", "assistant"]}]}, "all"),
        ({"datasets": [{"path": "a.jsonl", "type": "alpaca"}]}, "assistant"),
        ({"pretraining_dataset": "org/text"}, "all"),
    ],
)
def test_what_axolotl_learns(given: dict[str, Any], learned: str) -> None:
    assert settings("axolotl", given)["data.train_on"] == learned


@pytest.mark.parametrize(
    ("given", "learned"),
    [({}, "assistant"), ({"train_on_prompt": True}, "all"), ({"mask_history": True}, "last"), ({"stage": "pt"}, "all")],
)
def test_what_llamafactory_and_mindspeed_learn(given: dict[str, Any], learned: str) -> None:
    assert settings("llamafactory", given)["data.train_on"] == learned
    grouped = {"training" if key == "stage" else "data": {key: value} for key, value in given.items()}
    assert settings("mindspeed", grouped)["data.train_on"] == learned


def test_neox_without_mask_keys_trains_on_every_token_and_it_says_so() -> None:
    given = {"train_data_paths": ["a"], "train_iters": 5}
    assert settings("neox", given)["data.train_on"] == "all"
    assert "data.sources.0.mask.pairs" not in settings("neox", given)
    assert any("SFT_ENABLED" in text for _, text in notes("neox", given)["decide"])


def test_a_folder_that_neox_loads_from_is_no_run_folder() -> None:
    """As on LUMI: `save` and `load` are one folder."""
    given = {"load": "/scratch//ckpt", "save": "/scratch/ckpt"}
    assert "run.dir" not in settings("neox", given)
    assert any(key == "save" and "set run.dir" in text for key, text in notes("neox", given)["decide"])


def test_nanochat_of_february_trains_on_every_token(tmp_path: Path) -> None:
    file = tmp_path / "run.txt"
    file.write_text("python -m scripts.chat_sft --dtype=float32 --num-iterations -1 --init-lr-frac 0.5\n")
    config = import_config("nanochat", file)["config"]
    assert config["data"]["train_on"] == "all"
    assert (config["train"]["precision"], config["train"]["epochs"]) == ("fp32", 1.0)
    assert (config["train"]["schedule"]["decay"], config["train"]["schedule"]["warmup"]) == (0.2, 0)
    optimizer = config["train"]["optimizer"]
    assert (optimizer["lr"], optimizer["scale"]) == (0.004, 0.5)  # × (width/768)^-½ by the optimizer
    assert "init_frac" not in config["train"]["schedule"]  # the whole run is scaled
    assert ("device_type", "TPUs") in notes("nanochat", {"device_type": "xla"})["no equivalent"]
    assert "run.device" not in settings("nanochat", {"device_type": ""})
    ((_, convert),) = [note for note in notes("nanochat", {"model_tag": "d4", "model_step": 650})["decide"]
                       if note[0] == "model_tag"]  # fmt: skip
    assert "--step 650" in convert
    assert [source["path"] for source in config["data"]["sources"]][-1] == "builtin:spelling-bee"


@pytest.mark.parametrize(
    ("kind", "given", "key", "size"),
    [
        ("trl", {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}, "train.batch.conversations", 32),
        ("trl", {"per_device_train_batch_size": 4, "packing": True}, "train.batch.rows", 4),
        ("axolotl", {"micro_batch_size": 3, "gradient_accumulation_steps": 2}, "train.batch.conversations", 6),
        ("axolotl", {"micro_batch_size": 3, "dp_shard_size": 4, "dp_replicate_size": 2},
         "train.batch.conversations", 24),
        ("llamafactory", {"per_device_train_batch_size": 2, "neat_packing": True}, "train.batch.rows", 2),
        ("mindspeed", {"parallel": {"fsdp_size": 8}, "training": {"per_device_train_batch_size": 2}},
         "train.batch.conversations", 16),
        ("neox", {"train_micro_batch_size_per_gpu": 3, "num_nodes": 4, "num_gpus": 8, "model_parallel_size": 2},
         "train.batch.rows", 48),
        ("neox", {"train_batch_size": 192, "train_micro_batch_size_per_gpu": 3}, "train.batch.rows", 192),
        ("deepspeed", {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, "train.batch.conversations", 64),
        ("deepspeed", {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
         "train.batch.conversations", 8),
    ],
)  # fmt: skip
def test_a_batch_is_micro_batch_times_accumulation_times_processes(
    kind: str, given: dict[str, Any], key: str, size: int
) -> None:
    assert settings(kind, given)[key] == size


def test_an_unknown_number_of_processes_is_said() -> None:
    ((key, text),) = notes("axolotl", {"micro_batch_size": 3})["decide"]
    assert key == "micro_batch_size"
    assert "multiply it by the number of data-parallel GPUs" in text
    assert "decide" not in notes("axolotl", {"micro_batch_size": 3, "dp_shard_size": 4})


def test_a_batch_that_neox_would_refuse_is_named() -> None:
    given = {"train_micro_batch_size_per_gpu": 3, "train_batch_size": 192, "global_num_gpus": 192}
    assert any("192 is not 3 × 1 × 192 = 576" in text for key, text in notes("neox", given)["decide"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"lr_scheduler_type": "linear"}, ("linear", 0, None)),
        ({"lr_scheduler_type": "constant", "warmup_steps": 10}, ("constant", 0, None)),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10}, ("constant", 10, None)),
        ({"lr_scheduler_type": "cosine", "warmup_ratio": 0.1}, ("cosine", 0.1, None)),
        ({"lr_scheduler_type": "cosine", "warmup_steps": 0.05}, ("cosine", 0.05, None)),
        ({"lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "max_steps": 95}, ("cosine", 10, None)),
        ({"lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "warmup_steps": 7}, ("cosine", 7, None)),
        ({"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-4, "lr_scheduler_kwargs": {"min_lr": 1e-5}},
         ("cosine", 0, 0.1)),
        ({"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": '{"num_decay_steps": 30}'},
         ("wsd", 0, None)),
    ],
)  # fmt: skip
def test_schedules(given: dict[str, Any], expected: tuple[Any, ...]) -> None:
    found = settings("trl", given)
    names = ("name", "warmup", "min_frac")
    assert tuple(found.get(f"train.schedule.{name}") for name in names) == expected
    assert type(found["train.schedule.warmup"]) is type(expected[1])  # an integer counts steps, a number is a fraction


@pytest.mark.parametrize(
    ("kind", "given", "precision"),
    [
        ("trl", {}, "bf16"), ("trl", {"fp16": True}, "fp16"), ("trl", {"bf16": False}, "fp32"),
        ("llamafactory", {}, "fp32"), ("llamafactory", {"bf16": True}, "bf16"),
        ("llamafactory", {"fp16": "yes"}, "fp16"),
        ("axolotl", {}, "auto"), ("axolotl", {"bf16": True}, "bf16"), ("axolotl", {"fp16": True}, "fp16"),
        ("axolotl", {"bf16": False}, "fp32"), ("axolotl", {"fp8": True}, "fp8"),
        ("neox", {"precision": "bfloat16"}, "bf16"), ("neox", {"fp16": {"enabled": True}}, "fp16"),
        ("neox", {}, "fp32"),
        ("deepspeed", {"bf16": {"enabled": True}}, "bf16"), ("deepspeed", {"fp16": {"enabled": False}}, None),
        ("deepspeed", {"fp16": {"enabled": "auto"}}, None),
        ("mindspeed", {"parallel": {"param_dtype": "fp32"}}, "fp32"),
    ],
)  # fmt: skip
def test_precision(kind: str, given: dict[str, Any], precision: str | None) -> None:
    assert settings(kind, given).get("train.precision") == precision


def test_no_clipping_stays_no_clipping() -> None:
    for kind, given in (("trl", {"max_grad_norm": 0}), ("deepspeed", {"gradient_clipping": 0.0})):
        assert settings(kind, given)["train.clip_norm"] >= 1e9


@pytest.mark.parametrize(
    ("kind", "given", "targets"),
    [
        ("trl", {"use_peft": True}, ["q_proj", "v_proj"]),
        ("trl", {"use_peft": True, "lora_target_modules": "all-linear"}, "all-linear"),
        ("trl", {"use_peft": True, "lora_target_modules": r".*\.(q|v)_proj"}, r".*\.(q|v)_proj"),
        ("llamafactory", {"lora_target": "q_proj,v_proj"}, ["q_proj", "v_proj"]),
        ("axolotl", {"adapter": "qlora", "load_in_4bit": True, "lora_r": 4, "lora_alpha": 8,
                     "lora_target_linear": True}, "all-linear"),
    ],
)  # fmt: skip
def test_the_targets_of_adapters(kind: str, given: dict[str, Any], targets: Any) -> None:
    found = settings(kind, given)
    assert found["adapter.targets"] == targets
    assert found.get("quantize") == ("nf4" if "load_in_4bit" in given else None)


def test_a_script_says_how_many_processes_there_are(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        "set -e\nexport A=1\naccelerate launch --config_file z.yaml --num_processes 8 trl/scripts/sft.py \\\n"
        "  --model_name_or_path m --dataset_name org/chats \\\n"
        "  --per_device_train_batch_size 2 --packing --lora_target_modules q_proj v_proj --use_peft\n"
    )
    result = import_config(None, file)
    assert (result["kind"], result["config"]["train"]["batch"]) == ("trl", {"rows": 16})
    assert result["config"]["adapter"]["targets"] == ["q_proj", "v_proj"]
    assert result["config"]["launch"] == {"gpus": 8}


@pytest.mark.parametrize(
    "text",
    [
        "# sft: the second stage\nmkdir -p out/sft\nCOMMAND --learning_rate 1e-6\n",
        "echo --learning_rate 7 && COMMAND --learning_rate 1e-6 2>&1 | tee --append log; exit\n",
        "python prepare.py --out sft.jsonl\nCOMMAND --learning_rate 1e-6 >log --eos_token '<|end|>' &\n",
        "if true; then COMMAND --custom x.py --learning_rate 1e-6 --seed 1; fi; pip install --upgrade x\n",
        "OTHER='\n  --stage sft \\\n  --seed 2\n'\nCOMMAND --learning_rate 1e-6 \\\n # --seed 3 \\\n  --seed 4\n",
    ],
)
@pytest.mark.parametrize("command", ["trl sft", "torchrun $WHERE train_sft.py", "A=1 python -m my.sft --"])
def test_the_options_are_those_of_the_command_that_trains(text: str, command: str, tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(text.replace("COMMAND", command))
    given = read_tree(file, ("sft",)).plain()
    assert given["learning_rate"] == "1e-6"
    assert given.keys() <= {"learning_rate", "seed", "eos_token", "custom"}
    assert given.get("seed", "1") == "1"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\ntrl sft $ARGS --seed 1", "run.sh:2: $ARGS may hold options"),
        ("\ntrl sft --output_dir $OUT \\\n --dataset_name x $ARGS", "run.sh:3: $ARGS may hold options"),
        ('\ntorchrun sft.py "${ARGS[@]}"', "run.sh:2: ${ARGS[@]} may hold options"),
        ("\naccelerate launch sft.py a.yaml --seed=1", "run.sh:2: the settings are in a.yaml. Import that file"),
        ("\ntrl sft --config a.yaml --seed 1", "run.sh:2: the settings are in a.yaml. Import that file"),
        ("\ntrl sft seed=1 --max_length 9", "run.sh:2: 'seed=1' is not an option"),
        ("\ntrl sft --seed 1\ntrl sft --seed 2", "run.sh:2: sft is in another command too, in line 3"),
        ("\n# trl sft --seed 1\npython x.py --seed 1", "run.sh: the file holds no command line with sft"),
    ],
)
def test_what_may_stand_for_options_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(WhetError) as caught:
        read_tree(tmp_path / "run.sh", ("sft",))
    assert says in str(caught.value)


@pytest.mark.parametrize("name", ["unsloth.py", "unsloth.ipynb"])
def test_code_is_no_configuration(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"cells": [], "nbformat": 4}')
    with pytest.raises(WhetError, match=r"not Python code\. .* trainer\.args\.to_json_string"):
        import_config("trl", tmp_path / name)


def test_variants_of_switches() -> None:
    found = settings("axolotl", {"gradient_checkpointing": "offload", "torch_compile": "auto"})
    assert (found["parallel.recompute"], found["parallel.offload"]) == ("full", "activations")
    assert settings("mindspeed", {"training": {"lr_scheduler_type": "constant", "max_steps": 95, "warmup_ratio": 0.1}})[
        "train.schedule.warmup"
    ] == 9  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "given", "place"),
    [
        ("mindspeed", {"training": {"warmup_ratio": 0.0}}, "training.warmup_ratio"),
        ("trl", {"warmup_ratio": 0, "learning_rate": 1}, "warmup_ratio"),
        ("trl", {"warmup_ratio": 0, "warmup_steps": 0}, "warmup_steps"),
    ],
)
def test_a_run_without_warm_up_names_the_key_that_says_so(kind: str, given: dict[str, Any], place: str) -> None:
    draft = fill(KINDS[kind], parse_yaml(dump_yaml(given), "given.yaml", expand="none"))
    warmup = draft.settings["train.schedule.warmup"]
    assert warmup.value == 0
    assert warmup.place.endswith(f" {place}")


def test_prompts_of_another_making_are_said() -> None:
    kind = {"field_instruction": "q", "field_output": "a", "format": "{instruction}"}
    given = {"datasets": [{"path": "a.jsonl", "type": kind}]}
    assert settings("axolotl", given)["data.sources.0.fields"] == {"instruction": "q", "output": "a"}
    assert any("chat template" in text for _, text in notes("axolotl", given)["different"])


@pytest.mark.parametrize(
    ("kind", "given", "left_out"),
    [
        ("axolotl", {"tensor_parallel_size": 2, "context_parallel_size": 2}, "parallel.tensor"),
        ("axolotl", {"dp_shard_size": 2, "adapter": "lora", "peft_use_dora": True, "lora_r": 4, "lora_alpha": 8},
         "parallel.shard"),
        ("neox", {"train_data_paths": ["a"], "valid_data_paths": ["a"]}, "data.validation.sources.0.path"),
        ("trl", {"dataset_name": "o/c", "dataset_test_split": "train", "eval_strategy": "epoch"},
         "data.validation.sources.0.path"),
    ],
)  # fmt: skip
def test_what_cannot_be_combined_is_left_out_and_named(
    kind: str, given: dict[str, Any], left_out: str, tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text(dump_yaml(given))
    result = import_config(kind, tmp_path / "a.yaml")
    assert left_out in {note["key"] for note in result["notes"]}
    assert "validation" not in result["config"].get("data", {})


def test_a_deepspeed_file_is_not_taken_for_one_of_neox(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        '{"_comment": "mine", "zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}'
    )
    assert import_config(None, tmp_path / "a.json")["kind"] == "deepspeed"


def test_how_trl_and_deepspeed_change_the_result_is_not_taken_for_speed() -> None:
    assert [key for key, _ in notes("trl", {"dataset_kwargs": {"skip_prepare_dataset": True}})["no equivalent"]] == [
        "dataset_kwargs"
    ]
    assert "no equivalent" in notes("deepspeed", {"optimizer": {"params": {"amsgrad": True}}})
    assert "no equivalent" not in notes("deepspeed", {"optimizer": {"params": {"amsgrad": False}}})


def test_secrets_stay_out_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "other")
    file = tmp_path / "a.yaml"
    file.write_text(
        "entrypoint: python run_clm.py --hub_token topsecret --max_steps 3\n"
        "environment: {environment_variables: [WANDB_API_KEY=topsecret, A=1]}\n"
        "checkpoint_storage: {type: s3, secret_key: topsecret, access_key: topsecret}\n"
    )
    result = import_config("determined", file)
    assert "topsecret" not in json.dumps(result)
    assert result["config"]["launch"]["env"] == {"WANDB_API_KEY": "${WANDB_API_KEY}", "A": "1"}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("axolotl", "base_model: a/b\nhf_access_token: topsecret\n"),  # not a key of Axolotl
        ("axolotl", "datasets: [{path: org/a, type: chat_template, token: topsecret}]\n"),
        ("axolotl", "model_config: {auth: [{token: topsecret}]}\n"),
        ("trl", "datasets: [{path: org/a, token: topsecret}]\nmodel_init_kwargs: {token: topsecret}\n"),
        ("determined", "entrypoint: python train.py --hub-token=topsecret --api_key  topsecret --max_steps 3\n"),
        ("determined", "hyperparameters: {a: {api_key: topsecret}}\nentrypoint: python run_clm.py --max_steps 3\n"),
        ("determined", "data: {variables: [HF_TOKEN=topsecret]}\nentrypoint: python run_clm.py --max_steps 3\n"),
    ],
)
def test_secrets_are_not_shown_wherever_they_are_in_a_file(kind: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    shown = json.dumps(import_config(kind, tmp_path / "a.yaml"))
    assert "topsecret" not in shown
    assert "***" in shown


def test_tokens_of_the_vocabulary_are_no_secrets() -> None:
    given = {"special_tokens": {"pad_token": "<pad>"}, "hub_model_id": "me/mine", "eot_tokens": ["<end>"],
             "resize_token_embeddings_to_32x": True, "tokenizer_kind": "fast", "token_type_ids": 2}  # fmt: skip
    draft = fill(KINDS["axolotl"], parse_yaml(dump_yaml(given), "given.yaml"))
    assert {note.key: note.value for note in draft.notes if note.key in given} == given


def test_without_an_adapter_every_weight_is_trained() -> None:
    for kind, given in (("trl", {"lora_r": 4}), ("llamafactory", {"finetuning_type": "full"}), ("axolotl", {})):
        assert not any(key.startswith("adapter") for key in settings(kind, given))


# DeepSpeed


def test_a_partial_file_goes_onto_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "base.yaml"
    recipe.write_text(
        "model: {path: builtin:tiny}\ndata:\n  sources: [{path: '${WHERE:-x}.jsonl'}]\n"
        "train:\n  epochs: 2\n  batch: {rows: 4}\n  optimizer: {weight_decay: 0.3}\nlaunch: {gpus: 4, nodes: 2}\n"
    )
    result = import_config("deepspeed", FILES / "deepspeed.json", onto=recipe, out=tmp_path / "new.yaml")
    config = read_config(tmp_path / "new.yaml")
    assert (config.train.batch.rows, config.train.batch.conversations) == (8, None)  # the recipe's unit
    assert (config.parallel.shard, config.train.precision) == (8, "fp16")
    assert (config.train.epochs, config.train.optimizer.weight_decay) == (2, 0.3)  # auto: the recipe's
    assert (config.train.optimizer.betas, config.train.clip_norm) == ((0.9, 0.98), 0.5)
    assert "${WHERE:-x}.jsonl" in result["recipe"]
    assert "# base.yaml:5" in result["recipe"]


def test_axolotl_without_evaluations() -> None:
    assert "evals_per_epoch" not in dict(notes("axolotl", {"evals_per_epoch": 0}).get("no equivalent", []))


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
def test_what_an_fsdp_config_says_of_memory(prefix: str) -> None:
    options = {f"{prefix}offload_params": True, f"{prefix}activation_checkpointing": True}
    given = {"fsdp": ["full_shard"], "fsdp_config": options, "gradient_checkpointing": False}
    assert "parallel.offload to weights" in str(notes("axolotl", given)["decide"])
    for kind in ("axolotl", "trl"):
        assert settings(kind, given)["parallel.recompute"] == "full"


def test_offload() -> None:
    onto = {"launch": {"gpus": 2}}
    both = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    found = settings("deepspeed", {"zero_optimization": both}, onto)
    assert (found["parallel.shard"], found["parallel.offload"]) == (2, "weights")
    one = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/local"}}
    assert settings("deepspeed", {"zero_optimization": one}, onto)["parallel.offload"] == "optimizer"
    assert all("NVMe" in text for _, text in notes("deepspeed", {"zero_optimization": one})["no equivalent"])


# Bad input


def test_broken_json_is_named_with_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{\n  "optimizer": {\n    "params": {"lr": "auto"}s\n  }\n}\n')
    with pytest.raises(WhetError, match=r"ds\.json:3:29: not valid JSON: Expecting ',' delimiter"):
        import_config("deepspeed", file)
    (tmp_path / "experiment.yaml").write_text("entrypoint: python run_clm.py --deepspeed ds.json --fp16\n")
    with pytest.raises(WhetError, match=r"ds\.json:3:29: not valid JSON"):
        import_config("determined", tmp_path / "experiment.yaml")


def test_broken_yaml_is_named_with_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: 1\nb: [1, 2\n")
    with pytest.raises(WhetError, match=r"a\.yaml:3:1: not valid YAML"):
        import_config("trl", file)


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("trl", "learning_rate: fast", "a.yaml:1: learning_rate: 'fast' is not a number"),
        ("trl", "learning_rate: -1", "a.yaml:1 learning_rate: train.optimizer.lr: -1 is not valid"),
        ("trl", "max_length: 3.5", "max_length: 3.5 is not an integer"),
        ("axolotl", "rl: dpo", "a.yaml:1: rl: 'dpo' is not supervised fine-tuning"),
        ("trl", "beta: 0.1", "a.yaml:1: beta: 0.1 is not of TRL's supervised fine-tuning"),
        ("trl", "max_length: 9\nloss_type: sigmoid", "a.yaml:2: loss_type: 'sigmoid' is not of TRL's supervised"),
        ("trl", "num_generations: 8", "num_generations: 8 is not of TRL's supervised fine-tuning"),
        ("llamafactory", "stage: kto", "stage: 'kto' is not supervised fine-tuning"),
        ("neox", "pack_impl: tight", "is not one of packed, pack_until_overflow"),
        ("neox", "loss_mask_pairs: [7]\ntrain_data_paths: [a]", "its length is odd"),
        ("axolotl", "datasets: chats.jsonl", "is not a list of datasets"),
        ("trl", "- a\n- b", "a configuration is a mapping"),
        ("trl", "", "this is empty"),
        ("nanochat", "python -m scripts.base_train --depth=4", "no command line with chat_sft"),
        ("nanochat", "python -m scripts.chat_sft --device-type=tpu", "is not cuda, cpu, mps or xla"),
        ("nanochat", "python -m scripts.chat_sft --run='x", "not a command line: No closing quotation"),
    ],
)
def test_wrong_values_are_named(kind: str, text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(WhetError) as caught:
        import_config(kind, file, out=tmp_path / "new.yaml")
    assert says in str(caught.value)
    assert not (tmp_path / "new.yaml").exists()


def test_unknown_keys_are_named_with_the_nearest() -> None:
    found = notes("llamafactory", {"cutof_len": 512, "zzz": 1, "max_length": 3})["unknown"]
    assert {key: text.rpartition("it was left out.")[2] for key, text in found} == {
        "cutof_len": " Did you mean cutoff_len?", "zzz": "", "max_length": " Did you mean cutoff_len?",
    }  # fmt: skip
    ((key, text),) = notes("mindspeed", {"training": {"lrr": 1}})["unknown"]
    assert (key, "MindSpeed-LLM" in text) == ("training.lrr", True)


def test_a_kind_that_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=r"Did you mean llamafactory\? whet imports determined, deepspeed"):
        find_kind("llama-factory")
    (tmp_path / "a.yaml").write_text("seed: 1\n")
    with pytest.raises(WhetError, match=r"looks like .*trl or .*Say what it is: whet import config KIND"):
        import_config(None, tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text("nothing: 1\n")
    with pytest.raises(WhetError, match="has no key that whet knows"):
        import_config(None, tmp_path / "b.yaml")


def test_another_kind_than_it_looks_like_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    import_config("trl", FILES / "axolotl.yaml")
    assert "Did you mean axolotl?" in capsys.readouterr().err


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "new.yaml").write_text("mine")
    with pytest.raises(WhetError, match=r"new\.yaml: the file exists"):
        import_config("trl", FILES / "trl.yaml", out=tmp_path / "new.yaml")
    assert (tmp_path / "new.yaml").read_text() == "mine"
    for impossible in (tmp_path / "new.yaml" / "below.yaml", Path("/proc/none/new.yaml"), tmp_path / ("x" * 300)):
        with pytest.raises(WhetError, match=r"new\.yaml|xxx"):
            import_config("trl", FILES / "trl.yaml", out=impossible)


def test_missing_files_are_named(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "no.yaml", "no such file"), (tmp_path, "this is a folder")):
        with pytest.raises(WhetError, match=says):
            read_tree(path)
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WhetError, match="not a text file"):
        read_tree(tmp_path / "x.yaml")


def test_the_command(whet: Any, tmp_path: Path) -> None:
    ended = whet("import", "config", "trl", FILES / "trl.yaml")
    assert ended.code == 0, ended.err
    assert parse_yaml(ended.out, "").plain()["train"]["steps"] == 6
    assert "push_to_hub" in ended.err
    ended = whet("import", "config", FILES / "trl.yaml", "--json", "--out", tmp_path / "new.yaml")
    result = json.loads(ended.out)
    assert (result["kind"], result["out"]) == ("trl", str(tmp_path / "new.yaml"))
    assert {"category", "key", "place", "value", "text"} == result["notes"][0].keys()
    assert whet("import", "config", "trl", "a", "b").code == 2


def test_the_modules_of_the_import_name_no_heavy_library() -> None:
    source = "".join(path.read_text() for path in sorted(Path(configs.__file__).parent.glob("*.py")))
    assert not re.search(r"^\s*(import|from) (torch|transformers|numpy|datasets)", source, flags=re.MULTILINE)


@pytest.mark.slow
def test_importing_a_configuration_needs_no_torch(real_python: str) -> None:
    code = (
        "import sys; from pathlib import Path; from whet.convert.configs.importer import import_config; "
        f"import_config('trl', Path({str(FILES / 'trl.yaml')!r})); "
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([real_python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# The show: each is trained


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXAMPLES)
def test_an_imported_recipe_trains_on_the_tiny_model(kind: str, whet: Any, tmp_path: Path) -> None:
    recipe = tmp_path / "new.yaml"
    assert whet("import", "config", kind, FILES / EXAMPLES[kind], "--out", recipe).code == 0
    ended = whet(
        "train", recipe, "model.path=builtin:tiny", "model.tokenizer=null", "train.steps=6",
        "data.sources=[{path: builtin:orders, max_samples: 60}]", "data.validation={fraction: 0.1}",
        "track=[]", f"run.dir={tmp_path / 'run'}", "--json",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    assert result["steps"] == (4006 if kind == "neox" else 6)  # after its iteration_offset
    assert 0 < result["supervised_tokens"] < result["tokens"]
    assert (result["supervised_tokens"] > 0.9 * result["tokens"]) == (kind in ("neox", "determined"))  # every token
    first, *_, last = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert last["val_loss"] < first["val_loss"]
