"""`whet merge`"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from whet.cli.common import JsonOption, QuietOption, cli_command


class MergeMethod(StrEnum):
    """How several adapters are combined."""

    CAT = "cat"
    LINEAR = "linear"


@cli_command
def merge(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The model that the adapters were trained on.")],
    adapter: Annotated[
        list[str],
        typer.Option("--adapter", metavar="FOLDER[=WEIGHT]", help="An adapter folder or a run; may be repeated."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Output folder.")],
    how: Annotated[
        MergeMethod,
        typer.Option(
            "--how", help="cat: the sum of the adapters' updates. linear: the weighted average of their matrices."
        ),
    ] = MergeMethod.CAT,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Merge adapters into their base model, load the result back and compare it."""
    from whet.exporting.merge_adapters import merge_adapter_folders

    return merge_adapter_folders(base, adapter, how.value, out)
