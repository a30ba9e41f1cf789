"""`whet eval`"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from whet.cli.common import Json, Overrides, Quiet, verb


@verb
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or RUN@STEP for an earlier checkpoint.")],
    overrides: Overrides = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """Measure a run's model again: validation loss, bits per byte, token accuracy, tasks."""
    from whet.recipe.use import evaluate_run

    result = evaluate_run(run, overrides or [])
    if not as_json:
        for name, value in result.items():
            typer.echo(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
    return result
