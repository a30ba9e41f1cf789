"""The mapping table of `whet import config`: a test for every row of every kind, and files that nobody wrote."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from examples import examples
from whet.config import Config
from whet.convert.configs.draft import Draft
from whet.convert.configs.importer import KINDS, fill, import_config
from whet.convert.configs.table import Kind, Row
from whet.core.config import list_settings, value_at
from whet.core.errors import WhetError
from whet.core.yaml import Node, dump_yaml, parse_yaml

FILES = Path(__file__).parents[1] / "fixtures" / "configs"
SAMPLES = {"number": 0.125, "integer": 3, "flag": True, "text": "some/text", "texts": ["one", "two"]}


def nested(kind: Kind, values: dict[str, Any]) -> dict[str, Any]:
    """A file of a kind with these values: keys with dots are levels, arguments are where the kind has them."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        if key not in kind.rows and key in kind.arguments:
            key = f"hyperparameters.training_arguments.{key}"
        elif kind.groups:
            key = f"{next(group for group, rows in kind.groups.items() if key in rows)}.{key}"
        *above, name = key.split(".")
        inner = tree
        for level in above:
            inner = inner.setdefault(level, {})
        inner[name] = value
    return tree


def filled(kind: Kind, values: dict[str, Any]) -> Draft:
    return fill(kind, parse_yaml(dump_yaml(nested(kind, values)), "given.yaml", expand="none"))


def rows(kind: Kind, *fates: str) -> dict[str, Row]:
    return {key: row for key, row in (kind.arguments | kind.rows).items() if row.fate in fates}


# Rows that are complete as they stand


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_copied_value_arrives(kind: Kind) -> None:
    settings = {setting.key for setting in list_settings(Config)}
    for key, row in rows(kind, "copied").items():
        found = filled(kind, {key: SAMPLES[row.type]}).settings
        assert row.to in settings, key
        assert found[row.to].plain() == SAMPLES[row.type], key
        assert found[row.to].place.split(":")[0] == "given.yaml", key


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_key_without_a_place_is_named_with_the_reason(kind: Kind) -> None:
    left_out = rows(kind, "no equivalent", "not needed")
    for keys in [[key] for key in left_out] if kind.name == "nanochat" else [list(left_out)]:
        draft = filled(kind, dict.fromkeys(keys, "x"))
        named = {note.key.partition(".")[2] if kind.groups else note.key: note for note in draft.notes}
        for key in keys:
            assert (named[key].category, named[key].text) == (left_out[key].fate, left_out[key].reason), key
            assert left_out[key].reason


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_is_off_is_not_missed(kind: Kind) -> None:
    left_out = rows(kind, "no equivalent")
    for off in (False, "none"):
        draft = filled(kind, dict.fromkeys(left_out, off))
        assert "no equivalent" not in {note.category for note in draft.notes if note.key.split(".")[-1] in left_out}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_other_names_reach_their_key(kind: Kind) -> None:
    for key, row in rows(kind, "same").items():
        draft = Draft(kind, parse_yaml(dump_yaml(nested(kind, {key: 3})), "given.yaml"))
        if key in kind.arguments:
            draft.add(key, Node(3, "given.yaml:1"), argument=True)
        assert draft.entries[row.to].node.plain() == 3, key


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_defaults_belong_to_known_keys_and_are_written(kind: Kind) -> None:
    draft = filled(kind, {})
    for key in kind.defaults:
        row = draft.row(key)
        assert key in kind.rows or key in kind.arguments or any(
            each.to == key for each in rows(kind, "same").values()
        ), key  # fmt: skip
        if row.fate == "copied":
            assert draft.settings[row.to].plain() == kind.defaults[key]
    assert all(node.place.startswith(f"default of {kind.tool}") for node in draft.settings.values())


# Rows that a rule reads: key → (value, what else is in the file, settings or the category of the note that come of it)

