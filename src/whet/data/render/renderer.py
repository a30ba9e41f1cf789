"""Render a conversation with any chat template to token ids and an exact loss mask.

The ids are those of transformers' `apply_chat_template` for the whole conversation. The mask marks what the model has
to produce: text, reasoning and tool calls of the assistant, and the end of each turn. Few templates mark these
characters, and searching the output for the answer fails as soon as a template strips, repeats or rewrites text.
Instead, *sentinel rendering* traces each character of the output to where it came from:

1. Render the conversation twice: as it is, and with each character of the messages replaced by a sentinel, a code point
   that Unicode does not assign, a different one each (`whet.data.render.sentinels`). If restoring the characters gives
   the first rendering, every character of it is known to come from a certain message or from the template.

       rendered    <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎Yes<|im_end|>⏎
       sentinels   <|im_start|>user⏎01<|im_end|>⏎<|im_start|>assistant⏎234<|im_end|>⏎
       supervised                                                     ^^^^^^^^^^^^^

2. Start of an assistant turn: where its generation prompt ends. Render the messages before it with
   `add_generation_prompt=True`. What follows their last sentinel there and in the whole rendering has a common prefix:
   the header. What comes after it, the model has to produce. All of the prompt must be there, except a reasoning
   prefill such as `<think>` that the turn has not; no marker is cut in two. Whitespace at the end of the prompt is
   left to the model where the tokenizer merges it with the first word of an answer (`whet.data.render.prompt_encoder`).
3. End of the turn: render the messages up to and including it. What follows the turn there and in the whole rendering
   has a common prefix, too. The first stop token in it, else the last marker, is the end-of-turn marker. It is
   supervised, because the model must learn to stop; whitespace after it is not. Where the template always appends a
   generation prompt, the first marker is taken, and one more question must leave it in place.
4. Encode the rendered text once and map the spans of characters to tokens by the tokenizer's offsets. A token that
   straddles the start of an answer is supervised if it holds text of the answer, and is not if it holds whitespace
   alone.
5. Cache the layout by the structure of the conversation (`whet.data.render.layout_cache`), because rendering costs as
   much as encoding.

Masks are exact or refused: where a step fails (the template rewrites, repeats, reorders or drops text, has no common
header or no end of turn), the conversation is refused with the reason. Nothing is guessed.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.core.errors import BadRecordError, WhetError
from whet.data.conversation import Conversation, MarkedText, Message, Origin, PlainText
from whet.data.render.layout_cache import REASONING_TAG, Layout, LayoutCache, Span
from whet.data.render.prompt_encoder import FIRST_WORDS, PromptEncoder
from whet.data.render.sentinels import SentinelMessages, SentinelRendering, text_slots
from whet.data.render.shared_prefix import PrefixedEncoding, SharedPrefixEncoder, common_prefix_length
from whet.tokenizer.chat_template import ChatTemplate, check_rendered_length, template_limits

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast

NO_SUPERVISED_TOKENS = "nothing to learn"
"""The ledger's reason for a conversation without supervised tokens: dropped, and not an error."""
CONTROL_TOKENS_IN_TEXT, REASONING_DROPPED = "control tokens in the text", "reasoning left out by the template"
TOOLS_DROPPED, PREFILL_MISSING = "tools left out by the template", "reasoning tag only in the prompt"
"""The ledger's notes on conversations that are kept."""


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


@dataclass(frozen=True, slots=True)
class Rendered:
    """A tokenized conversation or document: `loss[i] = 1` means that token i is a target."""

    ids: NDArray[np.int32]
    loss: NDArray[np.uint8]
    supervises_end: bool
    """Every supervised turn includes its end-of-turn token."""
    notes: tuple[str, ...] = ()
    """What the ledger counts about it although it is kept."""


class LayoutMismatchError(Exception):
    """A cached layout differs from the full rendering: the template depends on the text, so nothing may be cached."""


