"""`whet fit`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whet.cli.common import JsonOption, OverridesArgument, QuietOption, RecipeArgument, cli_command
from whet.core import launch_env
from whet.core.errors import UsageError

if TYPE_CHECKING:
    from whet.fit.best_settings import FitResult


@cli_command
def fit(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    metric: Annotated[
        str, typer.Option(metavar="throughput|memory", help="What to optimize: tokens per second, or peak memory.")
    ] = "throughput",
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="NODESxDEVICESxCARD",
            help="Estimate for other hardware, without a GPU: 1x8xH200, 24x8xMI250X (a device is a GCD).",
        ),
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Find the fastest settings that fit into this GPU's memory.

    Measures steps of the real model on the worst batch of the data, with larger and larger micro-batches; if they stay
    small, with recomputation and offload too. The choice does not change results. `whet train CONFIG` uses it while
    train.micro_rows is auto. With --plan nothing is measured: memory, sharding and time follow from the model's shapes.
    """
    if metric not in ("throughput", "memory"):
        raise UsageError(f"--metric {metric}: give throughput or memory")
    if plan is not None:
        return _fit_on_paper(recipe, overrides, plan)
    from whet.config import read_config
    from whet.fit.best_settings import fit as fit_run
    from whet.run.models.model_reference import resolve_model_reference

    result = fit_run(resolve_model_reference(read_config(recipe, overrides or [])), metric)  # type: ignore[arg-type]
    if launch_env.rank() == 0:
        _print(result)
    return result.as_json()


def _fit_on_paper(recipe: Path, overrides: list[str] | None, plan: str) -> dict[str, Any]:
    from whet.config import read_config
    from whet.core.errors import ExitCode
    from whet.fit.hardware import parse_hardware
    from whet.fit.paper import estimate_on_paper, read_data_facts
    from whet.fit.paper_text import as_json, print_estimate
    from whet.run.data import make_plan, prepare_data
    from whet.run.models.model_reference import resolve_model_reference

    hardware = parse_hardware(plan)  # before the data is prepared
    config = resolve_model_reference(read_config(recipe, overrides or []))
    data = prepare_data(config)
    estimate = estimate_on_paper(config, hardware, read_data_facts(data, make_plan(config, data)))
    print_estimate(config, estimate)
    return {**as_json(config, estimate), "exit_code": ExitCode.DONE if estimate.best else ExitCode.INPUT}


def _print(result: FitResult) -> None:
    """The parts of the best choice's memory, predicted and measured, the choice itself, and proposals."""
    from rich.table import Table

    from whet.core.console import info, info_item

    table = Table(box=None, pad_edge=False)
    table.add_column("GiB")
    for title in ("predicted", "measured"):
        table.add_column(title, justify="right")
    predicted = {} if result.predicted is None else result.predicted.gib()
    for part, measured in result.best.memory.gib().items():
        expected = f"{predicted[part]:.2f}" if part in predicted else "–"
        table.add_row(part, expected, f"{measured:.2f}", style="bold" if part == "total" else None)
    info(table)
    best = result.best
    share = best.peak / result.capacity
    info_item(
        "→", str(best.choice),
        f"{best.tokens_per_s:,.0f} tokens/s on {result.world} × {result.device}, {share:.0%} of its memory, "
        f"{result.costs} for the steps of this data. `whet train` uses it while train.micro_rows is auto", "bold",
    )  # fmt: skip
    for proposal in result.proposals:
        info_item("?", "to consider", proposal, "yellow")
