"""nanochat's chat_sft: its command line, in two editions whose flags and defaults differ."""

from __future__ import annotations

import math
from typing import Any

from whet.convert.configs.draft import Draft
from whet.convert.configs.read import LAUNCHER
from whet.convert.configs.rules import LAUNCHER_ROWS, NO_CLIPPING, fraction, put_launcher
from whet.convert.configs.table import Kind, Rows, by_rule, no_equivalent, not_needed

_EARLY = ("dtype", "weight_decay", "dry_run", "smoke_test")
_LATER = ("load_optimizer", "warmup_ratio", "warmdown_ratio", "final_lr_frac", "chatcore_every", "chatcore_max_cat",
          "chatcore_max_sample", "mmlu_epochs", "gsm8k_epochs")  # fmt: skip
"""Flags that only chat_sft of February 2026, or only that of July 2026, has."""

_ROWS: Rows = {
    **by_rule(
        "run dtype model_tag model_step num_iterations max_seq_len device_batch_size total_batch_size embedding_lr "
        "unembedding_lr matrix_lr weight_decay init_lr_frac warmup_ratio warmdown_ratio final_lr_frac eval_every "
        "eval_tokens mmlu_epochs gsm8k_epochs load_optimizer device_type"
    ),
    **no_equivalent("ChatCORE: eval.tasks scores answers during training", "chatcore_every chatcore_max_cat "
                    "chatcore_max_sample"),
    **not_needed("an option of the command: whet train --dry-run", "dry_run"),
    **not_needed("an option of the command: whet train --smoke", "smoke_test"),
    **LAUNCHER_ROWS,
}  # fmt: skip

_SCALAR_LR = 0.5
"""The default of nanochat's setup_optimizer, which chat_sft does not change."""


def _is_early(draft: Draft) -> bool:
    return draft.has(*_EARLY) and not draft.has(*_LATER)


def put_edition(draft: Draft) -> None:
    """What is learned, and the schedule, changed between the editions."""
    if _is_early(draft):
        draft.put(
            "data.train_on",
            "all",
            *(key for key in _EARLY if draft.has(key)),
            why="chat_sft of February 2026 ignores the mask",
        )
        draft.note("different", "run", "chat_sft of February 2026 ignores the mask and trains on every token, "
                   "questions too. To train on answers, as later editions: data.train_on: assistant")  # fmt: skip
        draft.use(*_EARLY[:2])
    else:
        draft.put("data.train_on", "assistant", *(key for key in _LATER if draft.has(key)), why="since March 2026")
        if not draft.has(*_LATER):
            draft.note("decide", "run", "no flag shows the edition of chat_sft: that of July 2026 is assumed. Before "
                       "March 2026 it trained on every token (data.train_on: all) and kept 80 % of the run at full "
                       "rate")  # fmt: skip
        for key in _EARLY:
            if draft.has(key):
                draft.note("different", key, "no edition of chat_sft has this flag together with those of July 2026")


