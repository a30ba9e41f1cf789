"""Shared by all commands: common options, --json output, error messages and exit codes."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec

import typer

from whet.core import launch_env
from whet.core.display import escape_controls, mask_secrets
from whet.core.errors import CancelledError, ExitCode, RunFailedError, WhetError, os_error

P = ParamSpec("P")

JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print errors only; combine with --json for the result.")
]
FreshOption = Annotated[bool, typer.Option("--fresh", help="Move an earlier run in this folder aside: RUN.1, RUN.2, …")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
_RECIPE = typer.Argument(metavar="CONFIG", help="A recipe: a YAML file such as recipes/tiny.yaml.", show_default=False)
RecipeArgument = Annotated[Path, _RECIPE]
OptionalRecipeArgument = Annotated[Path | None, _RECIPE]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue the run in its folder.")]
UntilOption = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="STEP", help="Stop after this step; the learning-rate schedule is still that of the whole run."
    ),
]
LoadOption = Annotated[
    Literal["auto", "4bit", "spread"],
    typer.Option("--load", help="For large models: 4-bit weights, or spread over all GPUs."),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Override settings, such as train.steps=100.", show_default=False),
]


@contextlib.contextmanager
def import_without_gc() -> Iterator[None]:
    """Turn off garbage collection while importing, and freeze what was imported.

    Imports create no garbage. This saves a sixth of the import time of torch and transformers, and a quarter of a
    second in every later collection.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def cli_command(function: Callable[P, dict[str, Any] | None]) -> Callable[P, None]:
    """Turn a function that returns its result into a command: handles --json, --quiet, errors and the exit code."""

    @functools.wraps(function)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        from whet.core import console

        as_json = bool(kwargs.get("as_json"))
        if kwargs.get("quiet"):
            console.set_quiet()
        console.show_start()
        try:
            launch_env.require_possible_rank()
            result = function(*args, **kwargs)
            if as_json and result is not None and launch_env.rank() == 0:
                console.print_json(result)
        except KeyboardInterrupt:
            _fail(CancelledError("interrupted"), as_json)
        except WhetError as error:
            _fail(error, as_json)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            known = os_error(error, "working", ".") if isinstance(error, OSError) else None
            if known is None:
                console.print_traceback()
            _fail(
                known or RunFailedError(f"{type(error).__name__}: {error}. This is a bug in whet: please report it"),
                as_json,
            )
        else:
            if result is not None and result.get("exit_code"):
                raise typer.Exit(result["exit_code"])
        finally:
            console.end_start()
            console.close_log()

    return command


def require_existing(*references: str) -> None:
    """Refuse a mistyped run or model folder at once: importing torch takes seconds."""
    from whet.core.files import user_path
    from whet.core.run_folder import parse_run_reference
    from whet.model.load.weight_files import require_no_typo

    for reference in references:
        if not user_path(reference).exists():
            require_no_typo(str(parse_run_reference(reference)[0]))


def confirm(question: str, yes: bool) -> None:
    """Ask on the terminal; a script has to say --yes."""
    from whet.core.console import end_start

    if yes:
        return
    if not sys.stdin.isatty():
        raise WhetError(f"{question} There is no terminal to answer at: add --yes")
    end_start()
    if not typer.confirm(escape_controls(question), err=True):
        raise WhetError("nothing was done")


def _fail(error: WhetError, as_json: bool) -> None:
    from whet.core import console
    from whet.core.heartbeat import write_torchelastic_error

    rank, message = launch_env.rank(), mask_secrets(str(error))
    write_torchelastic_error(message, error.exit_code)
    label = "" if error.exit_code in (ExitCode.STOPPED, ExitCode.INTERRUPTED) else "error: "
    console.print_error(f"{label}{message}" if rank == 0 else f"rank {rank}: {label}{message}")
    if as_json and (rank == 0 or rank >= launch_env.world_size()):
        console.print_json({"error": message, "exit_code": error.exit_code})
    sys.stdout.flush()
    raise typer.Exit(error.exit_code) from None
