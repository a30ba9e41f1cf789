"""`whet launch`"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from whet.cli.common import (
    FreshOption,
    JsonOption,
    OptionalRecipeArgument,
    OverridesArgument,
    QuietOption,
    ResumeOption,
    UntilOption,
    cli_command,
)
from whet.core.errors import UsageError

if TYPE_CHECKING:
    from whet.config import Config


class LaunchTarget(StrEnum):
    """Where the processes run."""

    LOCAL = "local"
    SLURM = "slurm"
    KUBERNETES = "kubernetes"


_AFTER_DASHES = "whet.launch.words"


class LaunchCommand(TyperCommand):
    """Keeps what follows `--` apart: a verb or a program, whose options are not those of launch."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_AFTER_DASHES] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- VERB|PROGRAM ...]"]


@cli_command
def launch(
    ctx: typer.Context,
    recipe: OptionalRecipeArgument = None,
    overrides: OverridesArgument = None,
    fresh: FreshOption = False,
    on: Annotated[
        LaunchTarget | None, typer.Option(help="Where to run: here (local), as a Slurm job, or on Kubernetes.")
    ] = None,
    resume: ResumeOption = False,
    until: UntilOption = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the command, the Slurm script or the Kubernetes objects, and run nothing."
        ),
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Slurm: wait until the run ends, and exit with its code.")
    ] = False,
    chain: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Slurm: submit N jobs; each continues where the previous one ended."),
    ] = 1,
    then: Annotated[
        str | None, typer.Option(metavar="VERB", help="Slurm: a job after the run, such as 'eval {run}'.")
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", help="Slurm: run the verb in this terminal (srun --pty).")
    ] = False,
    notebook: Annotated[
        bool, typer.Option("--notebook", help="Slurm: start Jupyter on a node, and print how to reach it.")
    ] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Train on all devices of this machine, or of several machines, with restarts after a crash.

    A run that crashes continues from its newest checkpoint, up to launch.max_restarts times. For several machines
    (launch.nodes, launch.rendezvous), start the same command on each. Ctrl-C, SIGTERM, SIGUSR1, SIGHUP save and stop.

    With --on slurm, whet submits a job for launch.nodes nodes with the settings under launch.slurm.
    With --on kubernetes --dry-run, it prints objects for `kubectl apply -f -`; it never submits them itself.

    After `--`, give a verb of whet to run as a Slurm job (`--on slurm -- eval runs/my`), or a program of your own to
    launch and restart like a run, here or on Slurm (`-- python my_trainer.py`).
    """
    from whet.cli.launch_verb import LaunchOptions, launch_notebook, launch_verb_or_program
    from whet.config import read_config
    from whet.core.console import info, print_error, print_result
    from whet.core.errors import ExitCode
    from whet.core.run_folder import move_run_aside
    from whet.launch.local import format_command, make_launch_job, train_command
    from whet.launch.supervise import supervise
    from whet.run.resume import refuse_used_folder, require_same_settings
    from whet.run.step_rows import require_rows

    words: list[str] | None = ctx.meta.get(_AFTER_DASHES)
    on_slurm = on is LaunchTarget.SLURM
    if on is LaunchTarget.KUBERNETES and (words or interactive or notebook or wait or until or chain > 1 or then):
        raise UsageError("--on kubernetes takes only a recipe: whet launch CONFIG --on kubernetes --dry-run")
    if interactive or notebook:
        if on is LaunchTarget.LOCAL:
            raise UsageError("--interactive and --notebook are for Slurm: remove --on local")
        if interactive and (notebook or words is None):
            raise UsageError("--interactive takes a verb or a program: whet launch --interactive -- chat runs/my")
        if notebook and words is not None:
            raise UsageError("--notebook starts Jupyter, not a verb: remove what follows --")
        on_slurm = True
    if words is not None or notebook:
        if fresh or resume or until or chain > 1 or then:
            raise UsageError("--fresh, --resume, --until, --chain and --then are for runs: whet launch CONFIG")
        before = [*([] if recipe is None else [str(recipe)]), *(overrides or [])]
        options = LaunchOptions(before, on_slurm, interactive, dry_run, wait, as_json)
        return launch_notebook(options) if words is None else launch_verb_or_program(ctx.find_root(), words, options)
    if recipe is None:
        raise UsageError("CONFIG is missing: give a recipe, or a verb or a program after --")
    if fresh and resume:
        raise UsageError("--fresh starts anew and --resume continues: give one of them")
    config = read_config(recipe, overrides or [])
    if fresh and not dry_run:
        move_run_aside(config.folder)
    is_new = not (resume and (config.folder / "config.yaml").exists())
    if on_slurm:
        if is_new:
            require_rows(config, config.launch.node_range()[1], config.launch.gpus or config.launch.processes)
        else:
            require_same_settings(config.folder, config)
        return _launch_on_slurm(config, chain, then, resume, until, dry_run, wait, as_json)
    if on is LaunchTarget.KUBERNETES:
        return _render_for_kubernetes(config, is_new, dry_run, as_json)
    if wait or chain > 1 or then:
        raise UsageError("--wait, --chain and --then are for Slurm: add --on slurm")
    command = train_command(recipe, overrides or (), quiet, until)
    job = make_launch_job(command, config.folder, config.run.name or "", config.launch, resume, config.run.notify)
    if is_new:
        require_rows(config, job.nodes, job.processes)
    if dry_run:
        line = format_command(job, resume)
        if not as_json:
            print_result(line)
        return {"command": line, "processes": job.nodes * job.processes}
    if not resume and job.nodes == 1:  # on several machines, another has perhaps begun this run
        refuse_used_folder(config.folder)
    outcome = supervise(job)
    if outcome.exit_code in (ExitCode.STOPPED, ExitCode.INTERRUPTED):
        info(outcome.reason)
    elif outcome.exit_code == ExitCode.FAILED:  # the run itself has reported errors of its input
        print_error(f"error: {outcome.reason}")
    return {"run": str(config.folder), **outcome.as_dict()}


def _render_for_kubernetes(config: Config, is_new: bool, dry_run: bool, as_json: bool) -> dict[str, Any]:
    from whet.core.console import print_result
    from whet.launch.kubernetes import dump_objects, render_objects
    from whet.run.step_rows import require_rows

    objects = render_objects(config)
    if is_new:
        require_rows(config, config.launch.node_range()[1], config.launch.gpus or config.launch.processes)
    if not dry_run:
        raise UsageError(
            "--on kubernetes: whet submits nothing to Kubernetes. Print the objects and apply them yourself: whet "
            "launch CONFIG --on kubernetes --dry-run | kubectl apply -f -"
        )
    if not as_json:
        print_result(dump_objects(objects), end="")
    return {"objects": objects}


def _launch_on_slurm(
    config: Config, chain: int, then: str | None, resume: bool, until: int | None, dry_run: bool, wait: bool,
    as_json: bool,
) -> dict[str, Any]:  # fmt: skip
    from whet.core.console import info, print_result
    from whet.launch.slurm import follow_run, render_job, submit_run

    if dry_run:
        script = render_job(config, until)
        if not as_json:
            print_result(script.rstrip("\n"))
        return {"script": script}
    submitted = submit_run(config, chain, then, resume, until)
    jobs = [*submitted.jobs, *([submitted.then] if submitted.then else [])]
    info(f"job {', '.join(map(str, jobs))}: {submitted.script}; output in {submitted.script.parent}")
    info(f"to stop it: whet runs stop {config.folder} (saves first), or whet runs cancel {config.folder}")
    result = {
        "run": str(config.folder),
        "job": submitted.jobs[0],
        "jobs": list(submitted.jobs),
        "then": submitted.then,
        "script": str(submitted.script),
    }
    if wait:
        code, reason = follow_run(config.folder, submitted.jobs)
        info(reason)
        result |= {"exit_code": code, "reason": reason}
    return result
