"""Tools in records: their schemas, and the assistant's calls of them."""

from __future__ import annotations

from typing import Any

from whet.core.errors import BadRecordError
from whet.data.conversation import ToolCall
from whet.data.read.records.record_fields import (
    EMPTY_VALUES,
    decode_list,
    describe_type,
    parse_json,
    require_json_value,
    require_text,
    shorten,
)


def parse_tools(tools: Any, name: str = "tools") -> tuple[dict[str, Any], ...]:
    """The tools of a record in OpenAI's schema; a bare function is wrapped."""
    tools = decode_list(tools, f"'{name}'")
    if tools is None or tools in ("", [], {}):
        return ()
    if not isinstance(tools, list):
        raise BadRecordError(
            "bad tools", f"'{name}' must be a list of tools or a JSON string of one, not {describe_type(tools)}"
        )
    return tuple(_parse_tool(tool, number) for number, tool in enumerate(tools, 1))


def _parse_tool(tool: Any, number: int) -> dict[str, Any]:
    if isinstance(tool, str) and tool.lstrip().startswith("{"):
        tool = parse_json(tool, f"tool {number}")
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRecordError(
            "bad tools",
            f'tool {number} must be {{"type": "function", "function": {{"name": …}}}}, not {shorten(tool)}',
        )
    require_json_value(tool, f"the strings of tool {number}")
    if function is not tool:
        return tool
    names = {"input_schema": "parameters"}  # Anthropic's name
    return {"type": "function", "function": {names.get(k, k): v for k, v in tool.items() if k != "type"}}


def parse_tool_calls(calls: Any, place: str) -> tuple[ToolCall, ...]:
    """The `tool_calls` of a message."""
    calls = decode_list(calls, f"{place}: 'tool_calls'")
    if not isinstance(calls, list):
        raise BadRecordError("bad tool call", f"{place}: 'tool_calls' must be a list, not {describe_type(calls)}")
    return tuple(parse_tool_call(call, place) for call in calls)


_ARGUMENTS = ("arguments", "args", "parameters", "input")
"""The names of OpenAI, LangChain, Llama 3 and Anthropic."""


def parse_tool_call(call: Any, place: str) -> ToolCall:
    """{"id": …, "function": {"name": …, "arguments": …}}, or only the inner object."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not function.get("name"):
        raise BadRecordError(
            "bad tool call", f'{place}: a call must be {{"name": …, "arguments": {{…}}}}, not {shorten(call)}'
        )
    if call.get("type") not in (None, "function", "tool_call"):
        raise BadRecordError(
            "bad tool call", f"{place}: the type of a call must be function, not {shorten(call['type'])}"
        )
    name, call_id = require_text(function["name"], f"{place}: the name of a call"), call.get("id")
    given = [key for key in _ARGUMENTS if function.get(key) is not None][:1]
    unknown = [key for key in function if key not in (*_ARGUMENTS, "name", "id", "type", "index")]
    if not given and any(function[key] not in EMPTY_VALUES for key in unknown):
        raise BadRecordError(
            "bad tool call", f"{place}: the call of {name} has {unknown[0]!r} and no 'arguments'; rename it"
        )
    arguments = function[given[0]] if given else None
    return ToolCall(
        name, _parse_arguments(arguments, f"{place}: the arguments of {name}"),
        None if call_id is None else require_text(call_id, f"{place}: the id of a call"),
        written=arguments if isinstance(arguments, str) else None,
    )  # fmt: skip


def _parse_arguments(arguments: Any, place: str) -> dict[str, Any]:
    """An object, or a JSON string of one; null or blank: no arguments."""
    if isinstance(arguments, str) and arguments.strip():
        arguments = parse_json(arguments, place)
    if arguments is None or arguments == "" or (isinstance(arguments, str) and arguments.isspace()):
        return {}
    if not isinstance(arguments, dict):
        raise BadRecordError(
            "bad tool call", f"{place} must be an object or a JSON string of one, not {describe_type(arguments)}"
        )
    require_json_value(arguments, place)
    return arguments
