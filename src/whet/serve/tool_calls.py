"""Tool calls in answers. How a model writes them is what its chat template writes for one: found by rendering some.

- JSON: `<tool_call>{"name": "weather", "arguments": {"city": "Riga"}}</tool_call>` (Qwen, Llama 3.1, Mistral, Granite)
- the name, then the arguments as JSON: `[TOOL_CALLS]weather[ARGS]{"city": "Riga"}` (newer Mistral, DeepSeek, gpt-oss)
- tags around each argument: `<function=weather><parameter=city>Riga</parameter></function>` (Qwen3.5, GLM, Nemotron)
- Python: `<|tool_call_start|>[weather(city="Riga")]<|tool_call_end|>` (LFM2)

The marks are not a list of known ones; they are what stands around a call that the template was given. A format is used
only if it reads back what the template wrote. What cannot be read is passed on as text.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from whet.core.errors import BadRecordError, WhetError
from whet.data.conversation import Conversation, Message, Origin, ToolCall
from whet.data.render.renderer import Renderer
from whet.data.render.template_text import PROBE_TOOL, Tools

_MAX_FAILURES = 1000
"""Brackets at which no JSON begins; each may cost a scan of the rest of the answer."""
_QUESTION = Message("user", "Hi")
_SEPARATORS = " \n;,"
_MAX_PYTHON = 20_000
"""Characters of a call in Python's syntax; its parser needs a multiple of them."""
_MIDDLE = 60
"""Characters between the name and the arguments of a call: models write other words there than their template."""
_SPECIAL_TOKEN = re.compile(r"<\|\w+\|>")
_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}
"""Some templates print arguments as Python does, and their models learned that."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call of a tool; the arguments as JSON."""

    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        """As OpenAI's API writes it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """A call is a JSON object with `name` and `arguments` (or `parameters`), or a list of such objects."""

    opening: str
    """What stands before it, such as <tool_call>; empty: the answer is the call."""
    closing: str

    def parse(self, text: str, tools: Tools) -> tuple[str, list[ParsedCall]]:
        """(text without the calls, calls). Without an opening only an answer that is nothing but calls counts, and only
        if they name tools of the request: any other JSON is text."""
        known = [tool["function"]["name"] for tool in tools]
        calls: list[ParsedCall] = []
        rest, done = "", 0
        for at, end, value in _json_values(text, 0):
            found = list(_calls_in(value))
            before = text[done:at].rstrip()
            if self.opening:
                is_call = bool(found) and before.endswith(self.opening)
            else:  # Llama 3 may write <|python_tag|> before it
                is_first = not _SPECIAL_TOKEN.sub("", before).strip(_SEPARATORS)
                is_call = bool(found) and is_first and all(name in known for name, _ in found)
            if at < done or not is_call:
                continue
            rest += before.removesuffix(self.opening) if self.opening else ""
            calls += [ParsedCall(name, arguments) for name, arguments in found]
            after = text[end:].lstrip()
            is_closed = bool(self.closing) and after.startswith(self.closing)
            done = len(text) - len(after) + len(self.closing) if is_closed else end
        return (rest + text[done:], calls) if calls else (text, [])


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """A call is its name and, some words later, its arguments as a JSON object."""

    opening: str
    """Before the name, such as [TOOL_CALLS]; empty: the answer begins with the name."""
    closing: str
    """After the arguments."""
    block: tuple[str, str] = ("", "")
    """Before the first call and after the last."""
    quote: str = '"'
    """Around texts; with another mark than JSON's, keys have none."""

    def parse(self, text: str, tools: Tools) -> tuple[str, list[ParsedCall]]:
        """(text without the calls, calls). Without an opening only tools of the request can be called."""
        known = [tool["function"]["name"] for tool in tools]
        calls: list[ParsedCall] = []
        rest, done = "", 0
        for start in re.compile(f"{re.escape(self.opening)}([\\w.-]+)[^{{}}]{{0,{_MIDDLE}}}?(?={{)").finditer(text):
            found = self._arguments(text, start.end())
            is_call = bool(self.opening) or (not text[done : start.start()].strip() and start[1] in known)
            if start.start() < done or found is None or not is_call:
                continue
            calls.append(ParsedCall(start[1], json.dumps(found[0], ensure_ascii=False)))
            rest += text[done : start.start()]
            after = text[found[1] :].lstrip()
            is_closed = bool(self.closing) and after.startswith(self.closing)
            done = len(text) - len(after) + len(self.closing) if is_closed else found[1]
        if not calls:
            return text, []
        rest += text[done:]
        for mark in filter(None, self.block):
            rest = rest.replace(mark, "")
        return rest, calls

    def _arguments(self, text: str, at: int) -> tuple[dict[str, Any], int] | None:
        """(arguments, where they end); None if the text has no object there."""
        if self.quote != '"':
            end = text.find(self.closing, at)
            if end < 0:
                return None
            parts = text[at:end].split(self.quote)
            parts[::2] = [re.sub(r"([\w.-]+)\s*:", r'"\1":', part) for part in parts[::2]]
            parts[1::2] = [json.dumps(part) for part in parts[1::2]]
            text, at = "".join(parts), 0
        try:
            value, after = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict):
            return None
        return value, after if self.quote == '"' else end


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """Calls are a list as Python writes it: [weather(city="Riga"), now()]."""

    opening: str
    """Such as <|tool_call_start|>; empty: the answer is the list."""
    closing: str

    def parse(self, text: str, tools: Tools) -> tuple[str, list[ParsedCall]]:
        """(text without the calls, calls). Without an opening only tools of the request can be called."""
        known = [tool["function"]["name"] for tool in tools]
        calls: list[ParsedCall] = []
        rest, left = "", text
        while True:
            before, mark, after = left.partition(self.opening) if self.opening else ("", "", left)
            inside, closed, beyond = after.partition(self.closing) if self.closing else (after, "", "")
            found = _python_calls(inside.strip()) if mark or not self.opening else []
            if not found or not (self.opening or all(call.name in known for call in found)):
                break
            calls, rest, left = calls + found, rest + before, beyond
            if not closed:
                break
        return (rest + left, calls) if calls else (text, [])


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """A call is its name and, between tags, the name and the value of each argument."""

    opening: str
    """Before the name, such as <tool_call>⏎<function=."""
    after_name: str
    after_key: str
    between_arguments: str
    closing: str
    """After the last value."""
    closing_without_arguments: str

    def parse(self, text: str, tools: Tools) -> tuple[str, list[ParsedCall]]:
        """(text without the calls, calls)."""
        calls: list[ParsedCall] = []
        rest, done = "", 0
        for start in re.compile(f"{_flexible(self.opening)}([\\w.-]+)").finditer(text):
            if start.start() < done:
                continue
            found = self._arguments(text, start.end(), _properties(tools, start[1]))
            if found is not None:
                calls.append(ParsedCall(start[1], json.dumps(found[0], ensure_ascii=False)))
                rest += text[done : start.start()]
                done = found[1]
        return (rest + text[done:], calls) if calls else (text, [])

    def _arguments(self, text: str, at: int, properties: Mapping[str, Any]) -> tuple[dict[str, Any], int] | None:
        """(arguments, end of the call); None if the text is no call."""
        arguments: dict[str, Any] = {}
        part = re.compile(_flexible(self.after_name)).match(text, at)
        if part is None:
            part = re.compile(_flexible(self.closing_without_arguments)).match(text, at)
            return None if part is None else (arguments, part.end())
        key = re.compile(f"([\\w.-]+){_flexible(self.after_key)}")
        ending = re.compile(f"({_flexible(self.between_arguments)}(?=[\\w.-]))|{_flexible(self.closing)}")
        while True:
            named = key.match(text, part.end())
            part = ending.search(text, named.end()) if named else None
            if named is None or part is None:
                return None
            arguments[named[1]] = _typed(text[named.end() : part.start()], properties.get(named[1]))
            if part[1] is None:
                return arguments, part.end()


