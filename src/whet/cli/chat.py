"""`whet chat`"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from whet.cli.common import Json, Quiet, verb


@verb
def chat(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|RUN", help="A model folder, a hub id, builtin:smollm2, or a run folder.")
    ],
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Ask once and print the answer instead of a conversation.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token; higher varies.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 256,
    seed: Annotated[int, typer.Option(help="Repeats a sampled answer.")] = 0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> dict[str, Any] | None:
    """Talk to a model in the terminal."""
    from whet.core.errors import WhetError
    from whet.infer.chat import ChatSession, converse
    from whet.infer.generate import Sampling
    from whet.recipe.use import load_ready

    if as_json and prompt is None:
        raise WhetError("--json answers one prompt: add --prompt TEXT")
    ready = load_ready(model)
    sampling = Sampling(temperature=temperature, seed=seed, max_new_tokens=max_new_tokens)
    session = ChatSession(ready.model, ready.renderer, ready.stops, sampling, system)
    if prompt is None:
        converse(session)
        return None
    answer = session.say(prompt)
    if not as_json:
        typer.echo(answer)
    return {"prompt": prompt, "answer": answer}