Expected = dict[str, Any] | str
LORA: dict[str, Any] = {"use_peft": True}
HUGGINGFACE: dict[str, tuple[Any, dict[str, Any], Expected]] = {
    "per_device_train_batch_size": (4, {}, {"train.micro_rows": 4, "train.batch": 4}),
    "gradient_accumulation_steps": (4, {"per_device_train_batch_size": 2}, {"train.batch": 8}),
    "max_steps": (50, {"num_train_epochs": 2}, {"train.steps": 50}),
    "num_train_epochs": (2, {}, {"train.epochs": 2.0}),
    "learning_rate": ("3e-4", {}, {"train.optimizer.lr": 3e-4}),
    "lr_scheduler_type": ("cosine", {}, {"train.schedule.name": "cosine"}),
    "lr_scheduler_kwargs": ({"min_lr_rate": 0.2}, {"lr_scheduler_type": "cosine_with_min_lr"},
                            {"train.schedule.min_frac": 0.2}),
    "warmup_steps": (7, {}, {"train.schedule.warmup": 7}),
    "warmup_ratio": (0.2, {}, {"train.schedule.warmup": 0.2}),
    "optim": ("paged_adamw_8bit", {}, {"train.optimizer.name": "adamw8bit"}),
    "optim_args": ("rank=4", {}, "no equivalent"),
    "adam_beta1": (0.8, {}, {"train.optimizer.betas": [0.8, 0.999]}),
    "adam_beta2": (0.95, {}, {"train.optimizer.betas": [0.9, 0.95]}),
    "adam_epsilon": (1e-6, {}, {"train.optimizer.eps": 1e-6}),
    "weight_decay": (0.1, {}, {"train.optimizer.weight_decay": 0.1}),
    "max_grad_norm": (0.3, {}, {"train.clip_norm": 0.3}),
    "bf16": (True, {}, {"train.precision": "bf16"}),
    "fp16": (True, {}, {"train.precision": "fp16"}),
    "gradient_checkpointing": (True, {}, {"parallel.recompute": "full"}),
    "torch_compile": (True, {}, {"model.compile": True}),
    "save_strategy": ("epoch", {}, {"checkpoint.epochs": 1.0}),
    "save_steps": (20, {}, {"checkpoint.every": 20}),
    "save_total_limit": (3, {}, {"checkpoint.keep_last": 3}),
    "eval_strategy": ("epoch", {}, "no equivalent"),
    "eval_steps": (25, {"eval_strategy": "steps"}, {"eval.every": 25}),
    "eval_on_start": (True, {}, {"eval.at_start": True}),
    "load_best_model_at_end": (True, {}, "different"),
    "deepspeed": ({"gradient_clipping": 0.7}, {}, {"train.clip_norm": 0.7}),
    "fsdp": ("full_shard auto_wrap", {}, "decide"),
    "fsdp_config": ({"transformer_layer_cls_to_wrap": "Block"}, {}, "no equivalent"),
    "report_to": ("wandb", {}, {"track": ["wandb"]}),
    "output_dir": ("out", {}, {"run.dir": "out"}),
    "resume_from_checkpoint": ("last", {}, "no equivalent"),
    "save_only_model": (True, {}, {"checkpoint.optimizer": "newest"}),
    "use_cpu": (True, {}, {"run.device": "cpu"}),
    "use_mps_device": (True, {}, {"run.device": "mps"}),
}  # fmt: skip
PEFT: dict[str, tuple[Any, dict[str, Any], Expected]] = {
    "use_peft": (True, {}, {"adapter.method": "lora"}),
    "lora_r": (4, LORA, {"adapter.rank": 4}),
    "lora_alpha": (9, LORA, {"adapter.alpha": 9}),
    "lora_dropout": (0.25, LORA, {"adapter.dropout": 0.25}),
    "lora_target_modules": (["a", "b"], LORA, {"adapter.targets": ["a", "b"]}),
    "lora_modules_to_save": (["lm_head"], LORA, {"adapter.also_train": ["lm_head"]}),
    "use_rslora": (True, LORA, {"adapter.method": "rslora"}),
    "use_dora": (True, LORA, {"adapter.method": "dora"}),
    "load_in_4bit": (True, LORA, {"quantize": "nf4"}),
    "load_in_8bit": (True, LORA, "no equivalent"),
    "bnb_4bit_quant_type": ("fp4", {**LORA, "load_in_4bit": True}, "no equivalent"),
}
LLAMAFACTORY_DATA: dict[str, tuple[Any, dict[str, Any], Expected]] = {
    "dataset": ("a/b.json", {}, {"data.sources.0.path": "a/b.json"}),
    "eval_dataset": ("a/c.json", {}, {"data.validation.sources.0.path": "a/c.json"}),
    "dataset_dir": ("folder", {"dataset": "name"}, {"data.sources.0.path": "folder/name"}),
    "train_on_prompt": (True, {}, {"data.train_on": "all"}),
    "mask_history": (True, {}, {"data.train_on": "last"}),
    "val_size": (0.2, {}, {"data.validation.fraction": 0.2}),
    "packing": (True, {}, {"data.packing": "best-fit"}),
    "neat_packing": (True, {}, {"data.packing": "best-fit"}),
    "template": ("qwen", {}, "decide"),
    "max_samples": (9, {"dataset": "a/b.json"}, {"data.sources.0.max_samples": 9}),
    "mix_strategy": ("interleave_over", {}, "different"),
    "interleave_probs": ("0.7,0.3", {"dataset": "a/b.json,a/c.json"}, {"data.sources.1.weight": 0.3}),
    "add_tokens": ("<a>,<b>", {}, {"model.add_tokens": ["<a>", "<b>"]}),
    "add_special_tokens": ("<c>", {}, {"model.add_tokens": ["<c>"]}),
}
DEEPSPEED_SECTIONS: dict[str, tuple[Any, dict[str, Any], Expected]] = {
    "fp16.enabled": (True, {}, {"train.precision": "fp16"}),
    "bf16.enabled": (True, {}, {"train.precision": "bf16"}),
    "bf16.bf16_master_weights_and_grads": (True, {"bf16.enabled": True}, {"model.dtype": "bf16"}),
    "fp16.loss_scale": (128, {"fp16.enabled": True}, "no equivalent"),
    "fp16.initial_scale_power": (12, {"fp16.enabled": True}, "different"),
    "fp16.loss_scale_window": (500, {"fp16.enabled": True}, "different"),
    "fp16.hysteresis": (4, {"fp16.enabled": True}, "different"),
    "fp16.consecutive_hysteresis": (True, {"fp16.enabled": True}, "different"),
    "fp16.min_loss_scale": (2, {"fp16.enabled": True}, "different"),
    "optimizer.type": ("Lamb", {}, "no equivalent"),
    "optimizer.params.lr": (3e-4, {}, {"train.optimizer.lr": 3e-4}),
    "optimizer.params.betas": ([0.8, 0.9], {}, {"train.optimizer.betas": [0.8, 0.9]}),
    "optimizer.params.eps": (1e-7, {}, {"train.optimizer.eps": 1e-7}),
    "optimizer.params.weight_decay": (0.2, {}, {"train.optimizer.weight_decay": 0.2}),
    "optimizer.params.adam_w_mode": (False, {}, "no equivalent"),
    "optimizer.params.bias_correction": (False, {}, "no equivalent"),
    "zero_optimization.stage": (2, {}, "different"),
    "zero_optimization.offload_optimizer.device": ("cpu", {}, {"parallel.offload": "optimizer"}),
    "zero_optimization.offload_param.device": ("nvme", {}, "no equivalent"),
    "zero_optimization.cpu_offload": (True, {}, {"parallel.offload": "optimizer"}),
    "zero_optimization.cpu_offload_param": (True, {"zero_optimization.stage": 3}, "not needed"),
    "zero_optimization.mics_shard_size": (4, {"zero_optimization.stage": 3}, {"parallel.shard": 4}),
    "gradient_clipping": (0.2, {}, {"train.clip_norm": 0.2}),
    "train_batch_size": (64, {}, {"train.batch": 64}),
    "train_micro_batch_size_per_gpu": (4, {}, {"train.micro_rows": 4}),
    "gradient_accumulation_steps": (3, {"train_micro_batch_size_per_gpu": 2}, {"train.batch": 6}),
}
LAUNCHED: dict[str, tuple[Any, dict[str, Any], Expected]] = {
    "launcher.nproc_per_node": (8, {}, {"launch.gpus": 8}),
    "launcher.nnodes": (2, {"launcher.nproc_per_node": 8}, {"launch.nodes": 2, "launch.gpus": 8}),
    "launcher.num_gpus": (4, {}, {"launch.gpus": 4}),
    "launcher.num_nodes": (2, {"launcher.num_gpus": 4}, {"launch.nodes": 2}),
    "launcher.num_processes": (16, {"launcher.num_machines": 2}, {"launch.nodes": 2, "launch.gpus": 8}),
    "launcher.num_machines": ("$N", {}, "decide"),
}
WARMUP = {"scheduler.type": "WarmupLR"}
COSINE = {"scheduler.type": "WarmupCosineLR"}
ROWS: dict[str, dict[str, tuple[Any, dict[str, Any], Expected]]] = {
    "trl": {
        **HUGGINGFACE,
        **PEFT,
        **LAUNCHED,
        "dataset_name": ("org/chats", {}, {"data.sources.0.path": "hub:org/chats"}),
        "dataset_config": ("small", {"dataset_name": "org/chats"}, {"data.sources.0.subset": "small"}),
        "dataset_train_split": ("first", {"dataset_name": "org/chats"}, {"data.sources.0.split": "first"}),
        "dataset_test_split": ("last", {"dataset_name": "org/chats", "eval_strategy": "steps"},
                               {"data.validation.sources.0.split": "last"}),
        "datasets": ([{"path": "a.jsonl"}, {"path": "org/b", "split": "s"}], {},
                     {"data.sources.0.path": "a.jsonl", "data.sources.1.path": "hub:org/b",
                      "data.sources.1.split": "s"}),
        "test_split_size": (0.1, {}, {"data.validation.fraction": 0.1}),
        "dataset_text_field": ("body", {"dataset_name": "org/text"}, {"data.sources.0.fields": {"text": "body"}}),
        "max_length": (77, {}, {"data.max_length": 77}),
        "packing": (True, {}, {"data.packing": "best-fit", "train.batch.rows": 8}),
        "packing_strategy": ("wrapped", {"packing": True}, {"data.too_long": "split"}),
        "truncation_mode": ("keep_end", {}, "no equivalent"),
        "completion_only_loss": (True, {}, {"data.train_on": "last"}),
        "assistant_only_loss": (True, {}, {"data.train_on": "assistant"}),
        "chat_template_path": ("t.jinja", {}, {"data.template": "t.jinja"}),
        "dtype": ("bfloat16", {}, {"model.dtype": "bf16"}),
        "loss_type": ("dft", {}, "no equivalent"),
        "activation_offloading": (True, {}, {"parallel.offload": "activations"}),
        "env": ({"A": 1}, {}, {"launch.env": {"A": "1"}}),
        "model_init_kwargs": ({"a": 1}, {}, "no equivalent"),
        "eos_token": ("<e>", {}, "no equivalent"),
        "lora_target_parameters": (["w"], {}, "no equivalent"),
    },
    "llamafactory": {
        **{key: row for key, row in HUGGINGFACE.items() if key != "gradient_checkpointing"},
        **LLAMAFACTORY_DATA,
        **LAUNCHED,
        "gradient_checkpointing": (True, {}, "not needed"),
        "stage": ("pt", {}, {"data.train_on": "all", "data.packing": "best-fit"}),
        "finetuning_type": ("oft", {}, "no equivalent"),
        "lora_alpha": (5, {}, {"adapter.alpha": 5}),
        "lora_dropout": (0.5, {}, {"adapter.dropout": 0.5}),
        "use_rslora": (True, {}, {"adapter.method": "rslora"}),
        "use_dora": (True, {}, {"adapter.method": "dora"}),
        "quantization_bit": (4, {"finetuning_type": "oft"}, "no equivalent"),
        "quantization_method": ("hqq", {"quantization_bit": 4}, "not needed"),
        "pure_bf16": (True, {"finetuning_type": "full"}, {"model.dtype": "bf16", "train.precision": "bf16"}),
        "use_muon": (True, {}, {"train.optimizer.name": "muon"}),
        "disable_gradient_checkpointing": (True, {}, {"parallel.recompute": "none"}),
        "fp8": (True, {}, {"train.precision": "fp8"}),
    },
    "axolotl": {
        **{key: HUGGINGFACE[key] for key in (
            "gradient_accumulation_steps", "max_steps", "learning_rate", "lr_scheduler_kwargs", "warmup_steps",
            "warmup_ratio", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm",
            "bf16", "fp16", "gradient_checkpointing", "torch_compile", "save_strategy", "save_steps",
            "save_total_limit", "eval_strategy", "eval_steps", "load_best_model_at_end", "deepspeed",
            "resume_from_checkpoint", "save_only_model")},
        "gradient_accumulation_steps": (4, {"micro_batch_size": 2}, {"train.batch.conversations": 8}),
        "max_steps": (50, {"num_epochs": 2}, {"train.steps": 50}),
        "lr_scheduler_kwargs": ({"min_lr_rate": 0.2}, {"lr_scheduler": "cosine_with_min_lr"},
                                {"train.schedule.min_frac": 0.2}),
        "batch_size": (12, {}, {"train.batch.conversations": 12}),
        "cosine_min_lr_ratio": (0.1, {}, {"train.schedule.min_frac": 0.1}),
        "fp8": (True, {}, {"train.precision": "fp8"}),
        "bfloat16": (True, {}, {"train.precision": "bf16"}),
        "float16": (True, {}, {"train.precision": "fp16"}),
        "activation_offloading": (True, {}, {"parallel.offload": "activations"}),
        "saves_per_epoch": (4, {}, {"checkpoint.epochs": 0.25}),
        "evals_per_epoch": (4, {}, "no equivalent"),
        "fsdp": (["full_shard"], {}, "decide"),
        "fsdp_config": ({"offload_params": True}, {}, "decide"),
        "adapter": ("qlora", {"load_in_4bit": True}, {"adapter.method": "lora", "quantize": "nf4"}),
        "lora_r": (4, {"adapter": "lora"}, {"adapter.rank": 4}),
        "lora_alpha": (9, {"adapter": "lora"}, {"adapter.alpha": 9}),
        "lora_dropout": (0.25, {"adapter": "lora"}, {"adapter.dropout": 0.25}),
        "lora_target_modules": (["a"], {"adapter": "lora"}, {"adapter.targets": ["a"]}),
        "lora_target_linear": (True, {"adapter": "lora"}, {"adapter.targets": "all-linear"}),
        "lora_modules_to_save": (["lm_head"], {"adapter": "lora"}, {"adapter.also_train": ["lm_head"]}),
        "lora_rank_pattern": ({"q": 4}, {"adapter": "lora"}, {"adapter.ranks": {"q": 4}}),
        "lora_alpha_pattern": ({"q": 8}, {"adapter": "lora"}, {"adapter.alphas": {"q": 8}}),
        "load_in_4bit": (True, {"adapter": "qlora"}, {"quantize": "nf4"}),
        "load_in_8bit": (True, {"adapter": "lora"}, "no equivalent"),
        "sample_packing": (True, {}, {"data.packing": "best-fit", "train.batch.rows": 1}),
        "excess_length_strategy": ("raise", {}, {"data.too_long": "error"}),
        "train_on_inputs": (True, {}, {"data.train_on": "all"}),
        "datasets": ([{"path": "org/a", "type": "alpaca", "split": "s"}], {},
                     {"data.sources.0.path": "hub:org/a", "data.sources.0.format": "alpaca",
                      "data.sources.0.split": "s"}),
        "test_datasets": ([{"path": "t.jsonl"}], {}, {"data.validation.sources.0.path": "t.jsonl"}),
        "val_set_size": (0.05, {}, {"data.validation.fraction": 0.05}),
        "chat_template": ("chatml", {}, "decide"),
        "chat_template_jinja": ("t.jinja", {}, {"data.template": "t.jinja"}),
        "pretraining_dataset": ([{"path": "org/text"}], {}, {"data.sources.0.format": "text"}),
        "rl": (False, {}, "not needed"),
        "reward_model": (False, {}, "not needed"),
        "process_reward_model": (False, {}, "not needed"),
        "tokens": (["<a>"], {}, {"model.add_tokens": ["<a>"]}),
        "special_tokens": ({"pad_token": "<p>"}, {}, "no equivalent"),
        "dp_shard_size": (4, {}, {"parallel.shard": 4, "train.batch.conversations": 4}),
        "dp_replicate_size": (2, {}, {"parallel.replicate": 2}),
        "context_parallel_size": (2, {}, {"parallel.context": 2}),
    },
    "mindspeed": {
        **LLAMAFACTORY_DATA,
        **{key: HUGGINGFACE[key] for key in (
            "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "lr_scheduler_type",
            "warmup_ratio", "adam_epsilon", "weight_decay", "max_grad_norm", "save_steps", "save_total_limit",
            "save_only_model", "resume_from_checkpoint")},
        "adam_beta1": (0.8, {}, {"train.optimizer.betas": [0.8, 0.95]}),
        "adam_beta2": (0.99, {}, {"train.optimizer.betas": [0.9, 0.99]}),
        "num_train_epochs": (2.5, {}, "different"),
        "min_lr": (1e-6, {"lr": 1e-5}, {"train.schedule.min_frac": 0.1}),
        "stage": ("pt", {}, {"data.train_on": "all"}),
        "save_epochs": (2, {}, {"checkpoint.epochs": 2.0}),
        "fsdp_size": (4, {}, {"parallel.shard": 4}),
        "param_dtype": ("fp16", {}, {"train.precision": "fp16"}),
        "recompute": (True, {}, {"parallel.recompute": "full"}),
        "cp_size": (2, {}, {"parallel.context": 2}),
        "cp_type": ("ring", {"cp_size": 2}, "different"),
        "profile": (True, {}, {"profile.steps": [1, 1]}),
        "profile_step_start": (4, {"profile": True}, {"profile.steps": [5, 5]}),
        "profile_step_end": (6, {"profile": True, "profile_step_start": 2}, {"profile.steps": [3, 6]}),
        "profile_ranks": ([1], {"profile": True}, {"profile.ranks": [1]}),
        "profile_with_stack": (True, {"profile": True}, {"profile.stack": True}),
        "profile_with_memory": (True, {"profile": True}, {"profile.memory": True}),
        "profile_record_shapes": (True, {"profile": True}, {"profile.shapes": True}),
    },
    "deepspeed": {
        **DEEPSPEED_SECTIONS,
        "torch_autocast.enabled": (True, {}, {"train.precision": "bf16"}),
        "torch_autocast.dtype": ("float16", {"torch_autocast.enabled": True}, {"train.precision": "fp16"}),
        "bfloat16.enabled": (True, {}, {"train.precision": "bf16"}),
        "scheduler.type": ("WarmupDecayLR", {}, {"train.schedule.name": "linear"}),
        "scheduler.params.warmup_min_lr": (1e-5, {**WARMUP, "scheduler.params.warmup_max_lr": 1e-4},
                                           {"train.schedule.init_frac": 0.1}),
        "scheduler.params.warmup_max_lr": (1e-4, WARMUP, {"train.optimizer.lr": 1e-4}),
        "scheduler.params.warmup_num_steps": (20, WARMUP, {"train.schedule.warmup": 20}),
        "scheduler.params.warmup_type": ("log", WARMUP, "different"),
        "scheduler.params.total_num_steps": (200, COSINE, {"train.steps": 200}),
        "scheduler.params.warmup_min_ratio": (0.2, COSINE, {"train.schedule.init_frac": 0.2}),
        "scheduler.params.cos_min_ratio": (0.3, COSINE, {"train.schedule.min_frac": 0.3}),
    },
    "neox": {
        **DEEPSPEED_SECTIONS,
        "world_size": (8, {"train_micro_batch_size_per_gpu": 2}, {"train.batch.rows": 16}),
        "global_num_gpus": (8, {"train_micro_batch_size_per_gpu": 2}, {"train.batch.rows": 16}),
        "num_nodes": (2, {"num_gpus": 4}, {"launch.nodes": 2, "train.batch.rows": 8}),
        "num_gpus": (4, {"num_nodes": 2}, {"launch.gpus": 4}),
        "model_parallel_size": (2, {"global_num_gpus": 8}, {"parallel.tensor": 2, "train.batch.rows": 4}),
        "pipe_parallel_size": (2, {}, "no equivalent"),
        "train_iters": (30, {}, {"train.steps": 30}),
        "train_epochs": (2, {}, {"train.epochs": 2}),
        "precision": ("fp16", {}, {"train.precision": "fp16"}),
        "weight_decay": (0.3, {}, {"train.optimizer.weight_decay": 0.3}),
        "lr": (1e-4, {}, {"train.optimizer.lr": 1e-4}),
        "min_lr": (1e-5, {"lr": 1e-4, "lr_decay_style": "cosine"}, {"train.schedule.min_frac": 0.1}),
        "lr_decay_style": ("cosine", {}, {"train.schedule.name": "cosine"}),
        "lr_decay_iters": (10, {"train_iters": 30}, "different"),
        "lr_decay_fraction": (0.5, {}, "different"),
        "warmup": (0.1, {"train_iters": 50}, {"train.schedule.warmup": 5}),
        "clip_grad": (2.0, {}, "different"),
        "zero_stage": (1, {}, "decide"),
        "pack_impl": ("unpacked", {}, {"data.packing": "none", "train.batch.conversations": 1}),
        "seq_length": (128, {}, {"data.max_length": 128}),
        "train_data_paths": (["a"], {}, {"data.sources.0.path": "a", "data.sources.0.format": "tokens"}),
        "valid_data_paths": (["b"], {}, {"data.validation.sources.0.path": "b"}),
        "test_data_paths": (["c"], {}, "no equivalent"),
        "train_data_weights": ([1.0, 2.0], {"train_data_paths": ["a", "b"]}, {"data.sources.1.weight": 2.0}),
        "valid_data_weights": ([1.0, 2.0], {"valid_data_paths": ["a", "b"]}, {"data.validation.sources.1.weight": 2.0}),
        "data_path": ("a.bin", {}, {"data.sources.0.path": "a"}),
        "split": ("90,10,0", {"data_path": "a"}, {"data.validation.fraction": 0.1}),
        "loss_mask_pairs": ([[7, 7]], {"data_path": "a"}, {"data.sources.0.mask.pairs": [[7, 7]]}),
        "loss_mask_individual": ([5], {"data_path": "a"}, {"data.sources.0.mask.individual": [5]}),
        "loss_mask_alternating_individual": ([8], {"data_path": "a"}, {"data.sources.0.mask.alternating": [8]}),
        "eod_mask_loss": (True, {}, "decide"),
        "train_label_data_paths": (["l"], {}, "decide"),
        "valid_label_data_paths": (["l"], {}, "decide"),
        "test_label_data_paths": (["l"], {}, "decide"),
        "finetune": (False, {}, "no equivalent"),
        "load": ("c", {}, {"model.path": "c"}),
        "save": ("d", {"load": "c"}, {"run.dir": "d"}),
        "no_save_optim": (True, {}, {"checkpoint.optimizer": "none"}),
        "vocab_file": ("t/tokenizer.json", {}, {"model.tokenizer": "t"}),
        "checkpoint_factor": (10, {}, {"checkpoint.every": 10}),
        "checkpoint_scale": ("log", {"checkpoint_factor": 10}, "no equivalent"),
        "keep_last_n_checkpoints": (5, {}, {"checkpoint.keep_last": 5}),
        "eval_interval": (10, {}, {"eval.every": 10}),
        "checkpoint_activations": (True, {}, {"parallel.recompute": "full"}),
        "train_impl": ("normal", {}, "not needed"),
        "dataset_impl": ("gpt2", {}, "not needed"),
        "scheduler": ({"type": "WarmupLR"}, {}, "different"),
        "soft_prompt_tuning": ({"enabled": True}, {}, "no equivalent"),
        "checkpoint_in_cpu": (True, {}, {"parallel.offload": "activations"}),
        "use_bnb_optimizer": (True, {}, {"train.optimizer.name": "adamw8bit"}),
    },
    "nanochat": {
        "run": ("mine", {}, {"run.name": "mine", "track": ["wandb"]}),
        "dtype": ("float32", {}, {"train.precision": "fp32", "data.train_on": "all"}),
        "model_tag": ("d12", {}, {"model.path": "base_checkpoints/d12"}),
        "model_step": (5, {"model_tag": "d12"}, "not needed"),
        "num_iterations": (10, {"total_batch_size": 65536}, {"train.steps": 9}),
        "max_seq_len": (256, {}, {"data.max_length": 256}),
        "device_batch_size": (4, {}, {"train.micro_rows": 4}),
        "total_batch_size": (8192, {}, {"train.batch.tokens": 8192}),
        "embedding_lr": (0.1, {"model_tag": "d12"}, {"train.optimizer.embedding_lr": 0.1}),
        "unembedding_lr": (0.01, {"model_tag": "d12"}, {"train.optimizer.lr": 0.01}),
        "matrix_lr": (0.2, {"model_tag": "d4"}, {"train.optimizer.matrix_lr": 0.2}),
        "weight_decay": (0.1, {}, {"train.optimizer.weight_decay": 0.1, "data.train_on": "all"}),
        "init_lr_frac": (0.5, {"model_tag": "d4"}, {"train.optimizer.scale": 0.5}),
        "warmup_ratio": (0.1, {}, {"train.schedule.warmup": 0.1}),
        "warmdown_ratio": (0.3, {}, {"train.schedule.decay": 0.3}),
        "final_lr_frac": (0.2, {}, {"train.schedule.min_frac": 0.2}),
        "eval_every": (50, {}, {"eval.every": 50}),
        "eval_tokens": (20480, {}, {"eval.tokens": 20480}),
        "mmlu_epochs": (2, {}, {"data.sources.1.epochs": 2.0}),
        "gsm8k_epochs": (5, {"mmlu_epochs": 0}, {"data.sources.1.epochs": 5.0}),
        "load_optimizer": (1, {}, "no equivalent"),
        "device_type": ("cpu", {}, {"run.device": "cpu"}),
        **LAUNCHED,
        "launcher.nnodes": (2, {"launcher.nproc_per_node": 8, "num_iterations": 41, "total_batch_size": 2097152},
                            {"launch.nodes": 2, "train.steps": 20}),
    },
    "determined": {
        **HUGGINGFACE,
        **PEFT,
        "entrypoint": ("python run_clm.py --max_steps 9", {}, {"train.steps": 9}),
        "hyperparameters": ({"training_arguments": {"seed": {"type": "const", "val": 3}}}, {}, {"run.seed": 3}),
        "searcher": ({"name": "single", "max_length": {"batches": 40}}, {}, {"train.steps": 40}),
        "resources.slots_per_trial": (4, {}, {"launch.gpus": 4, "train.batch.rows": 32}),
        "environment.environment_variables": (["A=b=c"], {}, {"launch.env": {"A": "b=c"}}),
        "min_validation_period": ({"batches": 20}, {}, {"eval.every": 20}),
        "min_checkpoint_period": ({"batches": 30}, {}, {"checkpoint.every": 30}),
        "checkpoint_storage.save_trial_latest": (4, {}, {"checkpoint.keep_last": 4}),
        "checkpoint_storage.save_trial_best": (2, {"do_eval": True, "train_file": "a"}, {"checkpoint.keep_best": 2}),
        "checkpoint_storage.save_experiment_best": (1, {}, "different"),
        "reproducibility.experiment_seed": (11, {}, {"run.seed": 11}),
        "dataset_name": ("org/text", {}, {"data.sources.0.path": "hub:org/text", "data.train_on": "all"}),
        "dataset_config_name": ("raw", {"dataset_name": "org/text"}, {"data.sources.0.subset": "raw"}),
        "train_file": ("a.txt", {}, {"data.sources.0.path": "a.txt"}),
        "validation_file": ("b.txt", {}, {"data.validation.sources.0.path": "b.txt"}),
        "validation_split_percentage": (10, {"do_eval": True, "train_file": "a.txt"},
                                        {"data.validation.fraction": 0.1}),
        "block_size": (256, {}, {"data.max_length": 256}),
        "max_train_samples": (7, {"train_file": "a.txt"}, {"data.sources.0.max_samples": 7}),
        "max_eval_samples": (7, {"validation_file": "b.txt"}, {"data.validation.sources.0.max_samples": 7}),
        "torch_dtype": ("float16", {}, "different"),
        "use_lora": (True, {}, {"adapter.method": "lora"}),
    },
}  # fmt: skip
CASES = [(kind, key) for kind, inside in ROWS.items() for key in inside]


