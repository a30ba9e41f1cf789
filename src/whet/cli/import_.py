"""`whet import`"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from whet.cli.common import JsonOption, QuietOption, cli_command

app = typer.Typer(name="import", help="Import checkpoints and configurations of other programs.", no_args_is_help=True)


class ImportKind(StrEnum):
    """The program that wrote the checkpoint."""

    NEOX = "neox"
    NANOCHAT = "nanochat"
    MINDSPEED = "mindspeed"
    DCP = "dcp"


@app.command()
@cli_command
def checkpoint(
    kind: Annotated[
        ImportKind,
        typer.Argument(
            metavar="neox|nanochat|mindspeed|dcp", help="The program that wrote it; dcp: torch.distributed.checkpoint."
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The checkpoint's folder.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="Output folder.")],
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="The YAML of GPT-NeoX, or a config.json of transformers."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="DIR",
            help="The tokenizer's folder, a SentencePiece .model file, or nanochat's tokenizer.pkl.",
        ),
    ] = None,
    average_norms: Annotated[
        bool, typer.Option("--average-norms", help="Average norms that differ between tensor-parallel ranks.")
    ] = False,
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, help="For nanochat: which step in the folder; default: the last."),
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Convert a checkpoint to a model folder, load it back and compare it."""
    from whet.convert.converter import import_checkpoint

    return import_checkpoint(kind.value, folder, out, config, tokenizer, average_norms, step)


@app.command()
@cli_command
def config(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="[KIND] FILE",
            help="The configuration; KIND is determined, deepspeed, neox, nanochat, mindspeed, trl, axolotl or "
            "llamafactory. Without it, whet detects it from the keys.",
            show_default=False,
        ),
    ],
    onto: Annotated[
        Path | None,
        typer.Option("--onto", metavar="RECIPE", help="Merge into this recipe; imported values replace its own."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to write the recipe; default: stdout.")
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Write a recipe from another program's configuration; print what has no equivalent or means something else."""
    from whet.convert.configs.importer import import_config
    from whet.core import console
    from whet.core.errors import UsageError

    if len(source) > 2:
        raise UsageError(f"give a kind and a file, not {len(source)} arguments: whet import config [KIND] FILE")
    *kind, file = source
    result = import_config(kind[0] if kind else None, Path(file), onto, out)
    if out is None and not as_json:
        console.print_result(result["recipe"], end="")
    return result
