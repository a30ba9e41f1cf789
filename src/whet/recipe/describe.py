"""plan.json: what was decided before the first step, for people and for other programs."""

from __future__ import annotations

from typing import Any

from whet.data.plan import efficiency
from whet.model import attention
from whet.model.fp8 import in_fp8
from whet.model.peaks import device_name, device_peak
from whet.model.quantize import numbers_in
from whet.parallel.compile import compiles
from whet.parallel.replay import records
from whet.recipe.loop import Assembled


def describe_plan(run: Assembled) -> dict[str, Any]:
    """The run in numbers and names."""
    config, plan, device = run.config, run.plan, run.ranks.device
    parameters = list(run.model.parameters())
    return {
        "steps": len(plan),
        "rows": len(plan.rows) - 1,
        "conversations": len(plan.documents),
        "conversations_per_epoch": plan.sizes.per_epoch,
        "epochs": len(plan.documents) / plan.sizes.per_epoch,
        "tokens": plan.sizes.tokens,
        "supervised_tokens": int(run.data.train.store.targets[plan.documents].sum()),
        "efficiency": efficiency(plan, config.row_length),
        "row_length": config.row_length,
        "micro_rows": config.train.micro_rows,
        "world": run.ranks.world,
        "batch": config.train.batch.model_dump(exclude_none=True),
        "packing": config.data.packing,
        "parameters": sum(map(numbers_in, parameters)),
        "trainable_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "device": device.type,
        "device_name": device_name(device),
        "peak_flops": device_peak(device, run.arithmetic.name),
        "precision": run.arithmetic.name,
        "quantize": config.quantize,
        "eight_bit_layers": in_fp8(run.root),
        "attention": attention.serving(run.root.language_model),
        "compiled": compiles(config.model.compile, device, run.arithmetic.compute),
        "recorded": records(run.root),
        **config.parallel.model_dump(),
    }
