"""`whet import`"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from whet.cli.common import JsonOption, QuietOption, cli_command

app = typer.Typer(name="import", help="Convert checkpoints of other programs.", no_args_is_help=True)


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
        typer.Option("--tokenizer", metavar="DIR", help="The tokenizer's folder, or a SentencePiece .model file."),
    ] = None,
    average_norms: Annotated[
        bool, typer.Option("--average-norms", help="Average norms that differ between tensor-parallel ranks.")
    ] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Convert a checkpoint to a model folder, load it back and compare it."""
    from whet.convert.converter import import_checkpoint

    return import_checkpoint(kind.value, folder, out, config, tokenizer, average_norms)
