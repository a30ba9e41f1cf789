"""`whet train`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from whet.cli.common import Json, Overrides, Quiet, verb
from whet.core.errors import UsageError


@verb
def train(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="A recipe: a YAML file such as recipes/tiny.yaml.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in its folder after a stop.")] = False,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", metavar="FILE", help="Run a faulty step of a run again: RUN/faults/step-NNNNNN.json."),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """Fine-tune a model as a recipe says.

    Several processes: `torchrun --nproc-per-node 2 -m whet train CONFIG`; the losses are the same.
    """
    if replay is not None:
        return _replay(replay, alone=recipe is None and not resume)
    if recipe is None:
        raise UsageError("CONFIG is missing: give a recipe, such as `whet train recipes/tiny.yaml`")
    from whet.config import read_config
    from whet.core.console import say
    from whet.core.ranks import who_am_i
    from whet.core.run import read_status
    from whet.watch.report import write_report
    from whet.watch.run import RunView
    from whet.watch.summary import result
    from whet.watch.table import score_line

    config = read_config(recipe, overrides or [])
    from whet.recipe.train import train as run  # after the recipe was read: this takes seconds

    finished = resume and read_status(config.folder).get("state") == "finished"
    run(config, resume)
    if who_am_i()[0] > 0:
        return {}
    view = RunView.read(config.folder)
    page = view.folder / "report.html" if finished else write_report(config.folder)
    say(score_line(view))
    say(f"done: {view.folder} · report {page}")
    return result(view)


def _replay(file: Path, alone: bool) -> dict[str, Any]:
    if not alone:
        raise UsageError("--replay: the file names its run and thereby all settings; leave out CONFIG and --resume")
    from whet.recipe.replay import replay

    return replay(file)
