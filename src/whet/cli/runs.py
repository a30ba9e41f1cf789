"""`whet runs`"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whet.cli.common import JsonOption, OverridesArgument, QuietOption, YesOption, cli_command, confirm
from whet.core.errors import UsageError, WhetError

if TYPE_CHECKING:
    from whet.runs.summary import RunSummary

app = typer.Typer(name="runs", help="List, compare, follow, stop and resume runs.")

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A name in runs/, its beginning, or a path.", show_default=False)
]
RunsArgument = Annotated[
    list[str], typer.Argument(metavar="RUN…", help="Names in runs/, their beginnings, or paths.", show_default=False)
]
ProjectOption = Annotated[str | None, typer.Option(metavar="NAME", help="Only the runs of a project (run.project).")]


@app.callback(invoke_without_command=True)
@cli_command
def runs(ctx: typer.Context, project: ProjectOption = None, as_json: JsonOption = False) -> dict[str, Any] | None:
    """List, compare, follow, stop and resume runs; without a command, list those in runs/."""
    if ctx.invoked_subcommand is not None:
        return None
    return _list(None, project, as_json)


@app.command("list")
@cli_command
def list_(
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="The folder of the runs; default: runs.", show_default=False)
    ] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """List runs: state, step, loss, best, speed, age, host and job."""
    return _list(folder, project, as_json)


def _list(folder: Path | None, project: str | None, as_json: bool) -> dict[str, Any]:
    from whet.core.console import info, print_result, warn
    from whet.core.files import user_path
    from whet.runs.find import RUNS_FOLDER, find_runs
    from whet.runs.summary import summarize_run_folders
    from whet.runs.text import format_list, list_notes

    root = RUNS_FOLDER if folder is None else user_path(folder)
    if folder is None and not root.is_dir():
        info(
            "there is no folder runs/ here. `whet train CONFIG` creates runs/NAME; `whet runs list FOLDER` lists others"
        )
        return {"runs": []}
    found = summarize_run_folders(find_runs(root), root)
    if project is not None:
        known = sorted({run.facts.project for run in found if run.facts.project})
        found = [run for run in found if run.facts.project == project]
        if not found:
            raise WhetError(f"--project {project}: no run in {root} has it. Known: {', '.join(known) or 'none'}")
    found.sort(key=lambda run: (run.last_sign or 0.0, run.name))
    if not as_json:
        if found:
            print_result("\n".join(format_list(found)))
        else:
            info(f"{root}: no runs in it")
        for note in list_notes(found):
            warn(note)
    return {"runs": [run.as_dict() for run in found]}


@app.command()
@cli_command
def show(run: RunArgument, as_json: JsonOption = False) -> dict[str, Any]:
    """Show one run: state, progress, where it runs, checkpoints, damaged files, loss curve."""
    from whet.core.console import print_result, warn
    from whet.report.run_view import RunView
    from whet.runs.text import format_run

    found = _find(run)
    problems, view = list(found.problems), None
    if found.facts.is_readable and (found.folder / "config.yaml").exists():
        try:
            view = RunView.read(found.folder)
            problems += [f"{found.folder}: {damage}" for damage in view.damage if not damage.startswith("status.json")]
        except WhetError as error:
            problems.append(str(error))
    if not as_json:
        print_result("\n".join(format_run(found, view)))
        for problem in problems:
            warn(problem)
    return {**found.as_dict(), "problems": problems, "config": view.config if view is not None else None}


@app.command()
@cli_command
def compare(runs: RunsArgument, as_json: JsonOption = False) -> dict[str, Any]:
    """Compare runs with the first one: settings, final metrics, curves, and validation losses by conversation.

    RUN@STEP and RUN@best compare an earlier evaluation. The p-value is that of a paired permutation test
    over the validation conversations that both runs have.
    """
    from whet.core.console import print_result, warn
    from whet.runs.compare import compare_runs, read_compared
    from whet.runs.text import format_comparison

    if len(runs) < 2:
        raise UsageError("compare needs two runs or more: whet runs compare A B")
    chosen = read_compared(runs)
    result = compare_runs(chosen)
    if not as_json:
        print_result("\n".join(format_comparison(chosen, result)))
        for one in chosen:
            for damage in one.view.damage:
                warn(f"{one.view.folder}: {damage}")
    return result


@app.command()
@cli_command
def logs(
    run: RunArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print the last lines, then new ones until the run ends.")
    ] = False,
    rank: Annotated[int | None, typer.Option(min=0, metavar="N", help="The log of this process of the run.")] = None,
    as_json: JsonOption = False,
) -> dict[str, Any] | None:
    """Print the log of a run: the output of its newest Slurm job, or the log of its first process."""
    from whet.core.console import print_result
    from whet.runs.find import resolve_run
    from whet.runs.logs import find_log, follow_log, read_log
    from whet.runs.summary import summarize_run_folder

    if follow and as_json:
        raise UsageError("--follow prints lines as they come, --json one object at the end: give one of them")
    folder = resolve_run(run)
    if follow:
        for line in follow_log(folder, rank, lambda: summarize_run_folder(folder).state.is_active):
            print_result(line)
        return None
    file = find_log(folder, rank)
    lines = read_log(file)
    if not as_json:
        print_result("\n".join(lines))
    return {"run": str(folder), "file": str(file), "lines": lines}


@app.command()
@cli_command
def stop(runs: RunsArgument, quiet: QuietOption = False, as_json: JsonOption = False) -> dict[str, Any]:
    """Stop runs after a checkpoint, and wait until they have ended. Works from every machine that shares their folder.

    Their queued Slurm jobs are cancelled, too.
    """
    from whet.core.console import info
    from whet.runs.control import stop_run

    return _end_all(runs, lambda run: stop_run(run, info))


@app.command()
@cli_command
def cancel(
    runs: RunsArgument,
    kill: Annotated[bool, typer.Option("--kill", help="With SIGKILL, for a process that does not respond.")] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """End runs now, and cancel all of their Slurm jobs. Their last checkpoint stays valid."""
    from whet.core.console import info
    from whet.runs.control import cancel_run

    return _end_all(runs, lambda run: cancel_run(run, kill, info))


@app.command()
@cli_command
def resume(
    ctx: typer.Context,
    run: RunArgument,
    overrides: OverridesArgument = None,
    yes: YesOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any] | None:
    """Continue a run from its newest checkpoint, as it was started: here, by `whet launch`, or as a Slurm job."""
    from whet.cli.launch import LaunchTarget, launch
    from whet.cli.train import train
    from whet.core.console import info

    found = _find(run)
    folder = found.folder.absolute()
    if found.state.is_active:
        raise WhetError(
            f"{found.folder}: {found.state.name} already. {found.state.note or 'See: whet runs show ' + run}"
        )
    if found.state.name == "unreadable":
        raise WhetError(found.problems[0])
    if found.state.name == "unreachable":
        confirm(
            f"{found.name}: {found.state.note}. Two processes would destroy the run. Is the one on {found.host} gone?",
            yes,
        )
    config = next((file for file in (folder / "config.yaml", folder / "slurm" / "recipe.yaml") if file.exists()), None)
    if config is None:
        raise WhetError(
            f"{found.folder}: an incomplete run: it has no config.yaml. Restore it from a copy, or delete the folder"
        )
    (folder / "stop").unlink(missing_ok=True)  # a request to the process that is gone
    settings = [*(overrides or []), f"run.dir={folder}"]
    if found.was_submitted:
        launch(ctx, config, settings, on=LaunchTarget.SLURM, resume=True, quiet=quiet, as_json=as_json)
    elif (found.owner is not None and found.owner.supervisor is not None) or (folder / "launch.jsonl").exists():
        launch(ctx, config, settings, resume=True, quiet=quiet, as_json=as_json)
    else:
        info(shlex.join(["whet", "train", str(config), f"run.dir={folder}", "--resume"]))
        train(config, settings, resume=True, quiet=quiet, as_json=as_json)
    return None


@app.command()
@cli_command
def rename(
    run: RunArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new name of its folder.", show_default=False)],
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Give a run another name: its folder, run.name and run.dir."""
    from whet.core.console import info
    from whet.runs.control import rename_run

    found = _find(run)
    _require_unregistered(found, "renamed")
    target = rename_run(found, name)
    info(f"{found.folder} is now {target}")
    return {"run": str(target), "was": str(found.folder)}


