"""Tools that a model uses in the middle of an answer: what they say is put into it, token by token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from whet.core.errors import WhetError
from whet.data.calculator import SCHEMA
from whet.data.conversation import BadRecordError
from whet.data.render import Renderer
from whet.infer.calculate import calculate


class Watcher(Protocol):
    """Sees one answer grow."""

    def see(self, token: int) -> Sequence[int]:
        """Told of every token, its own ones too; gives the tokens that must follow now, or none. Where it gives some,
        a token that would end the answer does not."""


class Tools(Protocol):
    """What `generate(..., tools=...)` takes."""

    def watch(self) -> Watcher:
        """A watcher for a new answer."""

    def said(self, answer: Sequence[int]) -> Sequence[int]:
        """Of a whole answer what is said to the user, calls and results aside."""


MARKERS = ("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>")
"""nanochat's: an expression between the first two, its value between the last two."""


def has_markers(renderer: Renderer) -> bool:
    """Whether the calculator can be called without being offered first."""
    vocabulary = renderer.tokenizer.get_vocab()
    return all(name in vocabulary for name in MARKERS)


def calculator_for(renderer: Renderer) -> Tools:
    """The calculator as this model calls it: between markers, if its tokenizer has them, else by its chat template."""
    return MarkedCalculator(renderer) if has_markers(renderer) else CalledCalculator(renderer)


def offer_of(calculator: Tools | None) -> list[dict[str, Any]]:
    """What a prompt says of it."""
    return [SCHEMA] if isinstance(calculator, CalledCalculator) else []


class MarkedCalculator:
    """Sums between markers are worked out where they stand: … <|python_start|>48/2<|python_end|> is followed by
    <|output_start|>24<|output_end|>. What cannot be worked out is followed by nothing."""

    def __init__(self, renderer: Renderer, markers: Sequence[str] = MARKERS) -> None:
        self.tokenizer = renderer.tokenizer
        vocabulary = self.tokenizer.get_vocab()
        missing = [name for name in markers if name not in vocabulary]
        if missing:
            raise WhetError(
                f"calculator: the tokenizer has no token {missing[0]}, so the model cannot call it this way"
            )
        self.open, self.close, self.output, self.end = (vocabulary[name] for name in markers)

    def watch(self) -> Watcher:
        return _Marked(self)

    def said(self, answer: Sequence[int]) -> Sequence[int]:
        return answer  # sums stand in the middle of it, as the model was taught to write them


class _Marked:
    def __init__(self, calculator: MarkedCalculator) -> None:
        self._calculator = calculator
        self._expression: list[int] | None = None

    def see(self, token: int) -> Sequence[int]:
        its = self._calculator
        if token == its.open:
            self._expression = []
        elif self._expression is not None and token == its.close:
            result = calculate(its.tokenizer.decode(self._expression))
            self._expression = None
            if result is not None:
                return [its.output, *its.tokenizer.encode(result, add_special_tokens=False), its.end]
        elif self._expression is not None:
            self._expression.append(token)
        return ()


_RESULT = "\N{SNOWMAN}7319\N{SNOWMAN}"
"""Stands for a result while the template is asked what comes around it."""


class CalledCalculator:
    """Calls as the chat template writes them: at the end of a turn that calls the calculator, the tool's turn and the
    beginning of the next one are put into the answer, so that the model goes on. Prompts are rendered with
    `tools=[SCHEMA]`."""

    def __init__(self, renderer: Renderer) -> None:
        self.tokenizer = renderer.tokenizer
        self.backend = renderer.tokenizer.backend_tokenizer
        end = renderer.end_of_turn()
        call = {"name": "calculator", "arguments": {"expression": "31+52"}}
        said: list[dict[str, Any]] = [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call00001", "type": "function", "function": call}],
            },
            {"role": "tool", "content": _RESULT, "tool_call_id": "call00001", "name": "calculator"},
        ]
        try:
            text = renderer.text(said, prompt=True, tools=[SCHEMA])
        except BadRecordError as error:
            raise WhetError(f"calculator: the model's chat template has no place for it: {error}") from None
        at, answered = text.rfind("31+52"), text.rfind(_RESULT)
        marker = None if end is None else self.tokenizer.convert_ids_to_tokens(end)
        closed = -1 if marker is None else text.find(marker, at, answered)
        if at < 0 or answered < at or closed < 0:
            raise WhetError(
                "calculator: the model's chat template does not write calls, results, and an end of turn between them, "
                "so the model cannot call it. Ask it without --calculator"
            )
        assert end is not None
        self.end = end
        self.before, self.after = text[closed + len(str(marker)) : answered], text[answered + len(_RESULT) :]

    def watch(self) -> Watcher:
        return _Called(self)

    def said(self, answer: Sequence[int]) -> Sequence[int]:
        """Its last turn."""
        opening = self.backend.encode(self.after, add_special_tokens=False).ids
        starts = range(len(answer) - len(opening), -1, -1)
        at = next((i for i in starts if list(answer[i : i + len(opening)]) == opening), None)
        return answer if at is None else answer[at + len(opening) :]


class _Called:
    def __init__(self, calculator: CalledCalculator) -> None:
        self._calculator = calculator
        self._turn: list[int] = []
        self._own = 0

    def see(self, token: int) -> Sequence[int]:
        if self._own:  # a token that was put there
            self._own -= 1
            return ()
        its = self._calculator
        if token != its.end:
            self._turn.append(token)
            return ()
        expression = called_expression(its.tokenizer.decode(self._turn))
        self._turn = []
        if expression is None:
            return ()
        result = calculate(expression) or "error: not a sum"
        ids = its.backend.encode(f"{its.before}{result}{its.after}", add_special_tokens=False).ids
        self._own = len(ids)
        return list(ids)


def called_expression(text: str) -> str | None:
    """What a turn asks the calculator: of the last JSON object in it that names it."""
    found = None
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except ValueError:
            at = text.find("{", at + 1)
            continue
        asked = _asked(value)
        found = asked if asked is not None else found
        at = text.find("{", end)
    return found


def _asked(value: Any) -> str | None:
    if not isinstance(value, dict) or value.get("name") != "calculator":
        return None
    given = value.get("arguments", value.get("parameters"))
    expression = given.get("expression") if isinstance(given, dict) else None
    return expression if isinstance(expression, str) else None
