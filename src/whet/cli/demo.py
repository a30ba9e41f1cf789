"""`whet demo`"""

from __future__ import annotations

import importlib.resources
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from whet.cli.common import Json, Quiet, verb


@verb
def demo(
    folder: Annotated[Path, typer.Option("--dir", help="Where the demo's run lives.")] = Path("runs/demo"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget an earlier demo and run again.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """Fine-tune a small real model on this machine, and see that it learned.

    SmolLM2 (135 M parameters) learns to turn orders in plain words into JSON. The base is scored, a LoRA trained,
    the result scored again, exported, and shown before and after. Ctrl-C stops it; the next start continues.
    """
    from whet.config import read_config
    from whet.core.console import say
    from whet.core.imports import importing
    from whet.core.run import RunFolder, read_status
    from whet.watch.curve import loss_curve
    from whet.watch.report import write_report
    from whet.watch.run import RunView
    from whet.watch.summary import result
    from whet.watch.table import before_after

    recipe = Path(str(importlib.resources.files("whet") / "recipes" / "demo.yaml"))
    config = read_config(recipe).at(folder)
    if fresh and (folder / "config.yaml").exists():
        RunFolder(folder).close()  # not while another process works in it
        shutil.rmtree(folder)
    if read_status(folder).get("state") != "finished":
        with importing():
            from whet.recipe.train import train
        train(config, resume=True)
    view = RunView.read(folder)
    page = write_report(folder)
    say(loss_curve(view.losses))
    say(before_after(view))
    outcome = result(view)
    say(
        f"held-out orders answered exactly right: {outcome['before']:.2f} before, {outcome['after']:.2f} after "
        f"{outcome['steps']} steps ({outcome['tokens']:,} tokens, {outcome['train_s']:.0f} s of training)",
        style="bold",
    )
    say(f"talk to it:  whet chat {folder}\nreport:      {page}\nexport:      {outcome['export']}")
    return outcome
