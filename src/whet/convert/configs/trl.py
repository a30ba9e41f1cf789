"""TRL's SFT: the YAML of `trl sft --config`, an SFTConfig as JSON, or the command line."""

from __future__ import annotations

import os
from typing import Any

from whet.convert.configs.draft import Draft, environment, is_off, without_secrets
from whet.convert.configs.huggingface import DEFAULTS, LORA_ROWS, ROWS, SPEED, put_deepspeed, put_training_arguments
from whet.convert.configs.rules import LAUNCHER_ROWS, put_adapter, put_batch, put_launcher, put_targets
from whet.convert.configs.table import Kind, Rows, by_rule, copied, no_equivalent, not_needed, same_as
from whet.core.errors import WhetError

_ROWS: Rows = {
    **ROWS,
    **LORA_ROWS,
    **LAUNCHER_ROWS,
    **by_rule(
        "dataset_name dataset_config dataset_train_split dataset_test_split datasets test_split_size "
        "dataset_text_field max_length packing packing_strategy truncation_mode completion_only_loss "
        "assistant_only_loss chat_template_path dtype loss_type activation_offloading env model_init_kwargs eos_token "
        "lora_target_parameters"
    ),
    **copied("text", model_name_or_path="model.path", model_revision="model.revision"),
    **copied("flag", trust_remote_code="model.trust_remote_code"),
    **same_as(max_seq_length="max_length", torch_dtype="dtype"),
    **no_equivalent("streaming: whet prepares the data before step 1", "streaming dataset_streaming"),
    **copied("number", router_aux_loss_coef="train.router_aux_loss"),
    **not_needed("the tokenizer's own; whet never trains on padding", "pad_token pad_to_multiple_of"),
    **not_needed(SPEED, "dataset_num_proc dataset_batch_size padding_free eval_packing attn_implementation "
                 "use_bnb_nested_quant bnb_4bit_quant_storage ignore_bias_buffers lora_task_type"),
    **no_equivalent("options of TRL's own preparation; whet renders and tokenizes each conversation", "dataset_kwargs"),
    **not_needed("the order of conversations is random, by run.seed", "shuffle_dataset"),
}  # fmt: skip
_OTHER_TRAINERS = {
    "beta", "max_prompt_length", "max_completion_length", "precompute_ref_log_probs", "sync_ref_model", "loss_weights",
    "f_divergence_type", "desirable_weight", "undesirable_weight", "cpo_alpha", "simpo_gamma", "reward_model_path",
    "center_rewards_coefficient", "reward_funcs", "reward_weights", "num_generations", "num_ppo_epochs", "lmbda",
}  # fmt: skip
"""Keys of DPO, KTO, ORPO, CPO, reward modelling, GRPO, RLOO, PPO and GKD that SFT does not have."""


def refuse_other_trainers(draft: Draft) -> None:
    """A file of another trainer, told by a key or a loss that only preference, reward and online training have."""
    given = draft.given.value
    assert isinstance(given, dict)
    key = next((key for key in given if key in _OTHER_TRAINERS), None)
    if key is None and draft.has("loss_type") and draft.raw("loss_type") not in ("nll", "chunked_nll", "dft"):
        key = "loss_type"
    if key is not None:
        raise WhetError(
            f"{given[key].place}: {key}: {given[key].plain()!r} is not of TRL's supervised fine-tuning, and whet "
            "trains only on answers. Nothing was imported"
        )


def put_mask(draft: Draft) -> None:
    """What is learned. Without a word TRL trains on every token, except of datasets with prompt and completion."""
    if draft.flag("assistant_only_loss"):
        draft.put("data.train_on", "assistant", "assistant_only_loss")
        draft.use("completion_only_loss")
    elif draft.has("completion_only_loss") and draft.flag("completion_only_loss"):
        draft.put("data.train_on", "last", "completion_only_loss", why="only the completion")
        draft.use("assistant_only_loss")
    elif draft.has("completion_only_loss"):
        draft.put("data.train_on", "all", "completion_only_loss")
        draft.use("assistant_only_loss")
    else:
        key = "assistant_only_loss"
        draft.put("data.train_on", "all", key, why="of messages and text, TRL trains on every token")
        draft.note(
            "decide", key,
            "off: TRL trains on every token, questions too, unless the records have prompt and completion; then only "
            "on completions, which is data.train_on: last. To train only on answers: data.train_on: assistant",
        )  # fmt: skip
    if draft.text("loss_type") == "dft":
        draft.note("no equivalent", "loss_type", "Dynamic Fine-Tuning weights tokens by their probability; the plain "
                   "log-likelihood is trained")  # fmt: skip


def put_data(draft: Draft) -> None:
    """The datasets of the file, their template and length."""
    listed = draft.raw("datasets")
    if isinstance(listed, list) and listed:
        for number, each in enumerate(listed):
            _put_source(draft, f"data.sources.{number}", each if isinstance(each, dict) else {"path": each}, {})
        draft.use("dataset_name", "dataset_config", "dataset_train_split")
    elif draft.has("dataset_name"):
        source = {"path": draft.text("dataset_name"), "name": draft.text("dataset_config"),
                  "split": draft.text("dataset_train_split")}  # fmt: skip
        keys = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
        _put_source(draft, "data.sources.0", source, keys)
        if not is_off(draft.text("eval_strategy")):
            test = {**source, "split": draft.text("dataset_test_split")}
            _put_source(draft, "data.validation.sources.0", test, {**keys, "split": "dataset_test_split"})
    if size := draft.number("test_split_size"):
        _put_fraction(draft, "test_split_size", size)
    field = draft.text("dataset_text_field")
    if draft.has("dataset_text_field") and field != "text" and "data.sources.0.path" in draft.settings:
        draft.put("data.sources.0.fields", {"text": field}, "dataset_text_field")
        draft.put("data.sources.0.format", "text", "dataset_text_field")
    if draft.has("chat_template_path"):
        draft.put("data.template", draft.text("chat_template_path"), "chat_template_path")


