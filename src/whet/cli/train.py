"""`whet train`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from whet.cli.common import Json, Overrides, Quiet, verb
from whet.core.errors import StoppedError, UsageError
from whet.core.interrupt import AskedToStop, terminate_like_ctrl_c


@verb
def train(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="A recipe: a YAML file such as recipes/tiny.yaml.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in its folder after a stop.")] = False,
    until: Annotated[
        int | None,
        typer.Option(min=1, metavar="STEP", help="Pause after this step; the schedule stays that of the whole run."),
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Try the whole way in five tiny steps, in a folder of its own.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Train, but keep no checkpoint, export or report; in its own folder.")
    ] = False,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", metavar="FILE", help="Run a faulty step of a run again: RUN/faults/step-NNNNNN.json."),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """Fine-tune a model as a recipe says.

    Several processes: `whet launch CONFIG`, or `torchrun --nproc-per-node 2 -m whet train CONFIG`; the losses are the
    same.
    """
    if replay is not None:
        return _replay(replay, alone=recipe is None and not (resume or smoke or dry_run or until))
    if recipe is None:
        raise UsageError("CONFIG is missing: give a recipe, such as `whet train recipes/tiny.yaml`")
    try:
        with terminate_like_ctrl_c():  # from here on: importing takes seconds, too
            return _train(recipe, overrides or [], resume, until, smoke, dry_run)
    except AskedToStop:
        raise StoppedError("asked to stop. Start it again to continue (whet train: with --resume)") from None


def _train(
    recipe: Path, overrides: list[str], resume: bool, until: int | None, smoke: bool, dry_run: bool
) -> dict[str, Any]:
    from whet.config import read_config
    from whet.core.console import say
    from whet.core.imports import importing
    from whet.core.ranks import who_am_i
    from whet.core.run import read_status
    from whet.model.read_ahead import read_ahead
    from whet.watch.report import write_report
    from whet.watch.run import RunView
    from whet.watch.summary import result
    from whet.watch.table import score_line

    if (resume or until) and (smoke or dry_run):
        raise UsageError("--smoke and --dry-run begin anew each time and go to their end: no --resume, no --until")
    if smoke and dry_run:
        raise UsageError("--smoke, --dry-run: give one of them")
    config = read_config(recipe, overrides)
    read_ahead(config.model.path, config.model.revision)
    with importing():  # after the recipe was read: this takes seconds
        from whet.recipe import trial
        from whet.recipe.start import from_run
        from whet.recipe.train import train as run

    config = from_run(config)
    if smoke:
        config = trial.smoke(config)
    if dry_run:
        config = trial.dry(config)
    first = who_am_i()[0] == 0
    if first and (smoke or dry_run):
        trial.make_way(config.folder)
    finished = resume and read_status(config.folder).get("state") == "finished"
    run(config, resume, until, keeps=not dry_run)
    if not first:
        return {}
    view = RunView.read(config.folder)
    found = result(view) | {"trial": "smoke" if smoke else "dry-run" if dry_run else None}
    say(score_line(view))
    if dry_run:
        say(f"dry run done: nothing was kept but the metrics in {view.folder}")
    elif smoke:
        trial.drop_weights(config.folder)
        found["export"] = None
        say(f"smoke test passed: prepared, trained, measured, saved, exported ({view.folder}, its weights deleted)")
    else:
        page = view.folder / "report.html" if finished else write_report(config.folder)
        say(f"{'done' if view.status.state == 'finished' else 'so far'}: {view.folder} · report {page}")
    return found


def _replay(file: Path, alone: bool) -> dict[str, Any]:
    if not alone:
        raise UsageError("--replay: the file names its run and thereby all settings; leave out everything else")
    from whet.recipe.replay import replay

    return replay(file)
