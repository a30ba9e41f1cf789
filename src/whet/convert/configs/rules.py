"""The meaning of settings that several keys decide together, in the words of transformers' TrainingArguments.

The tables of other programs name their keys after these (`same_as`), so that batch size, schedule, precision and
adapters are understood in one place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Literal

from whet.convert.configs.draft import Draft, is_off
from whet.convert.configs.read import LAUNCHER
from whet.convert.configs.table import Rows, by_rule, under

NO_CLIPPING = 1e9
"""A gradient norm that is never reached: whet has no switch that turns clipping off."""


LAUNCHER_ROWS: Rows = by_rule(under("launcher", "nproc_per_node nnodes num_gpus num_nodes num_processes num_machines"))


def put_launcher(draft: Draft) -> None:
    """The number of processes that torchrun, deepspeed or accelerate starts; unknown if a shell variable says it."""
    machines, processes = 1, 1
    for name in ("nnodes", "num_nodes", "num_machines", "nproc_per_node", "num_gpus", "num_processes"):
        key = f"{LAUNCHER}{name}"
        if not draft.has(key):
            continue
        text = str(draft.raw(key))
        if not text.isdecimal() or not 0 < int(text) < 10**6:
            draft.note("decide", key, "is not a number: set launch.gpus and launch.nodes")
            return
        if name in ("nnodes", "num_nodes", "num_machines"):
            machines = int(text)
            draft.put("launch.nodes", machines, key)
        else:
            processes = int(text) // machines if name == "num_processes" else int(text)  # accelerate counts all
            draft.put("launch.gpus", max(processes, 1), key)
        draft.world = machines * max(processes, 1)


def put_batch(draft: Draft, unit: Literal["conversations", "rows"]) -> None:
    """One optimizer step: micro-batch × accumulation × data-parallel processes."""
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
    micro, accumulation = (_positive(draft, key) for key in keys)
    size = micro * accumulation * (draft.world or 1)
    counted = "" if unit == "conversations" else ", in packed rows"
    if draft.world is None:
        why = f"{micro} × {accumulation} × 1 process{counted}"
        draft.note(
            "decide", keys[0],
            f"the file does not say on how many GPUs it ran. train.batch.{unit} is {size}, for one: multiply it by the "
            "number of data-parallel GPUs",
        )  # fmt: skip
    else:
        why = f"{micro} × {accumulation} × {draft.world} process{'' if draft.world == 1 else 'es'}{counted}"
    draft.put(f"train.batch.{unit}", size, *keys, why=why)
    draft.put("train.micro_rows", micro, keys[0])


def _positive(draft: Draft, key: str) -> int:
    value = draft.integer(key)
    if value is not None and value < 1:
        raise draft.fail(key, "is not a positive integer")
    return value or 1


def total_steps(draft: Draft) -> int | None:
    """The length of the run, where it is given in steps."""
    steps = draft.integer("max_steps")
    return steps if steps is not None and steps > 0 else None


def put_length(draft: Draft) -> None:
    """max_steps wins over num_train_epochs, where it is positive."""
    if steps := total_steps(draft):
        draft.put("train.steps", steps, "max_steps")
        if draft.has("num_train_epochs"):
            draft.note("not needed", "num_train_epochs", "has no effect with max_steps")
    elif (epochs := draft.number("num_train_epochs")) is not None:
        if epochs <= 0:
            raise draft.fail("num_train_epochs", "is not a positive number")
        draft.put("train.epochs", float(epochs), "num_train_epochs")
        draft.use("max_steps")


# The schedule

_SHAPES = {
    "linear": "linear", "polynomial": "linear", "cosine": "cosine", "cosine_with_restarts": "cosine",
    "cosine_with_min_lr": "cosine", "cosine_warmup_with_min_lr": "cosine", "constant": "constant",
    "constant_with_warmup": "constant", "warmup_stable_decay": "wsd",
}  # fmt: skip
_SCHEDULE_KEYS = ("lr_scheduler_type", "lr_scheduler_kwargs")


def put_schedule(draft: Draft, to_steps: Callable[[float], int] = math.ceil, constant_warms_up: bool = False) -> None:
    """Shape, warm-up and lowest rate of the learning rate. `to_steps`: how a fraction of the run becomes steps."""
    name = str(draft.text("lr_scheduler_type") or "linear").lower().removeprefix("schedulertype.")
    options = _options(draft)
    shape = _SHAPES.get(name)
    if shape is None:
        draft.note("no equivalent", "lr_scheduler_type", "whet has constant, linear, cosine and wsd; cosine is written")
        shape = "cosine"
    draft.put("train.schedule.name", shape, "lr_scheduler_type")
    _put_warmup(draft, to_steps, ignored=name == "constant" and not constant_warms_up)
    lowest = _lowest_rate(draft, name, options)
    if lowest:
        draft.put("train.schedule.min_frac", lowest, *_SCHEDULE_KEYS, "learning_rate")
    if shape == "wsd":
        _put_decay(draft, options)
    _note_unused_options(draft, name, options)


def _options(draft: Draft) -> dict[str, Any]:
    given = draft.raw("lr_scheduler_kwargs")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise draft.fail("lr_scheduler_kwargs", "is not a JSON object") from None
    if given is not None and not isinstance(given, dict):
        raise draft.fail("lr_scheduler_kwargs", "is not a mapping")
    return dict(given or {})


def _option(draft: Draft, options: dict[str, Any], key: str, default: float) -> float:
    value = options.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise draft.fail("lr_scheduler_kwargs", f"has {key}: {value!r}, which is not a number")
    return value


def _put_warmup(draft: Draft, to_steps: Callable[[float], int], ignored: bool) -> None:
    """Steps, or a fraction of the run: transformers 5 has both in warmup_steps, 4 has warmup_ratio beside it."""
    steps, ratio = draft.number("warmup_steps") or 0, draft.number("warmup_ratio") or 0
    keys = [key for key in ("warmup_steps", "warmup_ratio") if draft.has(key)]
    for key, value in (("warmup_steps", steps), ("warmup_ratio", ratio)):
        if value < 0 or (key == "warmup_ratio" and value > 1):
            raise draft.fail(key, "is not a number of steps" if key == "warmup_steps" else "is not between 0 and 1")
    if ignored:
        draft.put("train.schedule.warmup", 0, "lr_scheduler_type", why="constant has no warm-up")
        for key in keys:
            draft.note("different", key, "has no effect with constant; constant_with_warmup would warm up")
        return
    has_steps = steps or (not ratio and keys != ["warmup_ratio"])
    key = "warmup_steps" if has_steps else "warmup_ratio"
    value = steps or ratio
    if value >= 1 and key == "warmup_steps":
        draft.put("train.schedule.warmup", math.ceil(value), key)
    elif value and (total := total_steps(draft)):
        draft.put("train.schedule.warmup", to_steps(value * total), key, "max_steps", why=f"{value} of {total} steps")
    else:
        draft.put("train.schedule.warmup", float(value) if value else 0, key, why="of the run" if value else "")
    for other in keys:
        if other != key:
            draft.note("not needed", other, f"has no effect with {key}" if draft.has(key) else "0 is the default")


def _lowest_rate(draft: Draft, name: str, options: dict[str, Any]) -> float:
    rate = draft.number("learning_rate") or 0
    if name in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        if "min_lr" in options and rate:
            return fraction(_option(draft, options, "min_lr", 0) / rate)
        return fraction(_option(draft, options, "min_lr_rate", 0))
    if name == "polynomial" and rate:
        return fraction(_option(draft, options, "lr_end", 1e-7) / rate)
    if name == "warmup_stable_decay":
        return fraction(_option(draft, options, "min_lr_ratio", 0))
    return 0.0


def fraction(value: float) -> float:
    """A fraction of the peak rate, without the noise of a division."""
    return min(max(float(f"{value:.12g}"), 0.0), 1.0)


def _put_decay(draft: Draft, options: dict[str, Any]) -> None:
    if "num_decay_steps" in options:
        steps = _option(draft, options, "num_decay_steps", 0)
        draft.put("train.schedule.decay", max(int(steps), 1), *_SCHEDULE_KEYS)
    if options.get("decay_type", "cosine") != "linear":
        draft.note("different", "lr_scheduler_type", "decays along a cosine at the end; whet's wsd decays linearly")


def _note_unused_options(draft: Draft, name: str, options: dict[str, Any]) -> None:
    read = {"min_lr", "min_lr_rate", "lr_end", "min_lr_ratio", "num_decay_steps", "decay_type", "num_stable_steps"}
    changed = {key for key, value in options.items() if key not in read and not _is_usual(key, value)}
    if changed:
        named = ", ".join(f"{key}={options[key]!r}" for key in sorted(changed))
        draft.note("no equivalent", "lr_scheduler_kwargs", f"{named}: {name} is written without it")
    elif options:
        draft.use("lr_scheduler_kwargs")


def _is_usual(key: str, value: Any) -> bool:
    return (key, value) in (("num_cycles", 1), ("num_cycles", 0.5), ("power", 1), ("warmup_type", "linear"))


# Precision, optimizer, clipping


def put_precision(draft: Draft) -> None:
    """The dtype of the computation; fp32 where neither 16-bit type is on."""
    bf16, fp16 = draft.raw("bf16"), draft.has("fp16") and draft.flag("fp16")
    if draft.has("fp8") and draft.flag("fp8"):
        draft.put("train.precision", "fp8", "fp8")
        draft.use("bf16", "fp16")
    elif fp16 and (not draft.has("bf16") or bf16 == "auto" or (bf16 != "full" and not draft.flag("bf16"))):
        draft.put("train.precision", "fp16", "fp16")
        draft.use("bf16")
    elif bf16 == "auto":
        draft.put("train.precision", "auto", "bf16", why="bf16 on CUDA")
        draft.use("fp16")
    elif bf16 == "full" or (bf16 is not None and draft.flag("bf16")):
        draft.put("train.precision", "bf16", "bf16")
        draft.use("fp16")
    else:
        draft.put("train.precision", "fp32", "bf16", "fp16", why="neither bf16 nor fp16 is on")


_OPTIMIZERS = {
    "adamw": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw", "adamw_torch_xla": "adamw", "adamw_torch_npu_fused": "adamw", "fused_adamw": "adamw",
    "paged_adamw": "adamw", "paged_adamw_32bit": "adamw", "adamw_anyprecision": "adamw", "optimi_adamw": "adamw",
    "adamw_8bit": "adamw8bit", "adamw_bnb_8bit": "adamw8bit", "paged_adamw_8bit": "adamw8bit",
    "adamw_torch_8bit": "adamw8bit", "ao_adamw_8bit": "adamw8bit", "muon": "muon",
}  # fmt: skip


def put_optimizer(draft: Draft) -> None:
    """AdamW in its variants, Muon; and the values all of them have."""
    name = str(draft.text("optim") or "adamw").lower().removeprefix("optimizernames.")
    found = _OPTIMIZERS.get(name)
    if found is None:
        draft.note("no equivalent", "optim", "whet has adamw, adamw16bit, adamw8bit and muon; adamw is written")
    elif found == "muon":
        draft.note(
            "different", "optim", "whet scales Muon's updates by 0.2 · √(longer side); compare the learning rate"
        )
    draft.put("train.optimizer.name", found or "adamw", "optim")
    draft.put("train.optimizer.lr", draft.number("learning_rate"), "learning_rate")
    betas = [draft.number("adam_beta1"), draft.number("adam_beta2")]
    draft.put("train.optimizer.betas", betas, "adam_beta1", "adam_beta2")
    draft.put("train.optimizer.eps", draft.number("adam_epsilon"), "adam_epsilon")
    draft.put("train.optimizer.weight_decay", draft.number("weight_decay"), "weight_decay")
    if draft.has("optim_args") and not is_off(draft.raw("optim_args")):
        draft.note("no equivalent", "optim_args", "options of the optimizer itself; set train.optimizer by hand")
    put_clipping(draft, "max_grad_norm")


def put_clipping(draft: Draft, key: str) -> None:
    """0 means no clipping elsewhere."""
    norm = draft.number(key)
    if norm is not None and norm > 0:
        draft.put("train.clip_norm", norm, key)
    elif norm is not None:
        draft.put("train.clip_norm", NO_CLIPPING, key, why="no clipping")


# Adapters

PEFT_TARGETS = ["q_proj", "v_proj"]
"""What PEFT adapts in Llama, Mistral, Qwen and their relatives when no target is named."""


def put_adapter(draft: Draft, *gates: str) -> None:
    """LoRA, DoRA, rsLoRA and QLoRA in PEFT's terms. `gates`: the keys that say that there is an adapter."""
    method = "dora" if draft.flag("use_dora") else "rslora" if draft.flag("use_rslora") else "lora"
    if draft.flag("use_dora") and draft.flag("use_rslora"):
        draft.note("no equivalent", "use_rslora", "whet has rslora or dora, not both; dora is written")
    draft.put("adapter.method", method, *gates, *(key for key in ("use_dora", "use_rslora") if draft.flag(key)))
    rank = draft.integer("lora_r")
    draft.put("adapter.rank", rank, "lora_r")
    draft.put("adapter.alpha", draft.number("lora_alpha"), "lora_alpha")
    draft.put("adapter.dropout", draft.number("lora_dropout"), "lora_dropout")
    if extra := draft.texts("lora_modules_to_save"):
        draft.put("adapter.also_train", extra, "lora_modules_to_save")
    for key, to in (("lora_rank_pattern", "adapter.ranks"), ("lora_alpha_pattern", "adapter.alphas")):
        if pattern := draft.raw(key):
            draft.put(to, pattern, key)
    if draft.flag("load_in_4bit"):
        draft.put("quantize", "nf4", "load_in_4bit")
        if draft.text("bnb_4bit_quant_type") == "fp4":
            draft.note("no equivalent", "bnb_4bit_quant_type", "whet's 4-bit type is nf4, which is written")
        else:
            draft.use("bnb_4bit_quant_type")
    elif draft.flag("load_in_8bit"):
        draft.note("no equivalent", "load_in_8bit", "whet has 4-bit frozen weights (quantize: nf4) or 16-bit ones")