ToolCallFormat = JsonCalls | NamedCalls | TaggedCalls | PythonCalls


def visible_length(text: str, form: ToolCallFormat) -> int:
    """How much of an unfinished answer is certainly no part of a call, and may be shown."""
    if not form.opening:
        begun = _SPECIAL_TOKEN.sub("", text).strip()
        possible = r"[{\[].*|<?(\|\w*\|?)?" if not isinstance(form, NamedCalls) else r"[\w.-]*\s*({.*)?"
        return 0 if re.fullmatch(possible, begun, re.DOTALL) else len(text)
    marks = [form.opening, form.block[0]] if isinstance(form, NamedCalls) else [form.opening]
    return min(_before_mark(text, mark.split()[0]) for mark in marks if mark.strip())


def _before_mark(text: str, mark: str) -> int:
    """Where a mark begins, or may begin at the end of the text."""
    at = text.find(mark)
    if at >= 0:
        return at
    return len(text) - next(n for n in range(len(mark), -1, -1) if text.endswith(mark[:n]))


# The format of a template


def find_tool_call_format(renderer: Renderer) -> ToolCallFormat | None:
    """How this chat template writes calls; None if it writes them in a way that cannot be read, or not at all. A
    WhetError if the model would not see its tools."""
    try:
        prompt = renderer.prompt_text([_QUESTION], [PROBE_TOOL])
        if prompt == renderer.prompt_text([_QUESTION]):
            raise WhetError("the model's chat template leaves tools out, so the model would not see them")
    except BadRecordError as error:
        raise WhetError(f"the model's chat template has no tools: {error}") from None
    for find in (_find_json, _find_named, _find_tags, _find_python):
        try:
            found = find(renderer, prompt)
            if found is not None and _reads_back(renderer, prompt, found):
                return found
        except BadRecordError:  # it refuses such calls
            continue
    return None


