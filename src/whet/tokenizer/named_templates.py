"""Chat templates that whet writes: for base models without one (`data.template: chatml`), and for turn markers.

A template needs its markers as tokens. Those that the tokenizer does not have are added to it (model.add_tokens): their
rows start as means of existing ones, are trained, with adapters too, and are part of every export.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from whet.core.errors import WhetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class NamedTemplate:
    """A turn is `header`, the content, `end`; {role} stands for the role in both."""

    header: str
    end: str
    tokens: tuple[str, ...]
    """The markers, which must be tokens."""
    end_of_turn: str
    """The marker that ends an answer."""
    assistant: str = "assistant"
    """What the template calls the assistant."""
    has_system: bool = True
    """Otherwise a system message is put before the next user turn."""
    strips: bool = True
    """Whether whitespace around the content is dropped."""
    inline_calls: bool = False
    """Calculator calls and their results stand inside the assistant's turn, between `INLINE_CALL_TOKENS`. Otherwise the
    template refuses tool calls."""

    def source(self, bos: str) -> str:
        """The template in Jinja, for a tokenizer whose texts begin with `bos`."""
        header, end = (_jinja_text(text).replace("{role}", "' + role + '") for text in (self.header, self.end))
        turn = f"'{header}' + text{'.strip()' if self.strips else ''} + '{end}'"
        system = "{% set wait.text = wait.text + message.content + '\\n\\n' %}"
        if self.has_system:
            system = "{{ turn('system', message.content) }}"
        calls = prompted = ""
        if self.inline_calls:
            opens, closes = (text.format(role=self.assistant) for text in (self.header, self.end))
            calls, prompted = _INLINE_CALLS.replace("HEADER", opens).replace("END", closes), " and not wait.result"
        lines = [
            "{% set wait = namespace(text='', result=false) %}" if calls else "{% set wait = namespace(text='') %}",
            f"{{% macro turn(role, text) %}}{{{{ {turn} }}}}{{% endmacro %}}",
            f"{{{{ '{_jinja_text(bos)}' }}}}" if bos else "",
            "{% for message in messages %}",
            calls or _REFUSED_CALLS,
            f"{{% elif message.role in ['system', 'developer'] %}}{system}",
            "{% elif message.role == 'user' %}{{ turn('user', wait.text + message.content) }}{% set wait.text = '' %}",
            f"{{% else %}}{{{{ turn('{self.assistant}', message.content) }}}}{{% endif %}}",
            "{% endfor %}",
            f"{{% if add_generation_prompt{prompted} %}}",
            f"{{% set role = '{self.assistant}' %}}{{{{ '{header}' }}}}{{% endif %}}",
        ]
        return "".join(lines)


INLINE_CALL_TOKENS = ("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>")
"""nanochat's special tokens: an expression between the first two, its value between the last two."""

_REFUSED_CALLS = (
    "{% if message.tool_calls or message.role not in ['system', 'developer', 'user', 'assistant'] %}"
    "{{ raise_exception('this template has no form for tool calls and their results') }}"
)
_INLINE_CALLS = (
    "{% if wait.result and message.role not in ['tool', 'assistant'] %}"
    "{{ raise_exception('a calculator call has no result, or no answer follows it') }}"
    "{% elif message.role == 'tool' %}{{ '<|output_start|>' + message.content + '<|output_end|>' }}"
    "{% elif message.tool_calls and (message.tool_calls | length > 1 "
    "or message.tool_calls[0].function.name != 'calculator') %}"
    "{{ raise_exception('this template has a form for calculator calls alone, one in a message') }}"
    "{% elif message.tool_calls %}{{ ('' if wait.result else 'HEADER') + message.content + '<|python_start|>' "
    "+ message.tool_calls[0].function.arguments.expression + '<|python_end|>' }}{% set wait.result = true %}"
    "{% elif wait.result %}{{ message.content + 'END' }}{% set wait.result = false %}"
)
"""The branches for messages with calls, their results, and the rest of such a turn: a call leaves the turn open."""


def _jinja_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")


NAMED_TEMPLATES = {
    "chatml": NamedTemplate(
        "<|im_start|>{role}\n", "<|im_end|>\n", ("<|im_start|>", "<|im_end|>"), end_of_turn="<|im_end|>",
        strips=False,
    ),
    "llama3": NamedTemplate(
        "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), end_of_turn="<|eot_id|>",
    ),
    "gemma": NamedTemplate(
        "<start_of_turn>{role}\n", "<end_of_turn>\n", ("<start_of_turn>", "<end_of_turn>"),
        end_of_turn="<end_of_turn>", assistant="model", has_system=False,
    ),
    "nanochat": NamedTemplate(
        "<|{role}_start|>", "<|{role}_end|>",
        ("<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>", *INLINE_CALL_TOKENS),
        end_of_turn="<|assistant_end|>", has_system=False, strips=False, inline_calls=True,
    ),
}  # fmt: skip
"""In the form that the models of these names use."""


def set_named_template(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """Set a template by name, whose tokens are there. Its marker of an answer's end becomes `eot_token`."""
    from whet.compat.transformers_private import set_special_token  # imports torch

    template = NAMED_TEMPLATES[name]
    begins_with_bos = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    tokenizer.chat_template = template.source(str(tokenizer.bos_token) if begins_with_bos else "")
    set_special_token(tokenizer, "eot_token", template.end_of_turn)
    tokenizer.init_kwargs["eot_token"] = template.end_of_turn


def is_template_token(text: str) -> bool:
    """Whether a named template has this marker."""
    return any(text in template.tokens for template in NAMED_TEMPLATES.values())


# Turn markers: the special tokens around the turns of marked text, and the chat template that writes them.


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
