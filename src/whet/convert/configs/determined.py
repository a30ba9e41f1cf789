"""Determined's experiment YAML, with the arguments of a Hugging Face script in its entrypoint."""

from __future__ import annotations

import functools
from typing import Any

from whet.convert.configs import deepspeed
from whet.convert.configs.determined_search import (
    Hyperparameter,
    hyperparameters,
    put_ranges,
    put_searcher,
    values_of,
)
from whet.convert.configs.draft import Draft, environment, is_off, without_secrets
from whet.convert.configs.huggingface import DEFAULTS, LORA_ROWS, ROWS, SPEED, put_training_arguments
from whet.convert.configs.read import LAUNCHER, parse_command
from whet.convert.configs.rules import put_adapter, put_batch, put_targets
from whet.convert.configs.table import Kind, Rows, by_rule, copied, no_equivalent, not_needed, same_as, under
from whet.convert.configs.trl import dataset_path
from whet.core.yaml import Node

_ROWS: Rows = {
    **by_rule(
        "entrypoint hyperparameters searcher resources.slots_per_trial environment.environment_variables "
        "min_validation_period min_checkpoint_period checkpoint_storage.save_trial_latest "
        "checkpoint_storage.save_trial_best checkpoint_storage.save_experiment_best reproducibility.experiment_seed"
    ),
    **copied("text", name="run.name", project="run.project"),
    **copied("texts", labels="run.tags"),
    **copied("integer", max_restarts="launch.max_restarts"),
    **copied("flag", perform_initial_validation="eval.at_start"),
    **no_equivalent("remote checkpoint storage: whet keeps checkpoints in the run folder", under(
        "checkpoint_storage",
        "type bucket host_path storage_path container container_path prefix access_key secret_key endpoint_url "
        "connection_string account_url credential hdfs_url user propagation directory save_experiment_latest",
    )),
    **no_equivalent("a container image: launch.slurm.container for Singularity", "environment.image "
                    "environment.registry_auth environment.force_pull_image environment.drop_capabilities "
                    "environment.add_capabilities environment.pod_spec environment.ports environment.proxy_ports"),
    **no_equivalent("the cluster's queues: launch.slurm", "resources.resource_pool resources.priority resources.weight "
                    "resources.max_slots resources.shm_size resources.devices resources.agent_label "
                    "resources.native_parallel resources.is_single_node bind_mounts slurm pbs"),
    **no_equivalent("a group of projects: run.project groups runs", "workspace"),
    **no_equivalent("a text about the run: run.tags has words", "description"),
    **no_equivalent("rules about log lines", "log_policies preemption_timeout retention_policy"),
    **no_equivalent("settings that the script reads by itself", "data data_layer integrations pachyderm"),
    **no_equivalent("profile has its own options", "profiling tensorboard_storage"),
    **not_needed("whet checkpoints by its own rules", "checkpoint_policy"),
    **not_needed(SPEED, "optimizations debug records_per_epoch scheduling_unit template security internal unmanaged"),
}  # fmt: skip

_ARGUMENTS: Rows = {
    **ROWS,
    **LORA_ROWS,
    **by_rule("dataset_name dataset_config_name train_file validation_file validation_split_percentage block_size "
              "max_train_samples max_eval_samples torch_dtype use_lora"),
    **same_as(dtype="torch_dtype"),
    **copied("text", model_name_or_path="model.path", model_revision="model.revision",
             tokenizer_name="model.tokenizer"),
    **copied("flag", trust_remote_code="model.trust_remote_code"),
    **no_equivalent("streaming: whet prepares the data before step 1", "streaming"),
    **no_equivalent("another configuration of the model", "config_name config_overrides model_type"),
    **not_needed(SPEED, "cache_dir overwrite_cache preprocessing_num_workers keep_linebreaks use_auth_token token"),
}  # fmt: skip
"""Of transformers' run_clm.py, which Determined's examples start."""


_ALIASES = {"lr": "learning_rate", "batch_size": "per_device_train_batch_size", "epochs": "num_train_epochs"}


