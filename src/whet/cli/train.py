"""`whet train`"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from whet.cli.common import (
    FreshOption,
    JsonOption,
    OverridesArgument,
    QuietOption,
    ResumeOption,
    UntilOption,
    cli_command,
    import_without_gc,
)
from whet.core import launch_env
from whet.core.errors import StoppedError, UsageError
from whet.core.heartbeat import read_neighbour_error
from whet.core.signals import StopRequested, raise_on_stop_signals


@cli_command
def train(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG",
            help="A recipe: a YAML file such as recipes/tiny.yaml. Or a data file, for which whet proposes the "
            "settings.",
            show_default=False,
        ),
    ] = None,
    overrides: OverridesArgument = None,
    fresh: FreshOption = False,
    resume: ResumeOption = False,
    until: UntilOption = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Test the whole pipeline in five tiny steps, in a folder of its own.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Train without checkpoints, export or report, in a folder of its own.")
    ] = False,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", metavar="FILE", help="Run a saved faulty batch again: RUN/faults/step-NNNNNN.json."),
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Fine-tune a model with the settings of a recipe.

    For several processes: `whet launch CONFIG`, or `torchrun --nproc-per-node 2 -m whet train CONFIG`. The loss is the
    same.
    """
    if replay is not None:
        return _replay(replay, alone=recipe is None and not (resume or smoke or dry_run or until))
    if recipe is None:
        raise UsageError("CONFIG is missing: give a recipe, such as `whet train recipes/tiny.yaml`")
    if fresh and resume:
        raise UsageError("--fresh starts anew and --resume continues: give one of them")
    if (resume or until) and (smoke or dry_run):
        raise UsageError("--smoke and --dry-run always run from start to end: remove --resume and --until")
    if smoke and dry_run:
        raise UsageError("--smoke and --dry-run are alternatives: give one of them")
    try:
        with raise_on_stop_signals():  # from here on: imports take seconds, too
            from whet.config import is_data_file, read_config
            from whet.core.run_folder import move_run_aside, read_status
            from whet.model.load.weight_files import prefetch_weights

            if is_data_file(recipe):
                from whet.preflight.recipe_proposal import propose_config

                config = propose_config(recipe, overrides or [])
            else:
                config = read_config(recipe, overrides or [])
            from whet.run import trial
            from whet.run.resume import refuse_used_folder

            is_main = launch_env.rank() == 0
            if is_main and not (resume or fresh or smoke or dry_run):
                refuse_used_folder(config.folder)
            prefetch_weights(config.model.path, config.model.revision)
            with import_without_gc():  # after the recipe is read: a mistake in it is reported at once
                from whet.run.lifecycle import run_training
                from whet.run.models.model_reference import resolve_model_reference

            config = resolve_model_reference(config)
            if smoke:
                config = trial.smoke_config(config)
            if dry_run:
                config = trial.dry_run_config(config)
            if is_main and (smoke or dry_run):
                trial.delete_previous_trial(config.folder)
            if fresh:
                move_run_aside(config.folder)
            was_finished = resume and read_status(config.folder).get("state") == "finished"
            run_training(config, resume=resume, until=until, save=not dry_run)
            return _report(config.folder, smoke, dry_run, was_finished) if is_main else {}
    except StopRequested:
        stopped = StoppedError("stopped on request. To continue: whet runs resume, or whet train with --resume")
        raise read_neighbour_error() or stopped from None


def _report(folder: Path, smoke: bool, dry_run: bool, was_finished: bool) -> dict[str, Any]:
    """Print and return the result; write the report, unless this was a trial."""
    from whet.core.console import info
    from whet.core.costs import counted_costs, predicted_costs
    from whet.report.run_reports import write_report
    from whet.report.run_view import RunView
    from whet.report.terminal_report import result_json, score_line
    from whet.run import trial

    view = RunView.read(folder)
    result = result_json(view) | {"trial": "smoke" if smoke else "dry-run" if dry_run else None}
    info(score_line(view))
    if dry_run:
        info(f"dry run done: only metrics were written, to {view.folder}")
    elif smoke:
        trial.delete_weights(folder)
        result["export"] = None
        info(f"smoke test passed: prepared, trained, evaluated, saved, exported ({view.folder}, its weights deleted)")
    else:
        costs, predicted = counted_costs(folder), predicted_costs(folder)
        result |= {"used": costs and costs.as_dict(), "predicted": predicted and predicted.as_dict()}
        if costs is not None:
            info(
                f"used {costs}"
                + (f"; predicted {predicted}" if predicted is not None and predicted.is_worth_predicting else "")
            )
        page = view.folder / "report.html" if was_finished else write_report(folder)
        is_finished = view.status.state == "finished"
        info(f"{'done' if is_finished else 'so far'}: {view.folder} · report {page}")
        if is_finished:
            quoted = shlex.quote(str(folder))
            info(f"next: whet chat {quoted}, or whet export {quoted} --to gguf")
    return result


def _replay(file: Path, alone: bool) -> dict[str, Any]:
    if not alone:
        raise UsageError("--replay takes all settings from the run that wrote the file: remove the other arguments")
    from whet.run.replay_batch import replay_batch

    return replay_batch(file)
