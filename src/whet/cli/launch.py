"""`whet launch`"""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer

from whet.cli.common import JsonOption, OverridesArgument, QuietOption, RecipeArgument, cli_command


class LaunchTarget(StrEnum):
    """Where the processes run."""

    LOCAL = "local"


@cli_command
def launch(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    on: Annotated[LaunchTarget, typer.Option(help="Where to run: on this machine.")] = LaunchTarget.LOCAL,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in its folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command instead of running it.")] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Train on all devices of this machine, or of several machines, with restarts after a crash.

    A run that crashes continues from its newest checkpoint, up to launch.max_restarts times. For several machines
    (launch.nodes, launch.rendezvous), start the same command on each. Ctrl-C, SIGTERM, SIGUSR1, SIGHUP save and stop.
    """
    from whet.config import read_config
    from whet.core.console import info, print_error, print_result
    from whet.core.errors import ExitCode
    from whet.launch.local import format_command, make_launch_job
    from whet.launch.supervise import supervise

    config = read_config(recipe, overrides or [])
    job = make_launch_job(
        recipe, tuple(overrides or ()), config.folder, config.run.name or "", config.launch, resume, quiet
    )
    if dry_run:
        line = format_command(job, resume)
        if not as_json:
            print_result(line)
        return {"command": line, "processes": job.nodes * job.processes}
    outcome = supervise(job)
    if outcome.exit_code in (ExitCode.STOPPED, ExitCode.INTERRUPTED):
        info(outcome.reason)
    elif outcome.exit_code == ExitCode.FAILED:  # the run itself has reported errors of its input
        print_error(f"error: {outcome.reason}")
    return {
        "run": str(config.folder),
        "exit_code": outcome.exit_code,
        "reason": outcome.reason,
        "restarts": len(outcome.attempts) - 1,
        "attempts": [asdict(attempt) for attempt in outcome.attempts],
    }