def _put_fraction(draft: Draft, key: str, size: float) -> None:
    if 0 < size < 1:
        draft.put("data.validation.fraction", float(size), key)
    elif size >= 1:
        draft.note("no equivalent", key, "a number of records; data.validation.fraction is a fraction")


def _put_source(draft: Draft, to: str, source: dict[str, Any], keys: dict[str, str]) -> None:
    """`keys`: which key of the file each part of the source comes from; absent: datasets."""
    key = keys.get("path", "datasets")
    path = source.get("data_files") or source.get("path")
    if isinstance(path, list | dict):
        draft.note("decide", key, f"data_files {path!r}: give each file its own source")
        path = next(iter(path.values() if isinstance(path, dict) else path), None)
    draft.put(f"{to}.path", dataset_path(draft, str(path)), key)
    for name, target in (("name", "subset"), ("split", "split")):
        if source.get(name) and not _is_file(str(path)):
            draft.put(f"{to}.{target}", str(source[name]), keys.get(name, "datasets"))
    if source.get("fraction"):
        draft.put(f"{to}.weight", source["fraction"], key)
        draft.note("different", key, "fraction keeps a part of each dataset so that none repeats; weight repeats")
    for name in sorted(source.keys() - {"path", "name", "split", "fraction", "data_files"}, key=str):
        shown = without_secrets(source[name], str(name))
        draft.note("no equivalent", key, f"{name}: {shown!r} has no equivalent in a source")


_FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst", ".bin")


def _is_file(path: str) -> bool:
    return path.endswith(_FILES)


def dataset_path(draft: Draft, path: str) -> str:
    """A file or folder stays as it is; any other name is one of the hub."""
    is_local = _is_file(path) or path.startswith((".", "/", "~", "hub:", "builtin:")) or path in ("json", "csv")
    places = (draft.file.parent / path, path)
    exists = any(os.path.exists(place) for place in places)  # noqa: PTH110 - Path.exists raises for impossible names
    return path if is_local or exists else f"hub:{path}"


def put_length_and_packing(draft: Draft) -> None:
    """Longer sequences are cut, or split where packing says so; a packed batch counts rows."""
    packing = draft.flag("packing")
    strategy = str(draft.text("packing_strategy") or "bfd")
    length = draft.integer("max_length") if draft.raw("max_length") != "None" else None
    if length is not None:
        draft.put("data.max_length", length, "max_length")
    draft.put("data.packing", "best-fit" if packing else "none", "packing")
    if packing and strategy in ("wrapped", "bfd_split"):
        draft.put("data.too_long", "split", "packing_strategy", "packing")
        text = "cuts conversations anywhere; whet splits long ones between turns and packs whole ones"
        draft.note("different", "packing_strategy", text)
    else:
        draft.put("data.too_long", "truncate", "max_length", why="TRL cuts what is longer")
    if draft.text("truncation_mode") == "keep_end":
        draft.note("no equivalent", "truncation_mode", "whet keeps the beginning of a conversation that is too long")
    put_batch(draft, "rows" if packing else "conversations")


def put_model(draft: Draft) -> None:
    """The dtype of the weights, adapters, and what has no place."""
    adapter = draft.flag("use_peft")
    if adapter:
        put_adapter(draft, "use_peft")
        put_targets(draft)
    dtype = str(draft.text("dtype")).removeprefix("torch.")
    if dtype in ("bfloat16", "bf16") and not adapter and draft.settings["train.precision"].value == "bf16":
        draft.put("model.dtype", "bf16", "dtype", why="weights without an fp32 copy")
    elif dtype in ("float16", "fp16"):
        draft.note("no equivalent", "dtype", "weights in fp16: whet keeps those it trains in fp32")
    for key in ("model_init_kwargs", "lora_target_parameters", "eos_token"):
        if draft.has(key):
            text = (
                "the end of a turn is that of the template" if key == "eos_token" else "options for loading the model"
            )
            draft.note("no equivalent", key, "adapters on single parameters" if "lora" in key else text)
    if draft.has("env"):
        put_environment(draft, "env")


def put_environment(draft: Draft, key: str) -> None:
    """Environment variables of the processes."""
    given = draft.raw(key)
    if not isinstance(given, dict):
        raise draft.fail(key, "is not a mapping of names to values")
    draft.put("launch.env", environment(given), key)


KIND = Kind(
    "trl",
    "TRL 1.16",
    _ROWS,
    (
        refuse_other_trainers, put_launcher, put_training_arguments, put_mask, put_data, put_length_and_packing,
        put_model, put_deepspeed,
    ),
    defaults={
        **DEFAULTS, "learning_rate": 2e-5, "bf16": True, "gradient_checkpointing": True, "max_length": 1024,
        "packing": False, "packing_strategy": "bfd", "assistant_only_loss": False, "lora_r": 16, "lora_alpha": 32,
        "lora_dropout": 0.05, "dataset_train_split": "train", "dataset_test_split": "test", "dtype": "float32",
    },
    command="sft",
)  # fmt: skip
