"""Turn markers: the special tokens around the turns of marked text, and the chat template that writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from whet.core.errors import WhetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class TurnMarker:
    """A marker: its text, and its id where the tokenizer has another text for it."""

    text: str
    id: int | None = None


@dataclass(frozen=True, slots=True)
class TurnMarkers:
    """The markers by role, and whether documents end with the end-of-document token."""

    by_role: dict[str, TurnMarker]
    append_eod: bool = True


def set_marker_template(tokenizer: PreTrainedTokenizerFast, turns: TurnMarkers) -> None:
    """Set the chat template of the markers, which must be tokens; the assistant's marker becomes `eot_token`."""
    from whet.compat.transformers_private import set_special_token  # imports torch

    texts = {role: _marker_token(tokenizer, role, mark) for role, mark in turns.by_role.items()}
    tokenizer.chat_template = marker_template(texts, str(tokenizer.eos_token) if turns.append_eod else "")
    set_special_token(tokenizer, "eot_token", texts["assistant"])
    tokenizer.init_kwargs["eot_token"] = texts["assistant"]


def _marker_token(tokenizer: PreTrainedTokenizerFast, role: str, mark: TurnMarker) -> str:
    number = tokenizer.backend_tokenizer.token_to_id(mark.text) if mark.id is None else mark.id
    token = tokenizer.added_tokens_decoder.get(number)
    if token is None:
        raise WhetError(
            f"data.markers.{role}: {mark.text if mark.id is None else mark.id} is not a special token of "
            f"{tokenizer.name_or_path}. Give the id of one: data.markers.{role}.id"
        )
    return str(token.content)


def marker_template(texts: dict[str, str], eod: str) -> str:
    """A chat template that writes each turn as marker, content, marker, and `eod` at the end; the generation prompt is
    the assistant's marker.

    Content of whitespace alone is dropped. Without a system marker, a system message is put before the next user turn,
    separated by a blank line.
    """
    if "system" in texts:
        system = "{{ turn(system, message.content) }}"
    else:
        system = "{% set wait.text = wait.text + message.content + '\\n\\n' %}"
    lines = [
        *(f"{{% set {role} = {_jinja_literal(text)} %}}" for role, text in texts.items()),
        "{% set wait = namespace(text='') %}",
        "{% macro turn(marker, text) %}{{ marker + (text if text.strip() else '') + marker }}{% endmacro %}",
        "{% for message in messages %}",
        "{% if message.tool_calls or message.role not in ['system', 'developer', 'user', 'assistant'] %}",
        "{{ raise_exception('tool calls and results have no form between markers') }}",
        "{% elif message.role in ['system', 'developer'] %}" + system,
        "{% elif message.role == 'user' %}{{ turn(user, wait.text + message.content) }}{% set wait.text = '' %}",
        "{% elif wait.text %}{{ raise_exception('a system message needs a user turn after it') }}",
        "{% else %}{{ turn(assistant, message.content) }}{% endif %}",
        "{% endfor %}",
        f"{{% if add_generation_prompt %}}{{{{ assistant }}}}{{% else %}}{{{{ {_jinja_literal(eod)} }}}}{{% endif %}}",
    ]
    return "".join(lines)


def _jinja_literal(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