def put_targets(draft: Draft) -> None:
    """The layers with an adapter, by name or as a regular expression."""
    given = draft.raw("lora_target_modules")
    if isinstance(given, list) and len(given) == 1 and given[0] in ("all", "all-linear"):
        given = given[0]
    if given is None or given == []:
        draft.put("adapter.targets", PEFT_TARGETS, "lora_target_modules", why="PEFT's choice for Llama-like models")
        draft.note(
            "decide", "lora_target_modules",
            "no target is named, so PEFT chooses by architecture: query and value projections in most. Other models "
            "have other names; all-linear, whet's default, adapts more",
        )  # fmt: skip
    elif given in ("all", "all-linear", "all_linear"):
        draft.put("adapter.targets", "all-linear", "lora_target_modules")
    elif isinstance(given, str) and "," not in given and any(sign in given for sign in "*.|()[]^$\\"):
        draft.put("adapter.targets", given, "lora_target_modules", why="a regular expression")
    else:
        draft.put("adapter.targets", draft.texts("lora_target_modules"), "lora_target_modules")


# Checkpoints and evaluation


def put_intervals(draft: Draft) -> None:
    """When to save and to evaluate. Intervals below 1 are fractions of the run."""
    saving = str(draft.text("save_strategy") or "steps")
    if saving == "steps" and (every := draft.number("save_steps")):
        _put_interval(draft, every, "save_steps", "checkpoint.every")
    elif saving == "epoch":
        draft.put("checkpoint.epochs", 1.0, "save_strategy")
    elif saving in ("no", "best", "False"):
        draft.note("different", "save_strategy", "whet saves ten times in a run, and always at its end")
    if (limit := draft.integer("save_total_limit")) is not None and limit > 0:
        draft.put("checkpoint.keep_last", limit, "save_total_limit")
    every = draft.number("eval_steps")
    evaluation = str(draft.text("eval_strategy") or ("steps" if every else "no"))
    if evaluation == "steps" and every:
        _put_interval(draft, every, "eval_steps", "eval.every")
        draft.use("eval_strategy")
    elif evaluation == "steps":
        draft.note("different", "eval_strategy", "evaluates as often as it logs; set eval.every")
    elif evaluation == "epoch":
        draft.note("no equivalent", "eval_strategy", "eval.every counts steps: set it to the steps of an epoch")
    if draft.has("eval_on_start"):
        draft.put("eval.at_start", draft.flag("eval_on_start"), "eval_on_start")
    if draft.flag("load_best_model_at_end"):
        draft.note("different", "load_best_model_at_end", "whet exports the last step; `whet export RUN@best` the best "
                   "one. checkpoint.keep_best: 1 keeps it")  # fmt: skip