def _written(renderer: Renderer, prompt: str, *arguments: dict[str, Any]) -> str:
    """What the template writes in the assistant's turn for calls with these arguments."""
    calls = tuple(ToolCall("look_up", each, f"call{number:05}") for number, each in enumerate(arguments, 1))
    turn = Message("assistant", "", tool_calls=calls)
    text = renderer.text.apply_with_arguments(Conversation((_QUESTION, turn), Origin("probe", 1), (PROBE_TOOL,)))[1]
    start = len(_common_start(prompt, text))
    marker = renderer.end_of_turn()
    ending = "" if marker is None else str(renderer.tokenizer.convert_ids_to_tokens(marker))
    return text[start:].partition(ending)[0] if ending else text[start:]


def _find_json(renderer: Renderer, prompt: str) -> JsonCalls | None:
    text = _written(renderer, prompt, {"word": "31+52"})
    for at, end, value in _json_values(text, 0):
        if any(name == "look_up" for name, _ in _calls_in(value)):
            return JsonCalls((text[:at].split() or [""])[-1], (text[end:].split() or [""])[0])
    return None


def _find_named(renderer: Renderer, prompt: str) -> NamedCalls | None:
    """From two calls, where the template allows them: what stands before each name is the opening of a call."""
    arguments = {"word": "31+52"}
    try:
        text = _written(renderer, prompt, arguments, arguments)
    except BadRecordError:
        text = _written(renderer, prompt, arguments)
    before, _, after = text.partition("31+52")
    quote = next((after[:n] for n in range(1, 12) if after and before.endswith(after[:n])), "")
    places: list[tuple[int, int, int]] = []  # of the name, of the arguments' beginning and end
    for name in re.finditer("look_up", text):
        start = text.find("{", name.end())
        end = text.find("}", start) + 1
        if "31+52" in text[start:end] and (not places or name.start() > places[-1][2]):
            places.append((name.start(), start, end))
    if not places or not quote:
        return None
    head, tail = text[: places[0][0]], text[places[-1][2] :].rstrip()
    if len(places) == 1:
        return NamedCalls(head.strip(), tail.strip(), quote=quote)
    between = text[places[0][2] : places[1][0]]
    opening = _common_start(head[::-1], between[::-1])[::-1].lstrip()
    closing = _common_start(between.removesuffix(opening), tail).strip()
    block = head.removesuffix(opening).strip(), tail.strip().removeprefix(closing).strip()
    return NamedCalls(opening, closing, block, quote)