def read_arguments(draft: Draft) -> None:
    """The script's arguments: hyperparameters.training_arguments wins over the entrypoint, to which it is appended.
    Other hyperparameters are taken by their names. Of one that is searched, the first value; `put_search` does the
    rest."""
    given = draft.entries["hyperparameters"].node if draft.has("hyperparameters") else Node({}, "")
    if not isinstance(given.value, dict):
        raise draft.fail("hyperparameters", "is not a mapping")
    for parameter in _in_order(given):
        value = values_of(parameter)[0]
        if parameter.path[0] == "training_arguments":
            draft.add(parameter.name, value, argument=True)
        elif (name := _argument_name(parameter)) is not None:
            draft.add(name, value, argument=True)
            draft.note("decide", "hyperparameters", f"{parameter.key} is read by the script; it is taken for --{name}")
        else:
            shown = without_secrets(parameter.node.plain(named=True), parameter.path[-1])
            draft.note(
                "no equivalent", "hyperparameters", f"{'.'.join(parameter.path)}: {shown!r}: the script reads it"
            )
    draft.use("hyperparameters")
    if draft.has("entrypoint"):
        entry = draft.entries["entrypoint"].node
        words = entry.plain()
        text = " ".join(map(str, words)) if isinstance(words, list) else str(words)
        command = parse_command(" ".join(text.split()), entry.place, numbered=False) if "--" in text else Node({}, "")
        assert isinstance(command.value, dict)
        for key, node in command.value.items():
            if not key.startswith(LAUNCHER):  # slots_per_trial counts
                draft.add(key, node, argument=True)
        draft.use("entrypoint")
        if "run_clm" not in text:
            draft.note("decide", "entrypoint", "the script is not run_clm.py: its arguments are read as if it were, "
                       "and what it trains on is not in this file. Check data.train_on and data.sources")  # fmt: skip
    if "deepspeed_config" in given.value and not draft.has("deepspeed"):
        draft.add("deepspeed", given.value["deepspeed_config"], argument=True)


def _in_order(given: Node) -> list[Hyperparameter]:
    """Those that win come first."""
    every = [each for each in hyperparameters(given) if each.path[0] != "deepspeed_config"]
    return sorted(every, key=lambda each: each.path[0] != "training_arguments")


def _argument_name(parameter: Hyperparameter) -> str | None:
    """The argument of run_clm.py that a hyperparameter outside of training_arguments is named like."""
    name = _ALIASES.get(parameter.name, parameter.name)
    return name if name in _ARGUMENTS and _ARGUMENTS[name].fate in ("copied", "rule", "same") else None


def put_experiment(draft: Draft) -> None:
    """Slots, environment, intervals, retention."""
    slots = draft.integer("resources.slots_per_trial")
    if slots:
        draft.world = slots
        draft.put("launch.gpus", slots, "resources.slots_per_trial", why="on one machine")
    given = draft.raw("environment.environment_variables")
    if isinstance(given, dict):  # by device type, or names and values
        given = next(
            (value for value in given.values() if isinstance(value, list)), [f"{k}={v}" for k, v in given.items()]
        )
    if given and not isinstance(given, list):
        raise draft.fail("environment.environment_variables", "is not a list such as [NAME=value]")
    if given:
        pairs = dict(str(each).partition("=")[::2] for each in given if "=" in str(each))
        draft.put("launch.env", environment(pairs), "environment.environment_variables")
    for key, to in (("min_validation_period", "eval.every"), ("min_checkpoint_period", "checkpoint.every")):
        period = draft.raw(key)
        batches = period.get("batches") if isinstance(period, dict) else None
        if isinstance(batches, int) and batches > 0:
            draft.put(to, batches, key)
        elif period is not None:
            draft.note("no equivalent", key, f"{to} counts steps: set it by hand")
    if (latest := draft.integer("checkpoint_storage.save_trial_latest")) and latest > 0:
        draft.put("checkpoint.keep_last", latest, "checkpoint_storage.save_trial_latest")
    for key in ("checkpoint_storage.save_trial_best", "checkpoint_storage.save_experiment_best"):
        if not draft.has(key) or is_off(draft.raw(key)):
            continue
        if draft.has("do_eval") or draft.has("validation_file"):
            draft.put("checkpoint.keep_best", draft.integer(key), key)
        else:
            draft.note("different", key, "checkpoint.keep_best keeps the best; it needs eval.every and data.validation")
    if (seed := draft.integer("reproducibility.experiment_seed")) is not None and not draft.has("seed"):
        draft.put("run.seed", seed, "reproducibility.experiment_seed")


