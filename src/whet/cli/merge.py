"""`whet merge`"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from whet.cli.common import Json, Quiet, verb


class How(StrEnum):
    """How several adapters become one."""

    CAT = "cat"
    LINEAR = "linear"


@verb
def merge(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The model that they were trained on.")],
    adapter: Annotated[
        list[str], typer.Option("--adapter", metavar="FOLDER[=WEIGHT]", help="An adapter, or a run; may be repeated.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    how: Annotated[
        How, typer.Option("--how", help="cat: the sum of what each does. linear: the small matrices are averaged.")
    ] = How.CAT,
    quiet: Quiet = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """Merge adapters into their base: a plain model folder, loaded back and compared."""
    from whet.recipe.merge import merge_folders

    return merge_folders(base, adapter, how.value, out)