@pytest.mark.parametrize(("kind", "key"), CASES, ids=[f"{kind}-{key}" for kind, key in CASES])
def test_what_a_rule_makes_of_a_key(kind: str, key: str) -> None:
    value, others, expected = ROWS[kind][key]
    draft = filled(KINDS[kind], {**others, key: value})
    if isinstance(expected, str):
        assert expected in {note.category for note in draft.notes if note.key.endswith(key)}
        return
    for name, wanted in expected.items():
        found = value_at(
            draft.tree().plain(), tuple(int(part) if part.isdecimal() else part for part in name.split("."))
        )
        assert found == wanted or (name == "train.batch" and list(found.values()) == [wanted]), name


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_row_of_a_rule_has_its_case(kind: Kind) -> None:
    assert rows(kind, "rule").keys() == ROWS[kind.name].keys()


# Files that nobody wrote

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 100), st.floats(), st.integers(), st.text(max_size=12),
    st.sampled_from(["auto", "none", "no", "1e-4", "a,b", "${X}", "all", "cosine", "steps", "epoch", "fp16", "lora",
                     "--a 1", "x" * 300]),
    st.lists(st.integers(-2, 9) | st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=3), max_size=2),
    st.sampled_from([{"type": "const", "val": 3}, {"type": "log", "minval": -5, "maxval": -1}, {"stage": 3},
                     [{"path": "x.jsonl", "type": "alpaca"}], [[7, 7]]]),
)  # fmt: skip


