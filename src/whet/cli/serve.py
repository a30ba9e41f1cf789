"""`whet serve`"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from whet.cli.common import LoadOption, QuietOption, cli_command, require_existing


@cli_command
def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL|RUN [RUN…]",
            help="A model or adapter folder, a hub id, builtin:NAME, a run folder or models:NAME; or several adapters "
            "of one base, which share its weights.",
        ),
    ],
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; any but loopback needs a token in WHET_TOKEN.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: a free one.")] = 8000,
    max_requests: Annotated[
        int,
        typer.Option("--max-requests", min=1, help="Answers in progress or waiting; further requests get status 429."),
    ] = 256,
    load: LoadOption = "auto",
    quiet: QuietOption = False,
) -> dict[str, Any] | None:
    """Serve a model to colleagues: an OpenAI-compatible API and a chat page.

    For production, serve the export with an engine made for it:

    - `whet export RUN --to merged`, then `vllm serve RUN/exports/merged`
    - or `python -m sglang.launch_server --model-path RUN/exports/merged`
    - `whet export RUN --to gguf`, then `llama-server -m RUN/exports/gguf/*.gguf`
    - or `ollama create NAME -f RUN/exports/gguf/Modelfile`
    """
    require_existing(*models)
    from whet.core.console import info
    from whet.run.models.load_models import load_models_to_serve
    from whet.serve.app import make_serving_app, run_server
    from whet.web.server import bind, require_token, url_of

    token = require_token(host)
    with bind(host, port) as listener:
        loaded = load_models_to_serve(models, load)
        app = make_serving_app(loaded, max_requests, token)
        url = url_of(listener)

        def announce() -> None:
            info(f"chat with {', '.join(loaded.models)}: {url}")
            info(f"for the openai client: base_url={url}v1, api_key={'$WHET_TOKEN' if token else 'any text'}; "
                 "Ctrl-C stops")  # fmt: skip

        run_server(app, listener, announce)
    info("stopped")
    return None
