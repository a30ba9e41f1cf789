"""`whet search`"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whet.cli.common import JsonOption, OverridesArgument, QuietOption, RecipeArgument, cli_command
from whet.core import launch_env
from whet.core.errors import StoppedError, UsageError, WhetError
from whet.core.signals import StopRequested, raise_on_stop_signals

if TYPE_CHECKING:
    from whet.search.results import SearchResult
    from whet.search.search import SearchPlan


class SearchTarget(StrEnum):
    """Where trials run."""

    LOCAL = "local"
    SLURM = "slurm"


@cli_command
def search(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    preview: Annotated[
        bool, typer.Option("--preview", help="Print the number of trials and tokens at each rung, and run nothing.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the search in its folder.")] = False,
    on: Annotated[
        SearchTarget, typer.Option(help="Where trials run: on this machine (local), or as Slurm jobs.")
    ] = SearchTarget.LOCAL,
    lr: Annotated[
        bool,
        typer.Option("--lr", help="Propose a learning rate from short probes; uses fewer tokens than one run."),
    ] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Find good values for settings: write ranges in place of values, such as lr: {search: log, low: 1e-6, high: 1e-4}.

    Every trial is an ordinary run in the search's folder; those that fall behind stop early. At the end, best.yaml
    there is the recipe of the best trial. Ctrl-C saves checkpoints and stops; --resume continues. With a section
    `script` instead of a recipe, each trial runs your own script with WhetCallback (docs/search.md).

    With --lr, no range is needed: whet trains briefly with several learning rates from one checkpoint, compares them on
    the same conversations, and proposes one, unless the difference is too small to tell. It also runs under torchrun.
    """
    if lr and preview:
        raise UsageError("--lr prints how long its probes are before it trains them: remove --preview")
    if lr and on is SearchTarget.SLURM:
        raise UsageError(
            "--lr has no trials for --on. Run it as a job of its own: whet launch --on slurm -- search CONFIG --lr"
        )
    if launch_env.world_size() > 1 and not lr:
        raise UsageError("whet search starts the processes of its trials by itself: start it once, without torchrun")
    try:
        with raise_on_stop_signals():
            if lr:
                return _propose_learning_rate(recipe, overrides or [])
            try:
                import optuna  # noqa: F401
            except ImportError:
                raise WhetError(
                    "whet search needs optuna, which is not installed: pip install 'whet[search]'"
                ) from None
            from whet.search.search import plan_search
            from whet.search.search import preview as preview_search

            plan = plan_search(recipe, overrides or [])
            planned = preview_search(plan)
            _print_preview(planned, plan, with_rungs=preview, to_stdout=preview and not as_json)
            return planned if preview else _run(plan, resume, on is SearchTarget.SLURM, as_json)
    except StopRequested:
        raise StoppedError("stopped on request. Continue the search with --resume") from None


def _propose_learning_rate(recipe: Path, overrides: list[str]) -> dict[str, Any]:
    from whet.search.learning_rate_probes import read_probe_recipe, search_learning_rate

    return search_learning_rate(*read_probe_recipe(recipe, overrides))


def _run(plan: SearchPlan, resume: bool, on_slurm: bool, as_json: bool) -> dict[str, Any]:
    import contextlib

    from whet.core.console import info, warn
    from whet.search.results import collect_results, write_page, write_results
    from whet.search.search import make_place, open_search_folder, run_search

    with open_search_folder(plan, resume):
        with contextlib.closing(make_place(plan, on_slurm)) as place:
            study = run_search(plan, place, resume)
        result = collect_results(study, plan)
        found = write_results(result, plan)
        page = write_page(result, plan)
    _print_result(result, plan, to_stdout=not as_json)
    if result.is_tied:
        warn(
            f"{plan.metric} is {result.best.value:.4g} in every trial, so the first one is called the best. Train "
            "longer, or choose another search.metric"
        )
    info(f"the best run: {found['best']['run']} · picture: {page}\nwith its values:\n  {found['best']['command']}")
    return found


def _print_preview(planned: dict[str, Any], plan: SearchPlan, with_rungs: bool, to_stdout: bool) -> None:
    from whet.core.console import info, print_result
    from whet.report.formatting import format_count, format_table

    unit, has_tokens = planned["unit"], planned["tokens"] is not None
    rows = [
        [
            str(number), str(index + 1), format_count(rung[unit]), _format_trials(rung["trials"]),
            *([format_count(rung["tokens"])] if has_tokens else []),
        ]
        for number, bracket in enumerate(planned["brackets"])
        for index, rung in enumerate(bracket["rungs"])
    ]  # fmt: skip
    ranges = len(plan.space.parameters)
    tokens = f"{format_count(planned['tokens'])} tokens, " if has_tokens else ""
    lines = [
        f"{planned['method']}: {planned['trials']} trials of {ranges} parameter{'s' * (ranges != 1)}, by "
        f"{plan.metric}; about {tokens}{planned['share']:.0%} of the cost of as many full-length trials",
    ]
    if with_rungs:
        lines += format_table(["bracket", "rung", unit, "trials", *(["tokens"] if has_tokens else [])], rows)
    for line in lines:
        (print_result if to_stdout else info)(line)


def _format_trials(expected: float) -> str:
    """How many trials come to a rung depends on their values."""
    return f"{expected:g}" if expected == int(expected) else f"about {expected:.0f}"


def _print_result(result: SearchResult, plan: SearchPlan, to_stdout: bool) -> None:
    from whet.core.console import info, print_result
    from whet.report.formatting import format_table
    from whet.search.results import short_names, table_cells

    head, rows = table_cells(result, plan)
    names = short_names([parameter.name for parameter in plan.space.parameters])
    shares = [f"{names.get(name, name)} {share:.0%}" for name, share in result.importance.items()]
    more = len(rows) - 20
    lines = [
        *format_table(head, rows[:20]), *([f"… and {more} more in {plan.folder / 'search.json'}"] if more > 0 else []),
        *([f"importance: {', '.join(shares)}"] if shares else []),
    ]  # fmt: skip
    for line in lines:
        (print_result if to_stdout else info)(line)