def result_or_refusal(function: Callable[[], Any]) -> Any:
    """What a function gives, or the message of the WhetError that it raises; anything else it raises is a failure."""
    try:
        return function()
    except WhetError as error:
        return str(error)


@st.composite
def files(draw: st.DrawFn) -> tuple[Kind, dict[str, Any]]:
    kind = KINDS[draw(st.sampled_from(sorted(KINDS)))]
    known = sorted(kind.rows | kind.arguments)
    values = {key: draw(VALUES) for key in draw(st.lists(st.sampled_from(known), max_size=6, unique=True))}
    if draw(st.booleans()):
        for key in [key for key in values if any(key != other and other.startswith(f"{key}.") for other in values)]:
            del values[key]
    tree = nested(kind, {key: value for key, value in values.items() if key != "hyperparameters"})
    return kind, {**tree, **draw(st.dictionaries(st.text("abcxyz_", min_size=3, max_size=9), VALUES, max_size=2))}


@hypothesis_settings(max_examples=examples(600, 25), deadline=None)
@given(files())
def test_every_key_lands_in_the_recipe_or_in_the_list(file: tuple[Kind, dict[str, Any]]) -> None:
    kind, tree = file
    draft = result_or_refusal(lambda: fill(kind, parse_yaml(dump_yaml(tree), "given.yaml", expand="none")))
    if isinstance(draft, str):
        assert draft.startswith("given.yaml")
        return
    origins = " ".join(node.place for node in draft.settings.values())
    listed = {note.key for note in draft.notes}
    for entry in draft.entries.values():
        assert f"{entry.node.place} {entry.key}" in origins or entry.key in listed, entry.key
    for key in tree:
        assert any(key in each for each in listed) or key in origins or kind.groups, key


@hypothesis_settings(max_examples=examples(300, 12), deadline=None)
@given(st.sampled_from(sorted(FILES.iterdir())), st.randoms(use_true_random=False), st.sampled_from(sorted(KINDS)))
def test_damaged_files_are_imported_or_refused(
    tmp_path_factory: pytest.TempPathFactory, example: Path, rng: random.Random, kind: str
) -> None:
    text = list(example.read_text())
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(text))
        text[at : at + rng.choice([0, 1, 9])] = rng.choice(
            ["", "\t", "}", "{", "[", '"', ": ", "\n", "-", "0", "é", "\x00"]
        )
    file = tmp_path_factory.mktemp("damaged") / example.name
    file.write_text("".join(text))
    ended = result_or_refusal(lambda: import_config(kind if rng.random() < 0.5 else None, file))
    assert not isinstance(ended, str) or ".json" in ended or file.name in ended
