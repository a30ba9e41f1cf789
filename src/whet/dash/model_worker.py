"""The process that loads models for the page: `python -m whet.dash.model_worker`. The server itself has no torch.

Requests are lines of JSON on stdin, events are lines of JSON on stdout; the last event of a request is `{"end": true}`.
SIGINT ends a request early. Whatever libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from whet.core.display import mask_secrets
from whet.core.errors import WhetError
from whet.core.signals import terminate_with_parent

Sender = Callable[[dict[str, Any]], None]
_NICE = 5  # a run on the same cores goes first
_MAX_PAIRS = 2
_pairs: dict[tuple[str, ...], list[Any]] = {}
"""Models that are loaded, by their references; the newest last."""


def main() -> None:
    """Answer requests until stdin ends."""
    terminate_with_parent()
    os.nice(_NICE)
    events = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        _answer(json.loads(line), events)


def _answer(request: dict[str, Any], events: IO[str]) -> None:
    def send(event: dict[str, Any]) -> None:
        events.write(json.dumps(event, ensure_ascii=False) + "\n")
        events.flush()

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _HANDLERS[request["do"]](request, send)
    except KeyboardInterrupt:
        pass
    except WhetError as error:
        send({"error": mask_secrets(str(error))})
    except Exception as error:  # the next request may be fine
        send({"error": mask_secrets(f"{type(error).__name__}: {error}")[:2000]})
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        send({"end": True})


def _replay(request: dict[str, Any], send: Sender) -> None:
    """The loss of each token of a step."""
    from whet.run.step_losses import step_conversations

    found = step_conversations(Path(request["run"]), request["step"])
    send({
        "weights": found.weights, "exact": found.exact, "replayed": found.replayed,
        "conversations": [
            {"document": each.document, "loss": each.loss, "recorded": each.recorded_loss,
             "losses": list(zip(each.texts, each.losses, strict=True))[: request["tokens"]]}
            for each in found.conversations[: request["conversations"]]
        ],
    })  # fmt: skip


def _chat(request: dict[str, Any], send: Sender) -> None:
    """The answers of one model, or of two that share what they can, to the same messages."""
    from whet.data.conversation import Message
    from whet.inference.chat import ChatSession
    from whet.inference.sampling import Sampling

    sampling = Sampling(**request["sampling"])
    for place, model in enumerate(_load(tuple(request["models"]), send)):
        messages = [Message(each["role"], each["content"]) for each in request["messages"][place]]
        session = ChatSession(replace(model, sampling=sampling))
        reply = session.answer(messages, show=partial(_send_text, send, place))
        explained = [token.as_dict() for token in model.explain(reply)]
        send({
            "model": place, "answer": reply.text, "stopped": reply.finish_reason, "tokens": len(reply.ids),
            "explain": explained,
        })  # fmt: skip


def _send_text(send: Sender, place: int, text: str) -> None:
    if text:
        send({"model": place, "text": text})


def _load(references: tuple[str, ...], send: Sender) -> list[Any]:
    from whet.run.models.load_models import load_inference_model, load_model_pair

    if references not in _pairs:
        send({"loading": list(references)})
        while len(_pairs) >= _MAX_PAIRS:  # before the next needs the memory
            del _pairs[next(iter(_pairs))]
        if len(references) == 2:
            _pairs[references] = list(load_model_pair(*references))
        else:
            _pairs[references] = [load_inference_model(references[0])]
    _pairs[references] = _pairs.pop(references)
    return _pairs[references]


_HANDLERS: dict[str, Callable[[dict[str, Any], Sender], None]] = {"replay": _replay, "chat": _chat}


if __name__ == "__main__":
    main()
