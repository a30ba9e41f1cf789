"""The `whet` command. Verbs import heavy libraries when they run, so that `--help` is instant."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, MutableMapping
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from whet import __version__
from whet.compat.transformers_start import leave_out_packages
from whet.compat.typer_private import hide_obvious_types
from whet.core.display import escape_controls, filter_library_output, mask_secrets
from whet.core.errors import ExitCode
from whet.core.launch_env import started_by_torchrun
from whet.core.signals import exit_process, keep_exit_undisturbed, terminate_with_parent

VERBS = {
    "demo": "Fine-tune a small real model on this machine and compare it before and after.",
    "init": "Write a recipe for your data: format, lengths, batches, LoRA or not, each with the reason.",
    "prepare": "Turn raw data into tokens with loss masks, and account for every conversation.",
    "inspect": "Show what the model is trained on: text, tokens and ids, supervised ones in colour.",
    "check": "Check data, chat template, masks and model before you train, or verify a run that has trained.",
    "fit": "Find the fastest settings that fit into this GPU's memory.",
    "train": "Fine-tune a model with the settings of a recipe.",
    "launch": "Train on all devices of this machine, or of several machines, with restarts after a crash.",
    "search": "Find good values for settings: write ranges in place of values, such as lr: {search: log, low: 1e-6, "
    "high: 1e-4}.",
    "eval": "Evaluate a run or a model: loss, perplexity, bits per byte, token accuracy, tasks with confidence "
    "intervals.",
    "chat": "Chat with a model in the terminal.",
    "serve": "Serve a model to colleagues: an OpenAI-compatible API and a chat page.",
    "export": "Export a run's model for other tools, load the export back and compare it with the trained model.",
    "merge": "Merge adapters into their base model, load the result back and compare it.",
    "report": "Write a one-page offline report: curves, scores, answers before and after, the ledger, costs.",
    "dash": "Show runs in a browser while they train: curves, conversations behind every point, comparisons, chat.",
    "bench": "Measure training speed and memory on this machine, of whet and other tools.",
    "config": "List every setting with its type, default and meaning.",
    "doctor": "Show this machine's hardware and libraries, the back-ends whet will use, and how to install what is "
    "missing.",
    "runs": "List, compare, follow, stop and resume runs.",
    "import": "Import checkpoints and configurations of other programs.",
    "models": "Keep models by name, version and alias.",
}
"""The first sentence of each verb's docstring. With it, `whet --help` imports no verb, which takes 0.07 s."""
_MODULES = {"eval": "evaluate", "import": "import_"} | {
    name: f"preflight.{name}" for name in ("check", "doctor", "fit", "init", "inspect", "prepare")
}
"""Where a verb's file has another name, or is in a folder."""


class _Verbs(MutableMapping[str, Any]):
    """The commands by name; a verb is imported when it is looked up."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            if name not in VERBS:
                raise KeyError(name)
            self._built[name] = _build_verb(name)
        return self._built[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._built[name] = command

    def __delitem__(self, name: str) -> None:
        del self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


def _build_verb(name: str) -> Any:
    path = _MODULES.get(name, name)
    module = importlib.import_module(f"whet.cli.{path}")
    alone = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False, add_completion=False)
    alone.callback()(whet)  # makes it a group, of this one verb
    if hasattr(module, "app"):
        alone.add_typer(module.app)
    else:
        alone.command(name, cls=getattr(module, "LaunchCommand", None))(getattr(module, path.rpartition(".")[2]))
    return typer.main.get_command(alone).commands[name]  # type: ignore[attr-defined]


class _Whet(TyperGroup):
    """The root command: its help shows the first sentences of `VERBS`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Verbs()
        self._summarizes = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if self._summarizes:
            return TyperCommand(cmd_name, help=VERBS[cmd_name])
        return super().get_command(ctx, cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._summarizes = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._summarizes = False


hide_obvious_types()
app = typer.Typer(
    name="whet",
    cls=_Whet,
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


def main() -> None:
    """The entry point of the `whet` command."""
    _open_standard_streams()
    if started_by_torchrun():
        terminate_with_parent()
    keep_exit_undisturbed()
    leave_out_packages()
    try:
        _run_app()
    except SystemExit as ended:
        exit_process(ended.code if isinstance(ended.code, int) else int(ended.code is not None))


def _open_standard_streams() -> None:
    """Open those that were closed (`2>&-`) on /dev/null: the next file that whet opens would get their number, and what
    a library prints would be written into it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "w" if number else "r", encoding="utf-8")  # noqa: PTH123, SIM115
            setattr(sys, name, stream)
            if stream.fileno() != number:  # an import opened it
                os.dup2(stream.fileno(), number)


def _name_setting(error: Any) -> str:
    """For an unknown option of a command that takes KEY=VALUE: the settings of this name, after a full stop."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if option is None or context is None or all(each.name != "overrides" for each in context.command.params):
        return ""
    from whet.config import Config
    from whet.core.config import list_settings

    name = option.lstrip("-").replace("-", "_")
    keys = [each.key for each in list_settings(Config) if each.key.endswith(f".{name}") and "[]" not in each.key]
    examples = " or ".join(f"{key}=…" for key in keys[:3]) or "such as train.steps=100"
    return f". Settings are given as KEY=VALUE: {examples}{'' if keys else '; `whet config` lists them'}"


def _run_app() -> None:
    """Parse and run. With --json, a usage error is one JSON object on stdout, too."""
    filter_library_output()
    try:
        code = typer.main.get_command(app)(standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):  # usage errors are typer's own or of the installed click
            raise
        from whet.core import console

        said = error.format_message().replace("Value error, ", "")  # which pydantic puts before it
        message = mask_secrets(said + _name_setting(error))
        if "--json" not in sys.argv[1:]:
            from typer.rich_utils import rich_format_error

            error.format_message = lambda: escape_controls(message)
            rich_format_error(error)  # type: ignore[arg-type]
        else:
            console.print_error(f"error: {message}")
            console.print_json({"error": message, "exit_code": ExitCode.USAGE})
        sys.exit(ExitCode.USAGE)
    sys.exit(code if isinstance(code, int) else 0)
