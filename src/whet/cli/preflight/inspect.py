"""`whet inspect`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from whet.cli.common import JsonOption, OverridesArgument, QuietOption, cli_command


@cli_command
def inspect(
    what: Annotated[
        Path,
        typer.Argument(
            metavar="STORE|CONFIG|RUN|FILE.bin",
            help="A store, a recipe, a run folder or a token file.",
            show_default=False,
        ),
    ],
    overrides: OverridesArgument = None,
    limit: Annotated[int, typer.Option(min=0, help="How many documents to show.")] = 3,
    start: Annotated[int, typer.Option(min=0, help="The first document, counted from 0.")] = 0,
    pieces: Annotated[bool, typer.Option("--pieces", help="One line per token: id, piece, supervised or not.")] = False,
    count: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the number of tokens of every document to a CSV file.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="STEP", help="Draw the packed rows of this step (CONFIG or RUN).")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="STEP",
            help="The conversations of a finished step of RUN, with each token's loss at that step.",
        ),
    ] = None,
    losses: Annotated[
        bool, typer.Option("--losses", help="What RUN never learned or forgot, and what looks mislabelled.")
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="For FILE.bin: a tokenizer.json, a .model file, or their folder."),
    ] = None,
    validation: Annotated[bool, typer.Option("--validation", help="Show the validation data instead.")] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Show what the model is trained on: text, tokens and ids, supervised ones in colour.

    Without colour, supervised text stands between ⟦ and ⟧.
    """
    from whet.preflight import inspect_data

    if step is not None:
        return inspect_data.show_step(what, step, limit, pieces, silent=as_json)
    if losses:
        return inspect_data.show_losses(what, limit, silent=as_json)
    target = inspect_data.open_target(what, overrides or [], tokenizer, validation)
    with target.check():
        if batch is not None:
            return inspect_data.show_batch(target, batch, silent=as_json)
        if count is not None:
            return inspect_data.write_counts(target, count)
        return inspect_data.show_documents(target, start, limit, pieces, silent=as_json)
