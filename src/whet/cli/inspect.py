"""`whet inspect`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from whet.cli.common import JsonOption, OverridesArgument, QuietOption, cli_command


@cli_command
def inspect(
    what: Annotated[
        Path, typer.Argument(metavar="STORE|CONFIG|RUN|FILE.bin", help="What to look into.", show_default=False)
    ],
    overrides: OverridesArgument = None,
    limit: Annotated[int, typer.Option(min=0, help="How many documents.")] = 3,
    start: Annotated[int, typer.Option(min=0, help="The number of the first one.")] = 0,
    pieces: Annotated[bool, typer.Option("--pieces", help="Each token by itself: id, piece, learned or not.")] = False,
    count: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the tokens of every document to a CSV file.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="STEP", help="Draw the packed rows of this step (of a config or run).")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="PATH", help="For a .bin file: a tokenizer.json, a .model, or their folder.")
    ] = None,
    validation: Annotated[bool, typer.Option("--validation", help="Look into the validation data instead.")] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Look at what the model will see: text, pieces and ids, with what is learned in colour.

    Without colour, what is learned stands between ⟦ and ⟧.
    """
    from whet.preflight import inspect_data as inspection

    target = inspection.open_target(what, overrides or [], tokenizer, validation)
    if batch is not None:
        return inspection.show_batch(target, batch, silent=as_json)
    if count is not None:
        return inspection.write_counts(target, count)
    return inspection.show_documents(target, start, limit, pieces, silent=as_json)
