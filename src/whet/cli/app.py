"""The `whet` command. Verbs import heavy libraries when they run, so that `--help` is instant."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
import typer.main

from whet import __version__
from whet.cli import (
    bench,
    chat,
    config,
    dash,
    demo,
    evaluate,
    export,
    import_,
    launch,
    merge,
    models,
    report,
    runs,
    search,
    serve,
    train,
)
from whet.cli.preflight import check, doctor, fit, init, inspect, prepare
from whet.compat.typer_private import hide_obvious_types
from whet.core.display import escape_controls, filter_library_output, mask_secrets
from whet.core.errors import ExitCode
from whet.core.launch_env import started_by_torchrun
from whet.core.signals import exit_process, keep_exit_undisturbed, terminate_with_parent

hide_obvious_types()
app = typer.Typer(
    name="whet",
    help="Fine-tune language models on conversations, and prove that what was trained is what you meant.\n\n"
    "New here? `whet demo` fine-tunes a small real model on this machine in a few minutes.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"whet {__version__}")
        raise typer.Exit


@app.callback()
def whet(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Fine-tune language models on conversations."""


for name, function in (
    ("demo", demo.demo),
    ("init", init.init),
    ("prepare", prepare.prepare),
    ("inspect", inspect.inspect),
    ("check", check.check),
    ("fit", fit.fit),
    ("train", train.train),
    ("launch", launch.launch),
    ("search", search.search),
    ("eval", evaluate.evaluate),
    ("chat", chat.chat),
    ("serve", serve.serve),
    ("export", export.export),
    ("merge", merge.merge),
    ("report", report.report),
    ("dash", dash.dash),
    ("bench", bench.bench),
    ("config", config.config),
    ("doctor", doctor.doctor),
):
    app.command(name, cls=launch.LaunchCommand if name == "launch" else None)(function)
app.add_typer(runs.app)
app.add_typer(import_.app)
app.add_typer(models.app)


def main() -> None:
    """The entry point of the `whet` command."""
    if started_by_torchrun():
        terminate_with_parent()
    keep_exit_undisturbed()
    try:
        _run_app()
    except SystemExit as ended:
        exit_process(ended.code if isinstance(ended.code, int) else int(ended.code is not None))


def _run_app() -> None:
    """Parse and run. With --json, a usage error is one JSON object on stdout, too."""
    filter_library_output()
    try:
        code = typer.main.get_command(app)(standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):  # usage errors are typer's own or of the installed click
            raise
        from whet.core import console

        message = mask_secrets(error.format_message())
        if "--json" not in sys.argv[1:]:
            from typer.rich_utils import rich_format_error

            error.format_message = lambda: escape_controls(message)
            rich_format_error(error)  # type: ignore[arg-type]
        else:
            console.print_error(f"error: {message}")
            console.print_json({"error": message, "exit_code": ExitCode.USAGE})
        sys.exit(ExitCode.USAGE)
    sys.exit(code if isinstance(code, int) else 0)