def put_batch(draft: Draft) -> None:
    """A step has room for total_batch_size tokens; --num-iterations counts micro-batches and runs one short."""
    length, micro = draft.integer("max_seq_len") or 2048, draft.integer("device_batch_size") or 32
    size = draft.integer("total_batch_size") or 524288
    for key, value in (("max_seq_len", length), ("device_batch_size", micro), ("total_batch_size", size)):
        if value < 2 and draft.has(key):
            raise draft.fail(key, "is too small")
    draft.put("data.max_length", length, "max_seq_len")
    draft.put("train.batch.tokens", size, "total_batch_size", why=f"{size // length} rows of {length} tokens")
    draft.put("train.micro_rows", micro, "device_batch_size")
    draft.put("data.packing", "best-fit")
    draft.put("data.too_long", "drop", why="a longer conversation would stay in nanochat's buffer for ever")
    put_launcher(draft)
    world = draft.world if any(key.startswith(LAUNCHER) for key in draft.entries) else 1
    if world is not None:
        draft.world = world
        if size % (micro * length * world):
            draft.note("different", "total_batch_size", f"is not a multiple of {micro} × {length} × {world} processes, "
                       "and nanochat refuses it; whet accepts it")  # fmt: skip
    count = draft.integer("num_iterations") or -1
    if count < 1:
        draft.put("train.epochs", 1.0, "num_iterations", why="one epoch")
        return
    accumulation = max(size // (micro * length * (world or 1)), 1)
    steps = max(math.ceil((count - 1) / accumulation), 1)
    draft.put("train.steps", steps, "num_iterations", why=f"{count} micro-batches, {accumulation} a step")
    processes = (
        f"{world} process{'' if world == 1 else 'es'}" if world else "one process, because the command gives no number"
    )
    draft.note("different" if world else "decide", "num_iterations", "counts micro-batches, not optimizer steps, and "
               f"runs one short: {steps} steps of {accumulation} micro-batches on {processes}")  # fmt: skip


def put_optimizer(draft: Draft) -> None:
    """Muon and AdamW with four rates, all scaled by --init-lr-frac for the whole run. The flavour scales those of
    embedding and head by the width, as nanochat does."""
    draft.put("train.optimizer.name", "muon")
    draft.put("train.optimizer.flavour", "nanochat")
    for name, key in (("lr", "unembedding_lr"), ("embedding_lr", "embedding_lr"), ("matrix_lr", "matrix_lr")):
        draft.put(f"train.optimizer.{name}", draft.number(key) or 0.0, key)
    draft.put("train.optimizer.scalar_lr", _SCALAR_LR, why="for x0_lambdas; resid_lambdas get a hundredth")
    early, scale = _is_early(draft), draft.number("init_lr_frac")
    if scale is not None:
        draft.note("different", "init_lr_frac", "scales the rate of the whole run, not of its start")
    draft.put("train.optimizer.scale", scale if scale is not None else 1.0 if early else 0.8, "init_lr_frac")
    draft.put("train.optimizer.betas", [0.8, 0.95 if early else 0.96], why="of the head")
    draft.put("train.optimizer.eps", 1e-10)
    decay = draft.number("weight_decay") or 0.0
    draft.put("train.optimizer.weight_decay", decay, "weight_decay")
    if decay:
        draft.note("different", "weight_decay", "its help says embeddings, but only Muon's matrices decay")
    draft.put("train.clip_norm", NO_CLIPPING, why="no clipping")
    if not early and draft.raw("load_optimizer") not in (0, "0"):
        draft.note("no equivalent", "load_optimizer", "continues the optimizer of pre-training; whet starts afresh")
    else:
        draft.use("load_optimizer")


def put_schedule(draft: Draft) -> None:
    """Flat, then linear to the end: the last fifth in February, --warmdown-ratio in July."""
    early = _is_early(draft)
    warmup, decay = draft.number("warmup_ratio") or 0, 0.2 if early else draft.number("warmdown_ratio")
    decay = 0.5 if decay is None else decay
    for key, value in (("warmup_ratio", warmup), ("warmdown_ratio", decay)):
        if not 0 <= value <= 1:
            raise draft.fail(key, "is not between 0 and 1")
    draft.put("train.schedule.name", "wsd")
    draft.put("train.schedule.warmup", float(warmup) if warmup else 0, "warmup_ratio")
    draft.put("train.schedule.decay", float(decay), "warmdown_ratio")
    if lowest := draft.number("final_lr_frac"):
        draft.put("train.schedule.min_frac", fraction(lowest), "final_lr_frac")
    if draft.has("dtype"):
        names = {"bfloat16": "bf16", "float32": "fp32"}
        if draft.text("dtype") not in names:
            raise draft.fail("dtype", "is not bfloat16 or float32")
        draft.put("train.precision", names[draft.text("dtype") or ""], "dtype")
    if (every := draft.integer("eval_every")) and every > 0:
        draft.put("eval.every", every, "eval_every")
    if (tokens := draft.integer("eval_tokens")) and tokens > 0:
        draft.put("eval.tokens", tokens, "eval_tokens")


_TASKS: dict[str, dict[str, Any]] = {
    "smoltalk": {"path": "hub:HuggingFaceTB/smol-smoltalk", "split": "train"},
    "mmlu": {"path": "hub:cais/mmlu", "subset": "all", "split": "auxiliary_train", "format": "multiple-choice"},
    "gsm8k": {"path": "hub:openai/gsm8k", "subset": "main", "split": "train", "format": "gsm8k", "calculator": "calls"},
    "identity": {"path": "identity_conversations.jsonl"},
    "spelling": {"path": "builtin:spelling", "max_samples": 200_000},
    "spelling-bee": {"path": "builtin:spelling-bee", "max_samples": 80_000, "calculator": "calls"},
}


def put_data(draft: Draft) -> None:
    """The tasks that chat_sft mixes; a task in it n times is a source with n epochs."""
    if _is_early(draft):
        epochs: dict[str, int] = {"smoltalk": 1, "mmlu": 1, "gsm8k": 2, "identity": 2, "spelling": 1, "spelling-bee": 1}
    else:
        mmlu, gsm8k = draft.integer("mmlu_epochs"), draft.integer("gsm8k_epochs")
        epochs = {"smoltalk": 1, "mmlu": 3 if mmlu is None else mmlu, "gsm8k": 4 if gsm8k is None else gsm8k}
    number = 0
    for task, times in epochs.items():
        if times < 1:
            continue
        key = f"{task}_epochs"
        source = {**_TASKS[task], **({"epochs": float(times)} if times > 1 else {})}
        draft.put(f"data.sources.{number}", source, key, why=f"chat_sft's {task}")
        number += 1
    for key in ("mmlu_epochs", "gsm8k_epochs"):
        draft.use(key)
    tests = [
        {"path": "hub:HuggingFaceTB/smol-smoltalk", "split": "test"},
        {**_TASKS["mmlu"], "split": "test", "stop": 5200},
        {**_TASKS["gsm8k"], "split": "test", "stop": 420},
    ]
    draft.put("data.validation.sources", tests, why="chat_sft's validation tasks")
    draft.put("run.seed", 42, why="of the mixture")
    if draft.has("run") and draft.text("run") != "dummy":
        draft.put("run.name", draft.text("run"), "run")
        draft.put("track", ["wandb"], "run")
    if (device := draft.text("device_type")) == "xla":
        draft.note("no equivalent", "device_type", "TPUs")
    elif device in ("cuda", "cpu", "mps"):
        draft.put("run.device", device, "device_type")
    elif device:
        raise draft.fail("device_type", "is not cuda, cpu, mps or xla")
    if tag := draft.text("model_tag"):
        draft.put("model.path", f"base_checkpoints/{tag}", "model_tag")
        step = f" --step {draft.integer('model_step')}" if draft.has("model_step") else ""
        draft.note("decide", "model_tag", "a checkpoint of nanochat: convert it (whet import checkpoint nanochat DIR "
                   f"--out MODEL{step}) and set model.path=MODEL")  # fmt: skip
        draft.use("model_step")


KIND = Kind(
    "nanochat",
    "nanochat (2026-07)",
    _ROWS,
    (put_edition, put_batch, put_optimizer, put_schedule, put_data),
    defaults={"max_seq_len": 2048, "device_batch_size": 32, "total_batch_size": 524288, "embedding_lr": 0.3,
              "unembedding_lr": 0.004, "matrix_lr": 0.02, "num_iterations": -1, "eval_every": 200},
    command="chat_sft",
)  # fmt: skip
