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
   the header. What comes after it, the model has to produce.
3. End of the turn: render the messages up to and including it. What follows the turn there and in the whole rendering
   has a common prefix, too. The first stop token in it, else the last marker, is the end-of-turn marker. It is
   supervised, because the model must learn to stop; whitespace after it is not.
4. Encode the rendered text once and map the spans of characters to tokens by the tokenizer's offsets.
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
from whet.data.render.layout_cache import Layout, LayoutCache, Span
from whet.data.render.sentinels import SentinelMessages, SentinelRendering, text_slots
from whet.data.render.shared_prefix import PrefixedEncoding, SharedPrefixEncoder, common_prefix_length
from whet.tokenizer.chat_template import ChatTemplate, check_rendered_length, template_limits

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast

NO_SUPERVISED_TOKENS = "nothing to learn"
"""The ledger's reason for a conversation without supervised tokens: dropped, and not an error."""
CONTROL_TOKENS_IN_TEXT, REASONING_DROPPED = "control tokens in the text", "reasoning left out by the template"
TOOLS_DROPPED = "tools left out by the template"
"""The ledger's notes on conversations that are kept."""


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
        special = [text for text, i in self._markers.items() if added[i].special]
        self._special_pattern = _match_any(special)
        self._is_special = np.zeros(max([len(tokenizer), *(i + 1 for i in self._markers.values())]), dtype=bool)
        self._is_special[[self._markers[text] for text in special]] = True

        self._prefix_encoder = SharedPrefixEncoder(
            self._backend, _isolating_special_tokens(tokenizer) if cached else ()
        )
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
        """The ids to generate an answer from."""
        text = self.apply_chat_template(messages, add_generation_prompt=True, tools=tools)
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def reference_ids(self, conversation: Conversation) -> list[int]:
        """The ids that transformers gives for the whole conversation."""
        messages = [message.as_dict(self._content_parts) for message in conversation.messages]
        with template_limits():
            return list(
                self.tokenizer.apply_chat_template(
                    messages, tools=list(conversation.tools) or None, chat_template=self.template, return_dict=False
                )
            )

    def end_of_turn(self) -> int | None:
        """The id that ends an answer in this template; None if there is no exact one."""
        return None if self._end_of_turn_marker is None else self._markers[self._end_of_turn_marker]

    @cached_property
    def _end_of_turn_marker(self) -> str | None:
        probe = Conversation((Message("user", "Hi"), Message("assistant", "Yes")), Origin("probe", 1))
        try:
            layout = self._compute_layout(probe, "assistant")
        except BadRecordError:
            return None
        _, start, end = layout.spans[0]
        return layout.text[start:end]

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
        messages, tools = conversation.messages, list(conversation.tools)
        dicts = [message.as_dict(self._content_parts) for message in messages]
        text = self.apply_chat_template(dicts, tools=tools)
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
        if train_on == "all":
            spans = tuple((start, end, end) for start, end in map(rendering.message_span, excluded))
        else:
            supervised = [i for i in (turns[-1:] if train_on == "last" else turns) if i not in excluded]
            if not supervised:
                raise BadRecordError(NO_SUPERVISED_TOKENS, "every assistant turn is excluded from training")
            spans = tuple(self._supervised_span(sentinels, rendering, turn, tools) for turn in supervised)
        from_messages = sentinels.count_unreplaced(self._special_pattern)
        layout = Layout(
            text,
            spans,
            supervise_all=train_on == "all",
            reasoning_dropped=rendering.reasoning_dropped,
            tools_dropped=bool(tools) and self._chat_template.render(dicts) == text,
            template_special_tokens=len(self._special_pattern.findall(rendering.text)) - from_messages,
        )
        dropped = layout.reasoning_dropped or layout.tools_dropped
        if self._layout_cache is not None and train_on == self.train_on and not dropped:
            self._layout_cache.add(conversation, layout, sentinels.text_spans(rendering))
        return layout

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
        self, sentinels: SentinelMessages, rendering: SentinelRendering, turn: int, tools: Sequence[dict[str, Any]]
    ) -> Span:
        """Steps 2 and 3: the span of an assistant turn, from the end of its header to the end of its marker."""
        if turn == 0:
            raise BadRecordError(
                "starts with the assistant", "message 1 is the assistant's, so there is no prompt before it"
            )
        first, last = rendering.message_span(turn)
        previous = rendering.end_of_previous_sentinel(first)

        # The header. What the turn has beyond it must be its own text, unless the generation prompt ends there.
        prompt = self._chat_template.render(sentinels.messages[:turn], tools, prompt=True)
        prompt = prompt[sentinels.end_of_last_sentinel(prompt) :]
        opening = rendering.text[previous:first]
        header = common_prefix_length(prompt, opening)
        is_own = header == len(prompt) or sentinels.content_of(turn).startswith(opening[header:])
        cuts_marker = any(marker.start() < header < marker.end() for marker in self._marker_pattern.finditer(opening))
        if header == 0 or not (is_own or _is_in_prefill(prompt, header)) or cuts_marker:
            raise BadRecordError(
                "no common header",
                f"the chat template starts message {turn + 1} differently from its generation prompt",
            )
        start = previous + header

        # The end-of-turn marker.
        alone = self._chat_template.render(sentinels.messages[: turn + 1], tools)
        tail, following = alone[sentinels.end_of_last_sentinel(alone) :], rendering.text[last:]
        markers = list(self._marker_pattern.finditer(tail[: common_prefix_length(tail, following)]))
        ends = [marker for marker in markers if marker.group() in self.stop_markers] or markers[-1:]
        if "tool_calls" in sentinels.messages[turn]:  # the marker that closes a call does not end the turn
            ends = [marker for marker in ends if marker.group() in (*self.stop_markers, self._end_of_turn_marker)]
        if ends:
            return start, last + ends[0].start(), last + ends[0].end()
        own_end, end = self._marker_pattern.match(tail), self._marker_pattern.match(following)
        if own_end and end and own_end.group() != end.group():  # the template rewrites the ends of earlier turns
            return start, last, last
        raise BadRecordError(
            "no end of turn",
            f"the chat template writes no end-of-turn token after message {turn + 1}, so the model could not learn to "
            "stop",
        )

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
        return Rendered(ids, loss, supervises_end=all(span.supervises_end for span in layout.fast_mask.spans))

    def _mask_from_offsets(self, layout: Layout, encoding: PrefixedEncoding) -> Rendered | BadRecordError:
        ids = np.frombuffer(array("i", encoding.ids), dtype=np.int32)
        loss = (np.ones if layout.supervise_all else np.zeros)(len(ids), dtype=np.uint8)
        supervises_end = True
        for start, marker, end in layout.spans:
            found = _token_span(encoding, start, marker, end, layout.supervise_all)
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
        notes = [REASONING_DROPPED] if layout.reasoning_dropped else []
        if layout.tools_dropped:
            notes.append(TOOLS_DROPPED)
        from_template = layout.template_special_tokens
        if from_template is not None and np.count_nonzero(self._is_special[ids]) > from_template:
            notes.append(CONTROL_TOKENS_IN_TEXT)
        return Rendered(ids, loss, supervises_end, tuple(notes))


