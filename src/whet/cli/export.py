"""`whet export`"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from whet.cli.common import Json, Quiet, verb


class Kind(StrEnum):
    """What an export can be."""

    MERGED = "merged"
    ADAPTER = "adapter"


@verb
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or RUN@STEP, RUN@best.")],
    to: Annotated[Kind, typer.Option("--to", help="A plain model folder, or the adapter alone.")] = Kind.MERGED,
    quiet: Quiet = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """Write a run's model as a folder that transformers loads, load it back and compare it."""
    from whet.recipe.use import export_run

    folder, certificate = export_run(run, to.value)
    return {"export": str(folder), "certificate": certificate.as_dict()}
