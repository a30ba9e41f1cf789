"""Tools: their schemas, the assistant's calls, and results that answer a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whet.data.conversation import BadRecordError, Message, ToolCall
from whet.data.formats.values import as_list, checked, checked_json, kind, parse_json, short


def parse_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """The record's tools in OpenAI's schema; a bare function is put into it."""
    tools = as_list(tools, "'tools'")
    if tools is None or tools in ("", [], {}):
        return ()
    if not isinstance(tools, list):
        raise BadRecordError("bad tools", f"'tools' must be a list of tools or JSON text of one, not {kind(tools)}")
    return tuple(_parse_tool(tool, number) for number, tool in enumerate(tools, 1))


def _parse_tool(tool: Any, number: int) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRecordError(
            "bad tools",
            f'tool {number} must be {{"type": "function", "function": {{"name": …}}}}, not {short(tool)}',
        )
    checked_json(tool, f"the texts of tool {number}")
    return {"type": "function", "function": function} if function is tool else tool


def parse_calls(calls: Any, place: str) -> tuple[ToolCall, ...]:
    """A message's `tool_calls`."""
    calls = as_list(calls, f"{place}: 'tool_calls'")
    if not isinstance(calls, list):
        raise BadRecordError("bad tool call", f"{place}: 'tool_calls' must be a list, not {kind(calls)}")
    return tuple(parse_call(call, place) for call in calls)


def parse_call(call: Any, place: str) -> ToolCall:
    """{"id": …, "function": {"name": …, "arguments": …}}, or the inner object alone."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not function.get("name"):
        raise BadRecordError(
            "bad tool call", f'{place}: a call must be {{"name": …, "arguments": {{…}}}}, not {short(call)}'
        )
    if call.get("type") not in (None, "function"):
        raise BadRecordError("bad tool call", f"{place}: a call is of type function, not {short(call['type'])}")
    name, identity = checked(function["name"], f"{place}: the name of a call"), call.get("id")
    return ToolCall(
        name, _parse_arguments(function.get("arguments"), f"{place}: the arguments of {name}"),
        None if identity is None else checked(identity, f"{place}: the id of a call"),
    )  # fmt: skip


def _parse_arguments(arguments: Any, place: str) -> dict[str, Any]:
    """An object, or JSON text of one; nothing is a call without arguments."""
    if isinstance(arguments, str) and arguments.strip():
        arguments = parse_json(arguments, place)
    if arguments is None or arguments == "" or (isinstance(arguments, str) and arguments.isspace()):
        return {}
    if not isinstance(arguments, dict):
        raise BadRecordError("bad tool call", f"{place} must be an object or JSON text of one, not {kind(arguments)}")
    checked_json(arguments, place)
    return arguments


def check_turns(messages: Sequence[Message]) -> None:
    """Refuse what templates would garble: a system message that is not the first, a result that answers nothing."""
    waiting: list[ToolCall] = []
    for number, message in enumerate(messages, 1):
        if message.role in ("system", "developer"):
            if number > 1:
                _refuse_system(messages[0], number)
        elif message.role == "assistant":
            waiting.extend(message.calls)
        elif message.role == "tool":
            waiting.remove(_answered(waiting, message, number))


def _refuse_system(first: Message, number: int) -> None:
    if first.role in ("system", "developer"):
        raise BadRecordError("two system messages", f"message {number} is a second system message; join them")
    raise BadRecordError("system message not first", f"message {number} is a system message; it must be the first")


def _answered(waiting: Sequence[ToolCall], message: Message, number: int) -> ToolCall:
    for call in waiting:
        if message.call_id is None or call.id == message.call_id:
            return call
    whose = "" if message.call_id is None else f" (its tool_call_id is {short(message.call_id)})"
    raise BadRecordError(
        "result without a call", f"message {number} is a tool's result{whose} and no call before it waits for it"
    )