@app.command()
@cli_command
def delete(runs: RunsArgument, yes: YesOption = False, as_json: JsonOption = False) -> dict[str, Any]:
    """Delete runs with their checkpoints and exports, after a confirmation. Queued and running runs are refused."""
    from whet.core.console import info
    from whet.runs.control import delete_run, folder_size, require_idle

    chosen = [_find(run) for run in runs]
    for found in chosen:
        require_idle(found, "deleting")
        _require_unregistered(found, "deleted")
    for found in chosen:
        size = folder_size(found.folder)
        exports = sorted(each.name for each in found.folder.glob("exports/*") if each.is_dir())
        held = f" with the exports {', '.join(exports)}" if exports else ""
        confirm(
            f"delete {found.folder} ({found.state.name}, step {found.step or 0}, {size / 2**20:,.1f} MiB){held}?", yes
        )
        delete_run(found)
        info(f"{found.folder} is deleted")
    return {"deleted": [str(found.folder) for found in chosen]}


def _require_unregistered(run: RunSummary, done: str) -> None:
    """The registry of models refers to exports where they are."""
    from whet.registry.references import versions_inside

    if registered := versions_inside(run.folder):
        raise WhetError(
            f"{run.folder}: {', '.join(registered)} would be gone if this run were {done}. Remove "
            f"{'it' if len(registered) == 1 else 'them'} from the registry first (whet models remove NAME@VERSION); to "
            f"keep the model, export it to a folder of its own (whet export {run.folder} --out FOLDER) and add that"
        )


def _find(reference: str) -> RunSummary:
    from whet.runs.find import resolve_run
    from whet.runs.summary import summarize_run_folder

    return summarize_run_folder(resolve_run(reference))


def _end_all(references: Sequence[str], end: Callable[[RunSummary], RunSummary]) -> dict[str, Any]:
    """End each of the runs; one that cannot be ended does not keep the others running."""
    from whet.core.console import info

    ended, problems = [], []
    for run in [_find(reference) for reference in references]:
        try:
            ended.append(end(run))
            info(f"{run.name}: {ended[-1].state.note or ended[-1].state.name}")
        except WhetError as error:
            problems.append(str(error))
    if problems:
        raise WhetError("\n".join(problems))
    return {"runs": [run.as_dict() for run in ended]}