def _put_interval(draft: Draft, every: float, key: str, to: str) -> None:
    if every >= 1:
        draft.put(to, int(every), key)
    elif every > 0 and (total := total_steps(draft)):
        draft.put(to, max(1, math.ceil(every * total)), key, "max_steps", why=f"{every} of {total} steps")
    else:
        draft.note("no equivalent", key, f"a fraction of the run; {to} counts steps. Set it by hand")


def put_memory(draft: Draft) -> None:
    """Recomputation, offload and compilation, which change memory and speed alone."""
    recompute = _is_on(draft, "gradient_checkpointing", "offload", "offload_disk")
    draft.put("parallel.recompute", "full" if recompute else "none", "gradient_checkpointing")
    if not recompute and not is_off(fsdp_options(draft).get("activation_checkpointing")):
        draft.put("parallel.recompute", "full", "fsdp_config", why="activation_checkpointing")
    for key in ("gradient_checkpointing", "activation_offloading"):
        where = draft.raw(key) if isinstance(draft.raw(key), str) else ""
        if "offload" in where or (
            key == "activation_offloading" and _is_on(draft, key, "legacy", "disk", "hidden_states")
        ):
            draft.put("parallel.offload", "activations", key)
        if "disk" in where:
            draft.note("no equivalent", key, "offload to disk: whet offloads only to host memory")
    if _is_on(draft, "torch_compile", "auto"):
        draft.put("model.compile", "auto" if draft.raw("torch_compile") == "auto" else True, "torch_compile")


