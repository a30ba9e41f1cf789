"""`whet chat`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whet.cli.common import JsonOption, LoadOption, QuietOption, cli_command, require_existing

if TYPE_CHECKING:
    from whet.inference.chat import ChatModels
    from whet.inference.inference_model import InferenceModel


@cli_command
def chat(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RUN", help="A model or adapter folder, a hub id, builtin:NAME, a run folder or models:NAME."
        ),
    ],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Answer this prompt and exit.")] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Answer every line of a file, plain text or .jsonl, and exit.")
    ] = None,
    unconditional: Annotated[
        bool,
        typer.Option("--unconditional", help="Generate from the BOS token only, without a prompt or chat template."),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="MODEL|RUN", help="A second model, which answers the same prompts."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="NAME=DIR", help="Load an adapter of MODEL; may be repeated."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0: greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k most likely tokens; 0: all.")] = 50,
    top_p: Annotated[
        float, typer.Option(help="Sample from the most likely tokens whose probabilities add up to p; 1: all.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens less likely than this fraction of the most likely one.")
    ] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: penalize tokens that occurred before.")] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End the answer at this text; may be repeated.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the probability of each token and its most likely alternatives.")
    ] = False,
    calculator: Annotated[
        bool, typer.Option("--calculator", help="Run the calculator when the model calls it.")
    ] = False,
    load: LoadOption = "auto",
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any] | None:
    """Chat with a model in the terminal."""
    require_existing(model, *([against] if against else []))
    from whet.core.console import print_result
    from whet.core.errors import WhetError
    from whet.inference.chat import answer_conversations, generate_unconditional, read_prompts
    from whet.inference.sampling import Sampling
    from whet.model.lora.adapter_folder import parse_adapter_options
    from whet.run.models.load_models import load_chat_models

    given = [name for name, value in (("--prompt", prompt), ("--prompts", prompts)) if value is not None]
    given += ["--unconditional"] * unconditional
    if len(given) > 1:
        raise WhetError(f"{given[0]} and {given[1]} are alternatives: give one of them")
    if as_json and not given:
        raise WhetError("--json needs a prompt: add --prompt TEXT, --prompts FILE or --unconditional")
    sampling = Sampling(temperature, top_k, seed, max_new_tokens, top_p, min_p, repetition_penalty, tuple(stop or ()))
    conversations = None if prompts is None else read_prompts(prompts)
    models = load_chat_models(model, sampling, against, parse_adapter_options(adapter or []), load, calculator, system)
    if conversations is not None:
        answers = answer_conversations(models, conversations, explain)
        for conversation, answer in zip(conversations, answers, strict=True):
            answer["prompt"] = conversation.messages[-1].content
            if not as_json:
                print_result(f"you › {answer['prompt']}")
                _print_answers(answer, against is not None, "model")
        return {"model": model, "answers": answers}
    if prompt is not None:
        return _answer_prompt(models, prompt, explain, as_json)
    if unconditional:
        result = generate_unconditional(models, explain)
        if not as_json:
            _print_answers(result, against is not None)
        return result
    from whet.inference.terminal import TerminalChat

    TerminalChat(models, explain).run()
    return None


def _answer_prompt(models: ChatModels, prompt: str, explain: bool, as_json: bool) -> dict[str, Any]:
    """Stream the answer to stdout; with two models each answer follows its model's name."""
    from whet.core.console import print_result
    from whet.inference.chat import answer_message

    named: set[int] = set()

    def show(model: InferenceModel, text: str) -> None:
        if models.against is not None and id(model) not in named:
            print_result(f"\n{model.name} › " if named else f"{model.name} › ", end="")
            named.add(id(model))
        print_result(text, end="")

    result = answer_message(models, prompt, explain, None if as_json else show)
    if not as_json:
        print_result("")
        _print_notes(result)
    return result


def _print_answers(result: dict[str, Any], labelled: bool, name: str = "") -> None:
    from whet.core.console import print_result

    for each in (result, *([result["against"]] if "against" in result else [])):
        label = f"{each['model'] if labelled else name} › " if labelled or name else ""
        print_result(f"{label}{each['answer']}")
    _print_notes(result)


def _print_notes(result: dict[str, Any]) -> None:
    """Notes on truncated answers go to stderr, token probabilities to stdout."""
    from whet.core.console import info, print_result

    for each in (result, *([result["against"]] if "against" in result else [])):
        if each["stopped"] == "length":
            info(
                f"{each['model']}: truncated after {each['tokens']} tokens; --max-new-tokens sets the limit",
                style="dim",
            )
        for token in each.get("explain", ()):
            others = "  ".join(f"{choice['token']!r} {choice['probability']:.1%}" for choice in token["likeliest"])
            print_result(f"{token['probability']:7.1%} {token['token']!r:<18} {others}")
