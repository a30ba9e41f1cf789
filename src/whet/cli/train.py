"""`whet train`"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from whet.cli.common import Json, Overrides, Quiet, Recipe, verb


@verb
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in its folder after a stop.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """Fine-tune a model as a recipe says.

    Several processes: `torchrun --nproc-per-node 2 -m whet train CONFIG`; the losses are the same.
    """
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