def _is_on(draft: Draft, key: str, *variants: str) -> bool:
    """Whether something is on, by true or by the name of a variant."""
    return draft.raw(key) in variants or draft.flag(key)


def put_validation_size(draft: Draft, key: str) -> None:
    """A fraction of the records, or their number."""
    if size := draft.number(key):
        if size < 1:
            draft.put("data.validation.fraction", float(size), key)
        else:
            draft.note("no equivalent", key, "a number of records; data.validation.fraction is a fraction")


def fsdp_options(draft: Draft) -> dict[str, Any]:
    """fsdp_config, if it is a mapping; its keys may have the prefix `fsdp_` or not."""
    given = draft.raw("fsdp_config")
    return {str(key).removeprefix("fsdp_"): value for key, value in given.items()} if isinstance(given, dict) else {}


def put_sharding(draft: Draft, key: str, offload: str = "") -> None:
    """ZeRO or FSDP: weights, gradients and optimizer state sharded over all processes."""
    if draft.world is not None:
        draft.put("parallel.shard", draft.world, key, why="all processes")
        if offload:
            draft.put("parallel.offload", offload, key)
        return
    more = f" and parallel.offload to {offload}" if offload else ""
    draft.note(
        "decide", key,
        f"only if the weights do not fit on one GPU, set parallel.shard to the number of GPUs ÷ parallel.tensor{more}",
    )  # fmt: skip
    draft.use(key)
