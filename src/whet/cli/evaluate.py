"""`whet eval`"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from whet.cli.common import JsonOption, OverridesArgument, QuietOption, cli_command


@cli_command
def evaluate(
    model: Annotated[
        str,
        typer.Argument(metavar="RUN|MODEL", help="A run folder, RUN@STEP, a model folder, a hub id, builtin:smollm2."),
    ],
    overrides: OverridesArgument = None,
    tasks: Annotated[
        str | None, typer.Option(help="Names and files, such as orders,my.jsonl:number, or a YAML list of tasks.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Measure the loss on this file instead.")] = None,
    against: Annotated[
        str | None, typer.Option(help="Another run or model to compare with, or the file of an earlier evaluation.")
    ] = None,
    base: Annotated[bool, typer.Option("--base/--no-base", help="Ask the model before training too.")] = True,
    lm_eval: Annotated[
        str | None, typer.Option("--lm-eval", help="Tasks for EleutherAI's lm-eval, run on the exported model.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="A file for the result with all answers.")] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Measure a run or a model: loss, perplexity, bits per byte, token accuracy, and tasks with how sure they are."""
    from whet.inference.comparison import format_results
    from whet.run.eval_command import EvaluationRequest
    from whet.run.eval_command import evaluate as answer
    from whet.run.lm_eval_harness import run_lm_eval

    if lm_eval is not None:
        result = run_lm_eval(model, lm_eval, overrides or [])
    else:
        result = answer(EvaluationRequest(model, overrides or [], tasks, data, against, base, out))
    if not as_json:
        for line in format_results(result):
            typer.echo(line)
    return result