def _find_python(renderer: Renderer, prompt: str) -> PythonCalls | None:
    before, found, after = _written(renderer, prompt, {}).partition("[look_up()]")
    return PythonCalls(before.strip(), after.strip()) if found else None


def _find_tags(renderer: Renderer, prompt: str) -> TaggedCalls | None:
    """From two calls: what stands between them is the end of one and the beginning of the next."""
    texts = ("look_up", "word", "31+52", "page", "64+17")
    try:
        text = _written(renderer, prompt, *[{"word": "31+52", "page": "64+17"}] * 2)
    except BadRecordError:  # one call at a time
        return None
    edges, at = [], 0
    for part in texts * 2:
        found = text.find(part, at)
        if found < 0:
            return None
        at = found + len(part)
        edges.append((found, at))
    gaps = [text[one[1] : other[0]] for one, other in pairwise(edges)]
    closing, between_calls = text[edges[-1][1] :].rstrip(), gaps[4]
    opening = between_calls.removeprefix(closing).strip()
    if not closing or not opening or not between_calls.startswith(closing):
        return None
    without_arguments = _written(renderer, prompt, {}).rstrip().rpartition("look_up")[2]
    return TaggedCalls(opening, gaps[0], gaps[1], gaps[2], closing, without_arguments)


def _reads_back(renderer: Renderer, prompt: str, form: ToolCallFormat) -> bool:
    """Whether parsing gives the calls that the template wrote."""
    for given in ({"word": "31 <+> 52\nnext"}, {"word": "x", "page": 3, "all": True}, {}):
        _, calls = form.parse(_written(renderer, prompt, given), [PROBE_TOOL])
        if [(call.name, json.loads(call.arguments)) for call in calls] != [("look_up", given)]:
            return False
    return True


# Parts of a text


def _common_start(one: str, other: str) -> str:
    return one[
        : next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    ]


def _python_calls(text: str) -> list[ParsedCall]:
    """The calls of a list in Python's syntax, with constants as arguments; none if the text is anything else."""
    try:
        try:
            listed = ast.parse(text[:_MAX_PYTHON], mode="eval").body
        except SyntaxError:  # some templates print texts as they are
            listed = ast.parse(text[:_MAX_PYTHON].replace("\n", "\\n"), mode="eval").body
        found = []
        for call in listed.elts if isinstance(listed, ast.List) else []:
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
                return []
            arguments = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
            found.append(ParsedCall(call.func.id, json.dumps(arguments, ensure_ascii=False)))
        return found
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _json_values(text: str, start: int) -> Iterator[tuple[int, int, Any]]:
    """(start, end, value) of each object and list in a text, outermost first."""
    decoder, at, failures = json.JSONDecoder(), start, 0
    while failures < _MAX_FAILURES:
        at = min((found for found in (text.find("{", at), text.find("[", at)) if found >= 0), default=-1)
        if at < 0:
            return
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at, failures = at + 1, failures + 1
            continue
        yield at, end, value
        at = end


def _calls_in(value: Any) -> Iterator[tuple[str, str]]:
    """(name, arguments as JSON) of a call, or of a list of calls."""
    if isinstance(value, list):
        for each in value:
            if isinstance(each, dict):
                yield from _calls_in(each)
        return
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return
    if isinstance(arguments, dict):
        yield function["name"], json.dumps(arguments, ensure_ascii=False)


def _flexible(literal: str) -> str:
    """A pattern for a literal in which models may leave out line breaks."""
    return r"\n?".join(re.escape(part) for part in literal.split("\n"))


def _properties(tools: Tools, name: str) -> Mapping[str, Any]:
    """The declared arguments of a tool."""
    function: dict[str, Any] = next((tool["function"] for tool in tools if tool["function"]["name"] == name), {})
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties if isinstance(properties, dict) else {}


def _typed(text: str, declared: Any) -> Any:
    """The value of an argument: text if it is declared as a string, else what it is as JSON or Python, else text."""
    if isinstance(declared, dict) and declared.get("type") == "string":
        return text
    if text in _PYTHON_CONSTANTS:
        return _PYTHON_CONSTANTS[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
