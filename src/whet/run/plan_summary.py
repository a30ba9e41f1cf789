"""What was decided before the first step: plan.json, and warnings and a summary on the console."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from whet.config import Config
from whet.core.checksums import read_hashed_json
from whet.core.console import info, warn
from whet.core.errors import WhetError
from whet.data.plan.planner import packing_efficiency
from whet.execution.compile import should_compile
from whet.execution.cuda_graphs import uses_cuda_graphs
from whet.model import attention
from whet.model.flops import device_name, device_peak_flops, flops_table
from whet.model.fp8.conversion import count_fp8_layers
from whet.model.load.random_models import is_random_model
from whet.model.lora.coverage import MIN_COVERAGE, adapter_coverage, covered_share, describe_coverage
from whet.model.lora.peft_adapters import frozen_routers
from whet.model.loss.loss_model import LossModel
from whet.model.loss.router_aux_loss import configured_coefficient
from whet.model.quantize import MIN_QUANTIZED_SHARE, count_weights, quantized_share
from whet.model.randomness import ignored_attention_dropout
from whet.run.data import describe_step
from whet.training.run_state import Run
from whet.training.schedule import end_position, warmup_fills_run

_FULL_STEP = 0.9
"""A step with less than this share of train.batch.tokens is announced with a warning."""


def describe_run(run: Run) -> dict[str, Any]:
    """The content of plan.json."""
    config, plan, device = run.config, run.plan, run.ranks.device
    parameters = list(run.model.parameters())
    return {
        "steps": plan.last_step,
        "start_step": config.train.first_step,
        "rows": len(plan.rows) - 1,
        "conversations": len(plan.documents),
        "conversations_per_epoch": plan.stats.per_epoch,
        "epochs": len(plan.documents) / plan.stats.per_epoch,
        "tokens": plan.stats.tokens,
        "supervised_tokens": _supervised_tokens(run),
        "efficiency": packing_efficiency(plan, config.row_length),
        "row_length": config.row_length,
        "micro_rows": run.loader.micro_rows,
        "worst_batch_gib": run.worst_batch_gib,
        "world": run.ranks.world_size,
        "batch": config.train.batch.model_dump(exclude_none=True),
        "tokens_per_step": plan.mean_step_tokens,
        "packing": "none" if run.model.unpacked else config.data.packing,
        "parameters": sum(map(count_weights, parameters)),
        "trainable_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "device": device.type,
        "device_name": device_name(device),
        "peak_flops": device_peak_flops(device, run.precision.name),
        "precision": run.precision.name,
        "quantize": config.quantize,
        "eight_bit_layers": count_fp8_layers(run.model),
        "attention": attention.describe_backend(run.model.language_model),
        "compiled": should_compile(config.model.compile, device, run.precision.compute),
        "recorded": uses_cuda_graphs(run.model),
        "coverage": [each.as_dict() for each in adapter_coverage(run.model.language_model)] if config.adapter else None,
        **config.parallel.model_dump(),
    }


def read_plan_json(run: Path) -> dict[str, Any]:
    """The content of plan.json; empty if it is missing or damaged, for what can do without it."""
    with contextlib.suppress(WhetError):
        return read_hashed_json(run / "plan.json")
    return {}


def print_summary(run: Run) -> None:
    """Warn of settings that the user may not want, then describe the run in one line."""
    config, plan, language_model = run.config, run.plan, run.model.language_model
    if is_random_model(config.model.path):
        warn(f"model.path: {config.model.path}: the weights are random; the run measures speed and learns nothing")
    if run.model.unpacked:
        how = "in padded batches" if run.model.pads else "one conversation at a time"
        warn(f"this model is trained unpacked, {how}, which is slower: {run.model.unpacked}")
    for remark in randomness_remarks(run.model):
        info(remark)
    router_remark = router_aux_loss_remark(config, run.model)
    if config.train.router_aux_loss == 0 and outputs_router_logits(run.model) and router_remark is not None:
        warn(router_remark)
    if config.quantize is not None and (share := quantized_share(language_model)) < MIN_QUANTIZED_SHARE:
        warn(
            f"quantize: only {share:.0%} of this model's weights are in {config.quantize}: embeddings cannot be "
            "quantized"
        )
    if config.adapter is not None and covered_share(coverage := adapter_coverage(language_model)) < MIN_COVERAGE:
        warn(describe_coverage(coverage, config.adapter.targets))
    if config.adapter is not None and frozen_routers(language_model):
        info("the routers' weights are frozen: adapters change what experts compute, not which tokens they get")
    fp8_layers = count_fp8_layers(run.model)
    if fp8_layers:
        info(f"{fp8_layers} layers multiply in fp8; evaluation and export do not")
    if fp8_layers and not should_compile(config.model.compile, run.ranks.device, run.precision.compute):
        warn("train.precision: without compilation, casting to fp8 takes longer than it saves; see model.compile")
    max_positions = getattr(language_model.config, "max_position_embeddings", plan.stats.longest)
    if plan.stats.longest > max_positions:
        warn(
            f"the longest conversation has {plan.stats.longest} tokens, but the model was made for {max_positions}; "
            "lower data.max_length"
        )
    schedule = config.train.schedule
    end = end_position(plan).in_units_of(schedule)
    if warmup_fills_run(end, schedule):
        warn(
            f"train.schedule.warmup: {schedule.warmup} takes the whole run of {end:g} {schedule.by}s, so the rate "
            "only rises"
        )
    device = run.ranks.device
    if run.peak_flops is None and device.type != "cpu":
        info(f"MFU is not reported: the peak FLOP/s of {device_name(device)} in {run.precision.name} is unknown")
    wanted = config.train.batch.tokens
    if wanted is not None and plan.mean_step_tokens < _FULL_STEP * wanted:
        warn(
            f"train.batch.tokens: {wanted:,}, but a step has {describe_step(config, plan)}. Raise it, pack tighter "
            "(data.packing=best-fit), or give the batch size in train.batch.conversations"
        )
    info(
        f"{len(plan)} {'step' if len(plan) == 1 else 'steps'} on {run.ranks.world_size} × {device.type}, "
        f"{run.precision.name}: a step has {describe_step(config, plan)}; an epoch has {plan.stats.per_epoch} "
        "conversations"
    )


def randomness_remarks(root: LossModel) -> list[str]:
    """What a user should know about random numbers in training; empty without any."""
    remarks = []
    if root.is_stochastic:
        remarks.append(
            "the model draws random numbers in training (dropout, noise in routers or skipped layers): losses depend "
            "on train.micro_rows and the number of processes"
        )
    dropout = None if root.unpacked else ignored_attention_dropout(root.language_model)
    if dropout:
        remarks.append(f"the model's config.json sets dropout of attention weights ({dropout}): whet does not apply it")
    return remarks


def outputs_router_logits(root: LossModel) -> bool:
    """Whether the model's config.json turns the auxiliary loss of routers on."""
    config: Any = root.language_model.config
    return bool(getattr(config.get_text_config(), "output_router_logits", False))


def router_aux_loss_remark(config: Config, root: LossModel) -> str | None:
    """Whether the auxiliary loss of routers is part of the objective; None for models without one."""
    coefficient, own = config.train.router_aux_loss, configured_coefficient(root.language_model)
    if own is None:
        return None
    stated = f"the model's config.json has router_aux_loss_coef {own:g}"
    if outputs_router_logits(root):
        stated += ", and output_router_logits turns that auxiliary loss on"
    if not coefficient:
        return f"{stated}; whet does not add it to the loss. To balance the experts: train.router_aux_loss={own:g}"
    return (
        f"{coefficient:g} times the routers' auxiliary loss is added, over all tokens of a step, at the cost of one "
        f"more forward pass; {stated}"
    )


def run_flops_table(run: Run) -> str:
    """FLOPs by module, for a conversation of the mean length (profile/flops.txt)."""
    length = run.plan.stats.tokens / len(run.plan.documents)
    return flops_table(run.model.language_model, round(length), _supervised_tokens(run) / run.plan.stats.tokens)


def _supervised_tokens(run: Run) -> int:
    return int(run.store.targets[run.plan.documents].sum())
