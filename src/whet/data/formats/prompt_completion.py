"""The `prompt-completion` format: {"prompt": "…", "completion": "…"}; both may be lists of messages.

Texts become a user's and an assistant's turn. Of lists, the prompt's assistant turns are context: not learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from whet.data.conversation import Conversation, Origin
from whet.data.formats.messages import parse_turns
from whet.data.formats.pick import readings
from whet.data.formats.tools import parse_tools
from whet.data.formats.values import checked, filled, need_field, need_object

FIELDS = {"prompt": ("prompt", "question", "query", "input", "problem"),
          "completion": ("completion", "answer", "response", "output", "solution"),
          "system": ("system",), "tools": ("tools",)}  # fmt: skip
_EXAMPLE = '{"prompt": "…", "completion": "…"}'
_MORE_MEANING = ("instruction", "context", "passage", "document", "choices", "options", "history", "chosen", "rejected")
"""Fields that belong to the question. A record that has one says more than a prompt and a completion do."""


def recognise(record: Any, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """The names under which a record holds such fields; none if it holds more than they say."""
    if not isinstance(record, dict):
        return []
    more = [name for name in _MORE_MEANING if record.get(name) not in (None, "", []) and name not in fields.values()]
    return [] if more else readings(record, FIELDS, ("prompt", "completion"), fields)


def parse(record: Any, names: Mapping[str, str], origin: Origin) -> Conversation:
    """A conversation, or a BadRecordError with the reason."""
    record = need_object(record, _EXAMPLE)
    prompt = _turns(need_field(record, names["prompt"]), names["prompt"], "user")
    if system := record.get(names["system"]):
        prompt.insert(0, {"role": "system", "content": checked(system, f"'{names['system']}'")})
    completion = _turns(need_field(record, names["completion"]), names["completion"], "assistant")
    messages = parse_turns(prompt + completion)
    context = [replace(turn, learn=False) if turn.role == "assistant" else turn for turn in messages[: len(prompt)]]
    return Conversation((*context, *messages[len(prompt) :]), origin, parse_tools(record.get(names["tools"])))


def _turns(value: Any, name: str, role: str) -> list[Any]:
    if isinstance(value, list) and value:
        return list(value)
    return [{"role": role, "content": filled(value, f"'{name}'")}]
