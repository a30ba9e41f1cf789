"""`whet eval`"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from whet.cli.common import JsonOption, OverridesArgument, QuietOption, cli_command, require_existing


@cli_command
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL", help="A run folder, RUN@STEP, a model folder, a hub id, builtin:NAME or models:NAME."
        ),
    ],
    overrides: OverridesArgument = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Tasks to score: names and files, such as orders,my.jsonl:number, or a YAML list."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|CONFIG",
            help="Measure the loss on this file instead of the run's validation data. For a model that is not a run, "
            "it may be a recipe: the model is measured on its validation data, or else its training data, read with "
            "its format and markers.",
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="A run, a model or the file of an earlier evaluation to compare with.")
    ] = None,
    base: Annotated[bool, typer.Option("--base/--no-base", help="Score the model before training, too.")] = True,
    lm_eval: Annotated[
        str | None, typer.Option("--lm-eval", help="Run these tasks of EleutherAI's lm-eval on the exported model.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="Write the result with all answers to this file.")] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Evaluate a run or a model: loss, perplexity, bits per byte, token accuracy, tasks with confidence intervals."""
    require_existing(model)
    from whet.core.console import print_result
    from whet.inference.comparison import format_results

    if lm_eval is not None:
        from whet.run.lm_eval import run_lm_eval

        result = run_lm_eval(model, lm_eval, overrides or [])
    else:
        from whet.run import eval_command

        request = eval_command.EvaluationRequest(model, overrides or [], tasks, data, against, base, out)
        result = eval_command.evaluate(request)
    if not as_json:
        for line in format_results(result):
            print_result(line)
    return result
