"""`whet demo`"""

from __future__ import annotations

import contextlib
import importlib.resources
from pathlib import Path
from typing import Annotated, Any

import typer

from whet.cli.common import FreshOption, JsonOption, QuietOption, cli_command, import_without_gc


@cli_command
def demo(
    folder: Annotated[Path, typer.Option("--dir", help="The run folder of the demo.")] = Path("runs/demo"),
    fresh: FreshOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Fine-tune a small real model on this machine and compare it before and after.

    SmolLM2 (135 M parameters) learns to turn orders in plain words into JSON: the base model is scored, a LoRA adapter
    is trained, and the result is scored again and exported. Ctrl-C stops the demo; the next start continues it.
    """
    from whet.config import read_config
    from whet.core.console import info
    from whet.core.run_folder import move_run_aside, read_status
    from whet.model.load.builtin_models import download_builtin
    from whet.report.run_reports import write_report
    from whet.report.run_view import RunView
    from whet.report.terminal_report import before_after_table, draw_loss_curve, result_json

    recipe = Path(str(importlib.resources.files("whet") / "recipes" / "demo.yaml"))
    config = read_config(recipe).with_folder(folder)
    if fresh:
        move_run_aside(folder)
    if read_status(folder).get("state") != "finished":
        download_builtin(config.model.path)
        with import_without_gc():
            from whet.run.lifecycle import run_training
        config = read_config(recipe, _precision(folder)).with_folder(folder)
        run_training(config, resume=(folder / "config.yaml").exists())
    view = RunView.read(folder)
    page = write_report(folder)
    info(draw_loss_curve(view.losses))
    info(before_after_table(view))
    outcome = result_json(view)
    info(
        f"held-out orders answered exactly right: {outcome['before']:.2f} before, {outcome['after']:.2f} after "
        f"{outcome['steps']} steps ({outcome['tokens']:,} tokens, {outcome['train_s']:.0f} s of training)",
        style="bold",
    )
    info(f"talk to it:  whet chat {folder}\nreport:      {page}\nexport:      {outcome['export']}")
    return outcome


def _precision(folder: Path) -> list[str]:
    """On a CPU that multiplies in bf16: bf16, which takes half the time and learns the same. A demo that was stopped
    keeps its precision."""
    import torch

    from whet.core.errors import WhetError
    from whet.core.resources import multiplies_bf16
    from whet.core.yaml import read_yaml

    with contextlib.suppress(WhetError, KeyError, TypeError):  # there is none, or it is damaged
        recorded = read_yaml(folder / "config.yaml", expand="none").plain()
        return [f"train.precision={recorded['train']['precision']}"]
    return ["train.precision=bf16"] if multiplies_bf16() and not torch.accelerator.is_available() else []