def put_data(draft: Draft) -> None:
    """run_clm.py joins all texts into blocks and trains on every token: no template, no mask."""
    draft.put("data.train_on", "all", why="run_clm.py has no template and no mask")
    draft.note("different", "dataset_name" if draft.has("dataset_name") else "train_file", "run_clm.py joins texts "
               "into blocks across documents and trains on every token; whet packs whole documents. To train on "
               "conversations with their template and mask: data.train_on: assistant")  # fmt: skip
    draft.put("data.max_length", draft.integer("block_size"), "block_size")
    draft.put("data.too_long", "split", "block_size", why="into windows")
    draft.put("data.packing", "best-fit", "block_size")
    put_batch(draft, "rows")
    files = [key for key in ("train_file", "dataset_name") if draft.has(key)][:1]
    for key in files:
        path = draft.text(key) or ""
        draft.put("data.sources.0.path", path if key == "train_file" else dataset_path(draft, path), key)
        if key == "dataset_name":
            if draft.text("dataset_config_name") not in (None, "default"):
                draft.put("data.sources.0.subset", draft.text("dataset_config_name"), "dataset_config_name")
            draft.put("data.sources.0.split", "train", why="run_clm.py's")
        if (limit := draft.integer("max_train_samples")) is not None:
            draft.put("data.sources.0.max_samples", limit, "max_train_samples")
    draft.use("dataset_config_name")
    if draft.has("validation_file"):
        draft.put("data.validation.sources.0.path", draft.text("validation_file"), "validation_file")
        if (limit := draft.integer("max_eval_samples")) is not None:
            draft.put("data.validation.sources.0.max_samples", limit, "max_eval_samples")
    elif draft.has("do_eval") and files:
        share = draft.integer("validation_split_percentage") or 5
        draft.put("data.validation.fraction", share / 100, "validation_split_percentage", "do_eval",
                  why="where the dataset has no validation split")  # fmt: skip


def put_model(draft: Draft) -> None:
    """LoRA, as the script configures it, and DeepSpeed."""
    if draft.flag("use_lora") or draft.flag("use_peft"):
        put_adapter(draft, "use_lora", "use_peft")
        put_targets(draft)
        if not draft.has("lora_r"):
            draft.note("decide", "use_lora", "rank, alpha and dropout are in the script, not in this file; 8, 32 and "
                       "0.1, those of PEFT's examples, are written")  # fmt: skip
    dtype = str(draft.text("torch_dtype")).removeprefix("torch.")
    if dtype in ("float16", "fp16"):
        draft.note("different", "torch_dtype", "weights in fp16: whet keeps those it trains in fp32, frozen ones in "
                   "train.precision")  # fmt: skip
    elif dtype == "bfloat16" and "adapter.method" not in draft.settings and _value(draft, "train.precision") == "bf16":
        draft.put("model.dtype", "bf16", "torch_dtype")
    if draft.has("deepspeed") and not is_off(draft.raw("deepspeed")):
        deepspeed.include(draft, "deepspeed")


def _value(draft: Draft, to: str) -> Any:
    node = draft.settings.get(to)
    return None if node is None else node.value


_RULES = (read_arguments, put_training_arguments, put_experiment, put_data, put_model)


def put_search(draft: Draft) -> None:
    """Ranges for hyperparameters that are searched, and the section `search`."""
    given = draft.entries["hyperparameters"].node if draft.has("hyperparameters") else Node({}, "")
    searched: dict[str, Hyperparameter] = {}
    for each in _in_order(given):
        name = each.name if each.path[0] == "training_arguments" else _argument_name(each)
        if name is not None and each.kind != "const":
            searched.setdefault(name, each)
    searcher = draft.raw("searcher")
    is_grid = isinstance(searcher, dict) and searcher.get("name") == "grid"
    written = put_ranges(draft, searched, functools.partial(_import_with, draft), is_grid)
    if draft.has("searcher"):
        put_searcher(draft, written)
    elif written:
        draft.note("decide", "hyperparameters", "ranges without a searcher: set search.method")


def _import_with(draft: Draft, path: tuple[str, ...], value: Node) -> Draft:
    """The same file with another value for one hyperparameter."""
    other = Draft(draft.kind, _replace(draft.given, ("hyperparameters", *path), value), draft.world, draft.target)
    for rule in _RULES:
        rule(other)
    other.finish()
    return other


def _replace(node: Node, path: tuple[str, ...], value: Node) -> Node:
    if not path:
        return value
    assert isinstance(node.value, dict)
    return Node({**node.value, path[0]: _replace(node.value[path[0]], path[1:], value)}, node.place)


KIND = Kind(
    "determined",
    "Determined 0.38 with run_clm.py",
    _ROWS,
    (*_RULES, put_search),
    defaults={**DEFAULTS, "block_size": 1024, "lora_r": 8, "lora_alpha": 32, "lora_dropout": 0.1, "max_restarts": 5},
    arguments=_ARGUMENTS,
)
