"""Does packing change the recipe?"""

from __future__ import annotations

from collections.abc import Iterator

from whet.config import Config
from whet.recipe.data import Data
from whet.recipe.finding import Finding
from whet.recipe.plan import make_plan

_FEW_STEPS = 50


def check_steps(config: Config, data: Data) -> Iterator[Finding]:
    """Packing makes steps fewer where a batch is counted in rows; a recipe made for unpacked ones then trains less."""
    plan = make_plan(config, data)
    batch = config.train.batch
    if batch.conversations is not None or config.data.packing == "none":
        yield Finding("steps", "ok", f"{len(plan):,} optimizer steps; packing does not change their number")
        return
    rows = batch.rows or (batch.tokens or 0) // config.row_length
    if config.train.steps is not None:
        each = len(plan.documents) / len(plan)
        text = f"{len(plan):,} optimizer steps, as train.steps says; packed, each has about {each:.0f} conversations"
        yield Finding("steps", "ok", f"{text} in {rows} rows")
        return
    unpacked = -(-len(plan.documents) // rows)
    text = f"{len(plan):,} optimizer steps; unpacked, with {rows} conversations a step, it would be {unpacked:,}"
    if len(plan) < _FEW_STEPS and unpacked >= 2 * len(plan):
        remedy = "Count batches in train.batch.conversations, make them smaller, or train longer"
        yield Finding("steps", "warning", f"{text}. Packing makes the steps few. {remedy}")
    else:
        yield Finding("steps", "ok", text)
