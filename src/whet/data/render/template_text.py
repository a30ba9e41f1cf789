"""What a chat template makes of messages: the text that transformers renders."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whet.core.errors import BadRecordError, WhetError
from whet.data.conversation import Conversation, Message, Origin
from whet.tokenizer.chat_template import ChatTemplate, check_rendered_length, template_limits, template_refusal
from whet.tokenizer.named_templates import INLINE_CALL_TOKENS, NAMED_TEMPLATES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROBE = Conversation(
    (Message("user", "How are you today?"), Message("assistant", "Very well, thank you.")), Origin("probe", 1)
)
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}
"""A plain question and answer, and a tool, to find out what a template does."""

Tools = Sequence[dict[str, Any]]


class TemplateText:
    """Renders messages with one chat template, in two ways: `apply` is transformers' own, and `render`, which is
    quicker and takes sentinels, must give the same."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template: str | None, today: str | None) -> None:
        """`template` replaces the tokenizer's own; `today` is the date for templates that print one."""
        self._tokenizer = tokenizer
        self.exists = bool(template or tokenizer.chat_template)
        """Base models have no template: every conversation is refused. Plain text needs none."""
        source = template or _get_chat_template(tokenizer)
        self.chat_template = ChatTemplate(source, tokenizer.special_tokens_map, today)
        self.source = self.chat_template.source
        self.calls_inline = INLINE_CALL_TOKENS[0] in self.source
        """The template writes calculator calls inside the assistant's turn, without a tool's schema in the prompt."""
        self.content_parts = _needs_content_parts(self.chat_template)
        """The template takes content as a list of parts only."""

    def require(self) -> None:
        """Raise a WhetError, with the remedy, if there is no template."""
        if not self.exists:
            others = ", ".join(sorted(set(NAMED_TEMPLATES) - {"chatml"}))
            raise WhetError(
                f"the tokenizer of {self._tokenizer.name_or_path} has no chat template, which conversations need. Add "
                f"this line under data: `template: chatml` (or {others}, or a .jinja file); or use the chat (instruct) "
                "version of the model"
            )

    def apply(self, messages: Sequence[Message], tools: Tools = (), prompt: bool = False) -> str:
        """The text that transformers renders; with `prompt`, followed by the generation prompt."""
        dicts = self.as_dicts(messages)
        try:
            with template_limits():
                text = str(
                    self._tokenizer.apply_chat_template(
                        dicts, tools=list(tools) or None, chat_template=self.source, tokenize=False,
                        add_generation_prompt=prompt,
                    )
                )  # fmt: skip
            return check_rendered_length(text, dicts, tools)
        except WhetError:
            raise
        except Exception as error:  # a template is a foreign program: it can raise anything
            raise template_refusal(error) from None

    def apply_with_arguments(self, conversation: Conversation, prompt: bool = False) -> tuple[Conversation, str]:
        """The conversation as the template takes it, and its text.

        Some templates concatenate or print content in parts, content that is null, or the arguments of tool calls,
        which are objects: these get text.
        """
        variants = [conversation]
        if any(message.part_lengths for message in conversation.messages):
            variants.append(conversation.with_joined_parts())
        if any(message.null_content for message in conversation.messages):
            variants += [variant.with_empty_content() for variant in variants]
        plain = len(variants)
        if any(message.tool_calls for message in conversation.messages):
            variants += [variant.with_text_arguments() for variant in variants]
        errors = []
        for variant in variants:
            try:
                text = self.apply(variant.messages, variant.tools, prompt)
                if not _reads_parts(variant, text):
                    errors.append(BadRecordError("template rewrites", "the chat template does not read content parts"))
                elif not _prints_arguments(variant, text) and not self._prints_null(variant, text, prompt):
                    return variant, text
                else:
                    explanation = "the chat template prints the arguments of a call as Python"
                    errors.append(BadRecordError("template rewrites", explanation))
            except BadRecordError as refused:
                errors.append(refused)
        raise errors[plain - 1]

    def _prints_null(self, conversation: Conversation, text: str, prompt: bool) -> bool:
        """Whether the text has content that is null as Python prints it."""
        if "None" not in text or not any(message.null_content for message in conversation.messages):
            return False
        try:
            empty = self.apply(conversation.with_empty_content().messages, conversation.tools, prompt)
        except BadRecordError:
            return False
        return empty.count("None") < text.count("None")

    def reference_ids(self, conversation: Conversation) -> list[int]:
        """The ids that transformers gives for the whole conversation."""
        conversation, _ = self.apply_with_arguments(conversation)
        with template_limits():
            return list(
                self._tokenizer.apply_chat_template(
                    self.as_dicts(conversation.messages), tools=list(conversation.tools) or None,
                    chat_template=self.source, return_dict=False,
                )
            )  # fmt: skip

    def as_dicts(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        return [message.as_dict(self.content_parts) for message in messages]

    def render(self, messages: Sequence[dict[str, Any]], tools: Tools = (), prompt: bool = False) -> str:
        """Like `apply`, for messages as the template takes them."""
        return self.chat_template.render(messages, tools, prompt)

    def render_or_none(self, messages: Sequence[dict[str, Any]], tools: Tools = ()) -> str | None:
        """The rendered messages; None where the template refuses them, as some do without tools."""
        try:
            return self.render(messages, tools)
        except BadRecordError:
            return None

    def ignores_prompt_flag(self, messages: Sequence[dict[str, Any]], tools: Tools = ()) -> bool:
        """Whether the template always appends a generation prompt, or never."""
        return self.render_or_none(messages, tools) == self.render(messages, tools, prompt=True)

    def ignores_tools(self, messages: Sequence[Message], text: str) -> bool:
        """Whether the messages with tools, which gave this text, give the same without."""
        return self.render_or_none(self.as_dicts(messages)) == text


def _reads_parts(conversation: Conversation, text: str) -> bool:
    """Whether the text has each part of contents that are in parts, and not as Python or JSON."""
    parts = [part for message in conversation.messages if message.part_lengths for part in message.parts]
    return all(
        part["text"].strip() in text and str(part) not in text and json.dumps(part, ensure_ascii=False) not in text
        for part in parts
    )


def _prints_arguments(conversation: Conversation, text: str) -> bool:
    """Whether the text has the arguments of a tool call as Python prints a dict, and not because a message has."""
    contents = [message.content for message in conversation.messages]
    arguments = [call.arguments for message in conversation.messages for call in message.tool_calls]
    printed = [str(each) for each in arguments if each and isinstance(each, dict)]
    return any(each in text and not any(each in content for content in contents) for each in printed)


def _get_chat_template(tokenizer: PreTrainedTokenizerFast) -> str:
    templates = tokenizer.chat_template
    if not templates:
        return "{{ raise_exception('there is no chat template') }}"
    if isinstance(templates, dict) and {"default", "tool_use"} <= templates.keys():
        return _choose_by_tools(templates["tool_use"], templates["default"])
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:  # several named templates without a default
        raise WhetError(f"the tokenizer of {tokenizer.name_or_path}: {error}. Choose one: data.template=NAME") from None


def _choose_by_tools(with_tools: str, without: str) -> str:
    """One template of two, between which transformers chooses by whether there are tools. Jinja removes the line breaks
    after the tags; the plus signs keep it from removing whitespace before them."""
    with_tools, without = (re.sub(r"\r?\n\Z", "", each) for each in (with_tools, without))  # as Jinja does at the end
    return f"{{% if tools %}}\n{with_tools}{{%+ else %}}\n{without}{{%+ endif %}}"


def _needs_content_parts(template: ChatTemplate) -> bool:
    """Whether the template prints content only as a list of parts, as those of vision models do."""

    def prints(content_parts: bool, tools: Tools = ()) -> bool:
        try:
            return "Hello" in template.render([Message("user", "Hello").as_dict(content_parts)], tools)
        except BadRecordError:  # perhaps it requires tools
            return not tools and prints(content_parts, [PROBE_TOOL])

    return not prints(False) and prints(True)