class Renderer:
    """Renders conversations with one tokenizer and one chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        train_on: str,
        stop_ids: Sequence[int] = (),
        today: str | None = None,
        template: str | None = None,
        cached: bool = True,
    ) -> None:
        """`template` replaces the tokenizer's own; `cached=False` renders every conversation in full."""
        if not getattr(tokenizer, "is_fast", False):
            raise WhetError(
                f"the tokenizer of {tokenizer.name_or_path} is a slow tokenizer, which gives no token offsets. "
                "Use a model folder with a tokenizer.json"
            )
        self.tokenizer = tokenizer
        self.train_on = train_on
        self._chat_template = ChatTemplate(
            template or _get_chat_template(tokenizer), tokenizer.special_tokens_map, today
        )
        self.today, self.template = self._chat_template.today, self._chat_template.source
        self._template_constants = self._chat_template.constants()
        self._content_parts = _needs_content_parts(self._chat_template)
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()

        # Markers are added tokens, special or not, that are more than whitespace.
        added = tokenizer.added_tokens_decoder
        self._markers = {token.content: i for i, token in added.items() if token.content.strip()}
        self._marker_pattern = _match_any(self._markers)
        stops = {tokenizer.eos_token_id, *stop_ids} - {None}
        self.stop_markers = sorted(text for text, i in self._markers.items() if i in stops)
        self._stop_pattern = _match_any(self.stop_markers)
        special = [text for text, i in self._markers.items() if added[i].special]
        self._special_pattern = _match_any(special)
        self._is_special = np.zeros(max([len(tokenizer), *(i + 1 for i in self._markers.values())]), dtype=bool)
        self._is_special[[self._markers[text] for text in special]] = True

        self._prompt_encoder = PromptEncoder(self._backend, self._marker_pattern)
        self._prefix_encoder = SharedPrefixEncoder(
            self._backend, _isolating_special_tokens(tokenizer) if cached else ()
        )
        self._end_of_turn_markers: dict[bool, str | None] = {}
        self._question = PROBE.messages[0].as_dict(self._content_parts)
        self._layout_cache = None
        if cached:
            self._layout_cache = LayoutCache(
                self._chat_template, self._content_parts, train_on, self._special_pattern,
                lambda text: self._backend.encode(text, add_special_tokens=False).ids,
            )  # fmt: skip

    def render_items(self, items: Sequence[Conversation | PlainText | MarkedText]) -> list[Rendered | BadRecordError]:
        """Ids and loss mask of each item, in order, or the error that refuses it. All are encoded together."""
        layouts: list[Layout | BadRecordError] = []
        texts: list[PlainText] = []
        with template_limits():  # once for all renderings, each of which starts the time anew
            for item in items:
                if isinstance(item, PlainText):
                    texts.append(item)
                elif isinstance(item, Conversation):
                    try:
                        layouts.append(self.layout(item))
                    except BadRecordError as error:
                        layouts.append(error)
                else:
                    layouts.append(BadRecordError("marked text", "text with markers requires data.markers"))
        encoded = iter(self.encode_layouts([layout for layout in layouts if isinstance(layout, Layout)]))
        conversations = (next(encoded) if isinstance(layout, Layout) else layout for layout in layouts)
        documents = iter(self.render_documents(texts))
        return [next(documents) if isinstance(item, PlainText) else next(conversations) for item in items]

    def render_documents(self, documents: Sequence[PlainText]) -> list[Rendered | BadRecordError]:
        """Plain text: the ids that the tokenizer gives, then EOS; all are supervised but the first."""
        eos = self.tokenizer.eos_token_id
        rendered: list[Rendered | BadRecordError] = []
        for encoding in self._backend.encode_batch([document.text for document in documents]):
            ids = encoding.ids if eos is None or encoding.ids[-1:] == [eos] else [*encoding.ids, eos]
            loss = np.ones(len(ids), dtype=np.uint8)
            loss[:1] = 0
            rendered.append(Rendered(np.array(ids, dtype=np.int32), loss, supervises_end=eos is not None))
        return rendered

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        """The text that transformers renders. Content becomes a list of parts where the template requires it."""
        if self._content_parts:
            messages = [_with_content_parts(message) for message in messages]
        try:
            with template_limits():
                text = str(
                    self.tokenizer.apply_chat_template(
                        list(messages), tools=list(tools) or None, chat_template=self.template, tokenize=False,
                        add_generation_prompt=add_generation_prompt,
                    )
                )  # fmt: skip
            return check_rendered_length(text, messages, tools)
        except WhetError:
            raise
        except Exception as error:  # a template is a foreign program: it can raise anything
            raise BadRecordError("template refuses", f"the chat template refuses it: {error}") from None

    def prompt_ids(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The ids to generate an answer from: those that come before it in training."""
        return self.encode_prompt(self.apply_chat_template(messages, add_generation_prompt=True, tools=tools))

    def encode_prompt(self, prompt: str) -> list[int]:
        """The ids of a rendered prompt."""
        return self._prompt_encoder.encode(prompt)

    def decode_answer(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a generated answer, without the whitespace that the text of its prompt ends with."""
        text = str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
        return text.removeprefix(self._generated_whitespace)

    @cached_property
    def _generated_whitespace(self) -> str:
        """What generated answers begin with, as it is decoded, because `prompt_ids` ends before it."""
        try:
            prompt = self.apply_chat_template([Message("user", "Hi").as_dict()], add_generation_prompt=True)
        except BadRecordError:
            return ""
        if not self._prompt_encoder.open_end(prompt):
            return ""
        ids = self._backend.encode(prompt + FIRST_WORDS[0], add_special_tokens=False).ids
        return str(self.tokenizer.decode(ids[len(self.encode_prompt(prompt)) :])).removesuffix(FIRST_WORDS[0])

    def reference_ids(self, conversation: Conversation) -> list[int]:
        """The ids that transformers gives for the whole conversation."""
        conversation, _ = self._render_text(conversation)
        messages = [message.as_dict(self._content_parts) for message in conversation.messages]
        with template_limits():
            return list(
                self.tokenizer.apply_chat_template(
                    messages, tools=list(conversation.tools) or None, chat_template=self.template, return_dict=False
                )
            )

    def supervised_header(self) -> str:
        """What the template writes before an answer and the model learns, for want of a generation prompt."""
        try:
            if not self._ignores_prompt_flag([self._question], ()):
                return ""
            layout = self._compute_layout(PROBE, "assistant")
        except BadRecordError:
            return ""
        header = layout.text[layout.spans[0][0] :].partition(PROBE.messages[1].content)[0]
        return header if header.strip() else ""

    def end_of_turn(self) -> int | None:
        """The id that ends an answer in this template; None if there is no exact one."""
        marker = self._end_of_turn_marker(()) or self._end_of_turn_marker((PROBE_TOOL,))
        return None if marker is None else self._markers[marker]

    def _end_of_turn_marker(self, tools: Sequence[dict[str, Any]]) -> str | None:
        """What ends a plain answer; found once without tools and once with some, since templates may require them."""
        if bool(tools) not in self._end_of_turn_markers:
            try:
                layout = self._compute_layout(replace(PROBE, tools=tuple(tools)), "assistant")
                _, start, end = layout.spans[0]
                self._end_of_turn_markers[bool(tools)] = layout.text[start:end] or None
            except BadRecordError:
                self._end_of_turn_markers[bool(tools)] = None
        return self._end_of_turn_markers[bool(tools)]

    # Steps 1 to 3 and 5: the rendered text and its supervised spans of characters.

    def layout(self, conversation: Conversation) -> Layout:
        """The rendered text and its supervised spans, from the cache where possible."""
        cached = None if self._layout_cache is None else self._layout_cache.get(conversation)
        if self._layout_cache is None or cached is None:
            return self._compute_layout(conversation, self.train_on)
        if self._layout_cache.should_verify(conversation) and not self._matches_full_render(cached, conversation):
            raise LayoutMismatchError(f"{conversation.origin}: the cached layout differs from the full rendering")
        return cached

    def _matches_full_render(self, cached: Layout, conversation: Conversation) -> bool:
        """Whether the full rendering has the same text and spans, and offsets give the same ids and mask."""
        try:
            if cached != self._compute_layout(conversation, self.train_on):
                return False
        except BadRecordError:
            return False
        fast, full = self.encode_layouts([cached, replace(cached, fast_mask=None)])
        if not isinstance(fast, Rendered) or not isinstance(full, Rendered):
            return str(fast) == str(full)
        return np.array_equal(fast.ids, full.ids) and np.array_equal(fast.loss, full.loss)

    def _compute_layout(self, conversation: Conversation, train_on: str) -> Layout:
        conversation, text = self._render_text(conversation)
        messages, tools = conversation.messages, list(conversation.tools)
        excluded = [i for i, message in enumerate(messages) if message.train is False]
        turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if train_on != "all" and not turns:
            raise BadRecordError("no assistant turn", "no message has the role 'assistant', so nothing is supervised")
        try:
            sentinels, rendering = self._render_sentinels(messages, tools, text)
        except BadRecordError:
            if train_on == "all" and not excluded:
                return Layout(text, (), supervise_all=True)
            raise
        missing_prefills: tuple[str, ...] = ()
        if train_on == "all":
            spans = tuple((start, end, end) for start, end in map(rendering.message_span, excluded))
        else:
            supervised = [i for i in (turns[-1:] if train_on == "last" else turns) if i not in excluded]
            if not supervised:
                raise BadRecordError(NO_SUPERVISED_TOKENS, "every assistant turn is excluded from training")
            found = [self._supervised_span(sentinels, rendering, text, turn, tools) for turn in supervised]
            spans = tuple(span for span, _ in found)
            missing_prefills = tuple(sorted({prefill for _, prefill in found if prefill}))
        from_messages = sentinels.count_unreplaced(self._special_pattern)
        layout = Layout(
            text,
            spans,
            supervise_all=train_on == "all",
            reasoning_dropped=rendering.reasoning_dropped,
            missing_prefills=missing_prefills,
            tools_dropped=bool(tools) and self._ignores_tools(messages, text),
            template_special_tokens=len(self._special_pattern.findall(rendering.text)) - from_messages,
        )
        dropped = layout.reasoning_dropped or layout.tools_dropped
        if self._layout_cache is not None and train_on == self.train_on and not dropped:
            self._layout_cache.add(conversation, layout, sentinels.text_spans(rendering))
        return layout

    def _render_text(self, conversation: Conversation) -> tuple[Conversation, str]:
        """The conversation as the template takes it, and its text.

        Some templates concatenate or print the arguments of tool calls, which are objects: these get text.
        """

        def render(given: Conversation) -> str:
            messages = [message.as_dict(self._content_parts) for message in given.messages]
            return self.apply_chat_template(messages, tools=given.tools)

        try:
            text = render(conversation)
            if not _prints_python(conversation, text):
                return conversation, text
            error = BadRecordError("template rewrites", "the chat template prints the arguments of a call as Python")
        except BadRecordError as refused:
            error = refused
        try:
            if any(message.tool_calls for message in conversation.messages):
                with_text = conversation.with_text_arguments()
                return with_text, render(with_text)
        except BadRecordError:  # it is not the arguments
            pass
        raise error

    def _ignores_tools(self, messages: Sequence[Message], text: str) -> bool:
        return self._render_or_none([message.as_dict(self._content_parts) for message in messages]) == text

    def _ignores_prompt_flag(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> bool:
        """Whether the template always appends a generation prompt, or never."""
        return self._render_or_none(messages, tools) == self._chat_template.render(messages, tools, prompt=True)

    def _render_or_none(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str | None:
        """The rendered messages; None where the template refuses them, as some do without tools."""
        try:
            return self._chat_template.render(messages, tools)
        except BadRecordError:
            return None

    def _render_sentinels(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], text: str
    ) -> tuple[SentinelMessages, SentinelRendering]:
        """Step 1. If sentinels change what the template does, quotes and the constants that it compares with stay."""
        slots = text_slots(messages)
        sentinels = SentinelMessages(messages, slots, self._content_parts)
        try:
            return sentinels, sentinels.verify(text, self._chat_template.render(sentinels.messages, tools))
        except BadRecordError:
            sentinels = SentinelMessages(messages, slots, self._content_parts, self._template_constants)
            return sentinels, sentinels.verify(text, self._chat_template.render(sentinels.messages, tools))

    def _supervised_span(
        self,
        sentinels: SentinelMessages,
        rendering: SentinelRendering,
        text: str,
        turn: int,
        tools: Sequence[dict[str, Any]],
    ) -> tuple[Span, str]:
        """Steps 2 and 3: the span of an assistant turn, from the end of its header to the end of its marker, and the
        reasoning prefill of its generation prompt that it has not."""
        if turn == 0:
            raise BadRecordError(
                "starts with the assistant", "message 1 is the assistant's, so there is no prompt before it"
            )
        first, last = rendering.message_span(turn)
        previous = rendering.end_of_previous_sentinel(first)

        prompt = sentinels.tail(self._chat_template.render(sentinels.messages[:turn], tools, prompt=True))
        header = self._header_length(prompt, text[previous:last], turn)
        start = previous + header
        if header == len(prompt) and not text[start].isspace():
            start -= self._prompt_encoder.open_end(f"x{prompt}")  # x: the message before it
        marker, end = self._end_of_turn(sentinels, turn, tools, rendering.text[last:])
        return (start, last + marker, last + end), prompt[header:].strip()

    def _header_length(self, prompt: str, text: str, turn: int) -> int:
        """How many characters the generation prompt and a turn have in common, both from the text before them on.

        All that the prompt has must be in the turn, except a reasoning prefill, of which no tag is cut in two.
        """
        header = same = common_prefix_length(prompt, text)
        if header < len(prompt):
            prefill = _REASONING_PREFILL.search(prompt)
            whole = [*self._marker_pattern.finditer(text), *REASONING_TAG.finditer(prompt)]
            header = min([header, *(each.start() for each in whole if each.start() < header < each.end())])
            header = header if prefill and header >= prefill.start() else 0
        if not prompt:
            raise BadRecordError(
                "no common header",
                f"the chat template writes nothing before message {turn + 1} that would tell the model to answer",
            )
        if not header:
            raise BadRecordError(
                "no common header",
                f"the chat template starts message {turn + 1} differently from its generation prompt, which has "
                f"{prompt[same : same + _SHOWN]!r} where the message has {text[same : same + _SHOWN]!r}",
            )
        return header

    def _end_of_turn(
        self, sentinels: SentinelMessages, turn: int, tools: Sequence[dict[str, Any]], following: str
    ) -> tuple[int, int]:
        """Step 3: (start, end) of the end-of-turn marker in `following`, what comes after the turn."""
        messages = sentinels.messages[: turn + 1]
        tail = sentinels.tail(self._chat_template.render(messages, tools))
        own, met = self._stop_pattern.search(tail), self._stop_pattern.search(following)
        if met and following[: met.start()] == tail[: own.start() if own else None]:
            return met.span()
        shared = tail[: common_prefix_length(tail, following)]
        may_prompt = self._ignores_prompt_flag(messages[:turn], tools)
        if may_prompt:
            answered = self._render_or_none([*messages, self._question], tools)
            shared = shared if answered is None else shared[: common_prefix_length(shared, sentinels.tail(answered))]
        markers = list(self._marker_pattern.finditer(shared))
        if "tool_calls" in messages[turn]:  # the marker that closes a call does not end the turn
            markers = [marker for marker in markers if marker.group() == self._end_of_turn_marker(tools)]
        if markers:
            return markers[0 if may_prompt else -1].span()
        own, met = self._marker_pattern.match(tail), self._marker_pattern.match(following)
        if own and met and own.group() != met.group() and not may_prompt:
            return 0, 0  # the template rewrites the ends of earlier turns
        raise BadRecordError(
            "no end of turn",
            f"the chat template writes no end-of-turn token after message {turn + 1}, so the model could not learn to "
            f"stop. {self._end_of_turn_remedy(tools)}",
        )

    def _end_of_turn_remedy(self, tools: Sequence[dict[str, Any]]) -> str:
        question, answer = (message.as_dict(self._content_parts) for message in PROBE.messages)
        alone, answered = (
            (self._render_or_none(messages, tools) or "").partition(PROBE.messages[1].content)[2]
            for messages in ([question, answer], [question, answer, question])
        )
        stop = self._stop_pattern.search(answered)
        if stop and answered[: stop.start()] == alone:
            line = f"{{%- if not add_generation_prompt %}}{{{{ {stop.group()!r} }}}}{{% endif %}}"
            return f"Append {line} to a copy of the template, and use that: data.template=COPY.jinja"
        token = self.tokenizer.eos_token or "an end-of-turn token"
        return f"Write {token} after each answer and call in a copy of the template: data.template=COPY.jinja"

    # Step 4: characters to tokens.

    def encode_layouts(self, layouts: Sequence[Layout]) -> list[Rendered | BadRecordError]:
        """Ids and loss masks. Each text is encoded once; all are encoded together."""
        fast = [layout for layout in layouts if layout.fast_mask is not None]
        slow = [layout for layout in layouts if layout.fast_mask is None]
        without_offsets = iter(self._prefix_encoder.encode([layout.text for layout in fast], offsets=False))
        with_offsets = iter(self._prefix_encoder.encode([layout.text for layout in slow]))
        return [
            self._mask_from_offsets(layout, next(with_offsets))
            if layout.fast_mask is None
            else self._mask_from_special_tokens(layout, next(without_offsets))
            for layout in layouts
        ]

    def _mask_from_special_tokens(self, layout: Layout, encoding: PrefixedEncoding) -> Rendered | BadRecordError:
        assert layout.fast_mask is not None
        ids = np.frombuffer(array("i", encoding.ids), dtype=np.int32)
        loss = layout.fast_mask.compute(ids, self._is_special)
        if loss is None:
            return self._mask_from_offsets(layout, self._prefix_encoder.encode([layout.text])[0])
        supervises_end = all(span.supervises_end for span in layout.fast_mask.spans)
        return Rendered(ids, loss, supervises_end, tuple(_layout_notes(layout)))

    def _mask_from_offsets(self, layout: Layout, encoding: PrefixedEncoding) -> Rendered | BadRecordError:
        ids = np.frombuffer(array("i", encoding.ids), dtype=np.int32)
        loss = (np.ones if layout.supervise_all else np.zeros)(len(ids), dtype=np.uint8)
        supervises_end = True
        for start, marker, end in layout.spans:
            found = _token_span(encoding, layout.text, (start, marker, end), layout.supervise_all)
            if found is None:
                return BadRecordError(
                    "markers are no tokens",
                    "the tokenizer merges the template's end-of-turn marker with other text, so no exact mask exists",
                )
            loss[found[0] : found[1]] = not layout.supervise_all
            supervises_end &= marker < end
        if layout.supervise_all:
            loss[:1] = 0  # the first token has no context to be predicted from
            supervises_end = layout.text.rstrip().endswith(tuple(self.stop_markers))
        notes = _layout_notes(layout)
        from_template = layout.template_special_tokens
        if from_template is not None and np.count_nonzero(self._is_special[ids]) > from_template:
            notes.append(CONTROL_TOKENS_IN_TEXT)
        return Rendered(ids, loss, supervises_end, tuple(notes))


def _prints_python(conversation: Conversation, text: str) -> bool:
    """Whether the text has the arguments of a tool call as Python prints a dict, and not because a message has."""
    contents = [message.content for message in conversation.messages]
    calls = [str(call.arguments) for message in conversation.messages for call in message.tool_calls if call.arguments]
    return any(call in text and not any(call in content for content in contents) for call in calls)


def _layout_notes(layout: Layout) -> list[str]:
    dropped = {REASONING_DROPPED: layout.reasoning_dropped, TOOLS_DROPPED: layout.tools_dropped}
    return [note for note, applies in {**dropped, PREFILL_MISSING: layout.missing_prefills}.items() if applies]


def _token_span(encoding: PrefixedEncoding, text: str, span: Span, overlapping: bool) -> tuple[int, int] | None:
    """The tokens of a span of characters: (first, end).

    With `overlapping`, every token that has a character of the span. Otherwise the tokens up to and including the
    end-of-turn marker, which must be a token by itself. A token that straddles the start belongs to the header if it
    holds nothing but whitespace of the span.
    """
    start, marker, end = span
    first = next((t for t in map(encoding.char_to_token, range(start, marker + 1)) if t is not None), None)
    if overlapping:
        last = next((t for t in map(encoding.char_to_token, range(end - 1, start - 1, -1)) if t is not None), None)
        return None if first is None or last is None else (first, last + 1)
    last = encoding.char_to_token(marker)
    if first is None or last is None or encoding.token_start(last) != marker:
        return None
    while first > 0 and encoding.token_end(first - 1) > start:  # some tokenizers exclude spaces from offsets
        first -= 1
    straddles = first > 0 and encoding.token_end(first - 1) < start
    if straddles and not text[start : encoding.token_end(first)].strip():
        first += 1
    return first, last + (marker < end)


_REASONING_PREFILL = re.compile(rf"\s*((?:{REASONING_TAG.pattern})\s*)+$", re.IGNORECASE)
"""What opens reasoning at the end of a generation prompt, such as `<think>⏎`; a turn without reasoning has it not."""
_SHOWN = 40  # characters of a text in a message


def _match_any(texts: Sequence[str] | dict[str, int]) -> re.Pattern[str]:
    """Matches any of the texts, the longest where several fit; nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _get_chat_template(tokenizer: PreTrainedTokenizerFast) -> str:
    if not tokenizer.chat_template:
        raise WhetError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template. Use the chat (instruct) version of the "
            "model, add a chat_template.jinja to its folder, or give a template: data.template=FILE.jinja"
        )
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:  # several named templates without a default
        raise WhetError(f"the tokenizer of {tokenizer.name_or_path}: {error}. Choose one: data.template=NAME") from None


def _isolating_special_tokens(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Special tokens that split the text without stripping or normalizing anything around them."""
    return [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
    ]


def _with_content_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _needs_content_parts(template: ChatTemplate) -> bool:
    """Whether the template prints content only as a list of parts, as those of vision models do."""

    def prints(content_parts: bool, tools: Sequence[dict[str, Any]] = ()) -> bool:
        try:
            return "Hello" in template.render([Message("user", "Hello").as_dict(content_parts)], tools)
        except BadRecordError:  # perhaps it requires tools
            return not tools and prints(content_parts, [PROBE_TOOL])

    return not prints(False) and prints(True)