def _token_span(
    encoding: PrefixedEncoding, start: int, marker: int, end: int, overlapping: bool
) -> tuple[int, int] | None:
    """The tokens of a span of characters: (first, end).

    With `overlapping`, every token that has a character of the span. Otherwise the tokens that start in it, because a
    token that straddles its start belongs to the header, up to and including the end-of-turn marker, which must be a
    token by itself.
    """
    first = encoding.char_to_token(start)
    while first is None and start < marker:  # some characters have no token
        start += 1
        first = encoding.char_to_token(start)
    if overlapping:
        last = next((t for t in map(encoding.char_to_token, range(end - 1, start - 1, -1)) if t is not None), None)
        return None if first is None or last is None else (first, last + 1)
    last = encoding.char_to_token(marker)
    if first is None or last is None or encoding.token_start(last) != marker:
        return None
    straddles = encoding.token_start(first) < start
    return first + straddles, last + (marker < end)


_REASONING_PREFILL = re.compile(r"\s*([<\[][^<>\[\]]*think[^<>\[\]]*[>\]]\s*)+$", re.IGNORECASE)


def _is_in_prefill(prompt: str, position: int) -> bool:
    """Whether the position is inside a reasoning prefill such as `<think>⏎` at the end of a generation prompt, which a
    turn without reasoning does not have."""
    prefill = _REASONING_PREFILL.search(prompt)
    return prefill is not None and position >= prefill.start()


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

    def prints(content_parts: bool) -> bool:
        try:
            return "Hello" in template.render([Message("user", "Hello").as_dict(content_parts)])
        except BadRecordError:
            return False

    return not prints(False) and prints(True)
