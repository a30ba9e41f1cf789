"""Render a conversation with any chat template to token ids and an exact loss mask."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.core.errors import BadRecordError, WhetError
from whet.data.conversation import Conversation, MarkedText, Message, Origin, PlainText
from whet.data.render.layout_cache import CachedLayout, FastMask, LayoutCache, build_fast_mask
from whet.data.render.sentinels import SentinelMessages, SentinelRendering, text_slots
from whet.data.render.shared_prefix import PrefixedEncoding, SharedPrefixEncoder
from whet.tokenizer.chat_template import ChatTemplate

# Conversations → token ids and loss mask, together, exactly, for any chat template.
#
# The ids are those that `apply_chat_template` gives for the whole conversation. Most templates do not say which
# characters the model has to produce, and searching for the answer's text in the output guesses wrong as soon as a
# template strips, repeats or rewrites. So the conversation is rendered a second time with its text *dyed*: every
# character of the messages is replaced by a code point that Unicode has not assigned, a different one each. Where the
# dye comes out is where the text went:
#
# rendered   <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎Yes<|im_end|>⏎
# dyed       <|im_start|>user⏎01<|im_end|>⏎<|im_start|>assistant⏎234<|im_end|>⏎
# supervised                                                     ^^^^^^^^^^^^^
#
# A turn starts where its generation prompt ends and ends with its end-of-turn marker, which is supervised: the model
# must learn to stop. All in between is what the model has to produce: text, reasoning, tool calls. Where no exact mask
# exists, the conversation is refused with the reason; nothing is guessed.

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast


NO_SUPERVISED_TOKENS = "nothing to learn"
"""The ledger's reason for a conversation that no token is supervised in: dropped, and no fault."""
CONTROL_TOKENS_IN_TEXT, REASONING_DROPPED = "control tokens in the text", "reasoning left out by the template"
TOOLS_DROPPED = "tools left out by the template"
"""What the ledger notes of conversations that are kept."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the model sees it: `loss[i] = 1` means that token i is to be learned."""

    ids: NDArray[np.int32]
    loss: NDArray[np.uint8]
    supervises_end: bool
    """Every supervised turn ends with its end-of-turn token, supervised."""
    notes: tuple[str, ...] = ()
    """What the ledger should count about it although it is kept."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The text of a conversation and the character spans that the model has to produce."""

    text: str
    spans: tuple[tuple[int, int, int], ...]
    """(start, start of the end-of-turn marker, end) of each supervised turn; the last two are equal where the template
    rewrites the ends of earlier turns, so that there is none to learn."""
    supervise_all: bool = False
    """All of it is to be learned, but for `spans`, which are left out."""
    reasoning_dropped: bool = False
    tools_dropped: bool = False
    template_special_tokens: int | None = None
    """How many control tokens the template itself writes; more than these come out of the text."""
    fast_mask: FastMask | None = field(default=None, compare=False)
    """A way to the mask without offsets, if the shape is known."""


class Renderer:
    """Renders with one tokenizer and its chat template."""

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
                f"the tokenizer of {tokenizer.name_or_path} is a slow one, which cannot say which characters a token "
                "came from. Use a model folder with a tokenizer.json"
            )
        self.tokenizer = tokenizer
        self.train_on = train_on
        self._chat_template = ChatTemplate(
            template or _get_chat_template(tokenizer), tokenizer.special_tokens_map, today
        )
        self.today, self.template = self._chat_template.today, self._chat_template.source
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._template_constants = self._chat_template.constants()
        self._markers = {
            token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()
        }
        self._marker_pattern = re.compile(
            "|".join(re.escape(text) for text in sorted(self._markers, key=len, reverse=True)) or "(?!)"
        )
        stops = {tokenizer.eos_token_id, *stop_ids} - {None}
        self.stop_markers = sorted(text for text, i in self._markers.items() if i in stops)
        special = [text for text, i in self._markers.items() if tokenizer.added_tokens_decoder[i].special]
        self._special_pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._is_special = np.zeros(max([len(tokenizer), *(i + 1 for i in self._markers.values())]), dtype=bool)
        self._is_special[[self._markers[text] for text in special]] = True
        self._prefix_encoder = SharedPrefixEncoder(
            self._backend, _isolating_special_tokens(tokenizer) if cached else ()
        )
        self._content_parts = _needs_content_parts(self._chat_template)
        self._layout_cache = LayoutCache(self._chat_template, self._content_parts, self._quick_way) if cached else None

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        """What transformers makes of the messages; with `add_generation_prompt`, up to where the assistant begins to speak. Text goes
        in parts to templates that would pass over it."""
        if self._content_parts:
            messages = [_with_content_parts(message) for message in messages]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), tools=list(tools) or None, chat_template=self.template, tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                )
            )  # fmt: skip
        except Exception as error:  # a template is a program of someone else's: it can fail in any way
            raise BadRecordError("template refuses", f"the chat template refuses it: {error}") from None

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

    def prompt_ids(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The ids to generate an answer from."""
        return list(
            self._backend.encode(
                self.apply_chat_template(messages, add_generation_prompt=True, tools=tools), add_special_tokens=False
            ).ids
        )

    def reference_ids(self, conversation: Conversation) -> list[int]:
        """What transformers itself gives for the whole conversation."""
        messages = [message.as_dict(self._content_parts) for message in conversation.messages]
        return list(
            self.tokenizer.apply_chat_template(
                messages, tools=list(conversation.tools) or None, chat_template=self.template, return_dict=False
            )
        )

    def layout(self, conversation: Conversation) -> Layout:
        """Where in the rendered text the supervised turns are."""
        if self._layout_cache is None:
            return self._compute_layout(conversation, self.train_on)
        known = self._layout_cache.get(conversation)
        if known is not None:
            text, spans, controls, quick = known
            layout = Layout(text, spans, self.train_on == "all", template_special_tokens=controls, fast_mask=quick)
            if self._layout_cache.should_verify(conversation) and not self._matches_full_render(layout, conversation):
                raise LayoutMismatchError(f"{conversation.origin}: not rendered as others of its shape")
            return layout
        return self._compute_layout(conversation, self.train_on)

    def _matches_full_render(self, layout: Layout, conversation: Conversation) -> bool:
        """Whether rendering in full gives the same text and places, and offsets the same ids and mask."""
        try:
            if layout != self._compute_layout(conversation, self.train_on):
                return False
        except BadRecordError:
            return False
        quick, full = self.encode_layouts([layout])[0], self.encode_layouts([replace(layout, fast_mask=None)])[0]
        if not isinstance(quick, Rendered) or not isinstance(full, Rendered):
            return str(quick) == str(full)
        return np.array_equal(quick.ids, full.ids) and np.array_equal(quick.loss, full.loss)

    def _quick_way(self, skeleton: CachedLayout) -> FastMask | None:
        if self.train_on == "all":
            return None
        return build_fast_mask(
            skeleton, self._special_pattern, lambda text: self._backend.encode(text, add_special_tokens=False).ids
        )

    def _compute_layout(self, conversation: Conversation, train_on: str) -> Layout:
        messages, tools = conversation.messages, list(conversation.tools)
        text = self.apply_chat_template([message.as_dict(self._content_parts) for message in messages], tools=tools)
        unlearned = [i for i, message in enumerate(messages) if message.train is False]
        turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if train_on != "all" and not turns:
            raise BadRecordError("no assistant turn", "no message has the role 'assistant', so nothing can be learned")
        try:
            dyed, whole = self._render_sentinels(messages, tools, text)
        except BadRecordError:
            if train_on == "all" and not unlearned:
                return Layout(text, (), supervise_all=True)
            raise
        if train_on == "all":
            spans = tuple((a, b, b) for a, b in map(whole.extent, unlearned))
        else:
            chosen = turns[-1:] if train_on == "last" else turns
            learned = [turn for turn in chosen if turn not in unlearned]
            if not learned:
                raise BadRecordError(NO_SUPERVISED_TOKENS, "every assistant turn is marked as not to be learned")
            spans = tuple(self._supervised_span(dyed, whole, turn, tools) for turn in learned)
        controls = len(self._special_pattern.findall(whole.text)) - dyed.undyed(self._special_pattern)
        toolless = (
            bool(tools) and self._chat_template.render([m.as_dict(self._content_parts) for m in messages]) == text
        )
        left_out = whole.reasoning_dropped or toolless
        if self._layout_cache is not None and train_on == self.train_on and not left_out:
            self._layout_cache.add(conversation, text, dyed.extents(whole), spans, controls)
        return Layout(text, spans, train_on == "all", whole.reasoning_dropped, toolless, controls)

    def _render_sentinels(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], text: str
    ) -> tuple[SentinelMessages, SentinelRendering]:
        """The dyed messages and their rendering. If dyeing everything changes what the template does, quotes and the
        words that it looks for are left as they are."""
        slots = text_slots(messages)
        dyed = SentinelMessages(messages, slots, self._content_parts)
        try:
            return dyed, dyed.check(text, self._chat_template.render(dyed.messages, tools))
        except BadRecordError:
            dyed = SentinelMessages(messages, slots, self._content_parts, self._template_constants)
            return dyed, dyed.check(text, self._chat_template.render(dyed.messages, tools))

    def _supervised_span(
        self, dyed: SentinelMessages, whole: SentinelRendering, turn: int, tools: Sequence[dict[str, Any]]
    ) -> tuple[int, int, int]:
        if turn == 0:
            raise BadRecordError("starts with the assistant", "message 1 is the assistant's, so nothing asks for it")
        first, last = whole.extent(turn)
        before = whole.before(first)
        prompt = self._chat_template.render(dyed.messages[:turn], tools, prompt=True)
        asked, opening = prompt[dyed.last_dyed(prompt) :], whole.text[before:first]
        header = _common_prefix_length(asked, opening)
        rest = opening[header:]  # what follows the header must be the answer's own, or the prompt must end there
        own = header == len(asked) or dyed.content(turn).startswith(rest)
        if header == 0 or not (own or _is_in_prefill(asked, header)) or self._cuts_marker(opening, header):
            raise BadRecordError(
                "no common header", f"the template opens message {turn + 1} otherwise than its generation prompt does"
            )
        alone = self._chat_template.render(dyed.messages[: turn + 1], tools)
        tail, behind = alone[dyed.last_dyed(alone) :], whole.text[last:]
        common = tail[: _common_prefix_length(tail, behind)]
        markers = list(self._marker_pattern.finditer(common))
        ends = [marker for marker in markers if marker.group() in self.stop_markers] or markers[-1:]
        if "tool_calls" in dyed.messages[turn]:  # the marker that closes a call is none that ends the turn
            ends = [marker for marker in ends if marker.group() in (*self.stop_markers, self._end_of_turn_marker)]
        if ends:
            return before + header, last + ends[0].start(), last + ends[0].end()
        own_end, end = self._marker_pattern.match(tail), self._marker_pattern.match(behind)
        if own_end and end and own_end.group() != end.group():  # an earlier turn's, rewritten: nothing to learn there
            return before + header, last, last
        raise BadRecordError(
            "no end of turn",
            f"the template puts no end-of-turn token after message {turn + 1}, so the model would never learn to stop",
        )

    def _cuts_marker(self, text: str, length: int) -> bool:
        return any(marker.start() < length < marker.end() for marker in self._marker_pattern.finditer(text))

    def render_items(self, items: Sequence[Conversation | PlainText | MarkedText]) -> list[Rendered | BadRecordError]:
        """Tokens and masks of a batch, in order; what cannot be rendered comes back as the reason."""
        laid: list[Layout | BadRecordError] = []
        texts: list[PlainText] = []
        for item in items:
            if isinstance(item, PlainText):
                texts.append(item)
            elif isinstance(item, Conversation):
                try:
                    laid.append(self.layout(item))
                except BadRecordError as error:
                    laid.append(error)
            else:
                laid.append(BadRecordError("marked text", "text with markers needs data.markers to be read"))
        encoded = iter(self.encode_layouts([layout for layout in laid if isinstance(layout, Layout)]))
        conversations = (next(encoded) if isinstance(layout, Layout) else layout for layout in laid)
        documents = iter(self.render_documents(texts))
        return [next(documents) if isinstance(item, PlainText) else next(conversations) for item in items]

    def encode_layouts(self, layouts: Sequence[Layout]) -> list[Rendered | BadRecordError]:
        """Encode a batch of texts, once each, and carry the spans over to tokens."""
        quick = [layout for layout in layouts if layout.fast_mask is not None]
        slow = [layout for layout in layouts if layout.fast_mask is None]
        without = iter(self._prefix_encoder.encode([layout.text for layout in quick], with_places=False))
        encoded = iter(self._prefix_encoder.encode([layout.text for layout in slow]))
        return [
            self._mask_from_offsets(layout, next(encoded))
            if layout.fast_mask is None
            else self._mask_from_special_tokens(layout, next(without))
            for layout in layouts
        ]

    def _mask_from_special_tokens(self, layout: Layout, encoding: PrefixedEncoding) -> Rendered | BadRecordError:
        """The mask by counting control tokens, or by offsets where that fails."""
        assert layout.fast_mask is not None
        ids = np.frombuffer(array("i", encoding.ids), dtype=np.int32)
        loss = layout.fast_mask.compute(ids, self._is_special)
        if loss is None:
            return self._mask_from_offsets(layout, self._prefix_encoder.encode([layout.text])[0])
        return Rendered(ids, loss, supervises_end=all(turn.supervises_end for turn in layout.fast_mask.spans))

    def render_documents(self, documents: Sequence[PlainText]) -> list[Rendered | BadRecordError]:
        """Plain documents: what the tokenizer puts before a text, the text, the end of the document; all learned."""
        eos = self.tokenizer.eos_token_id
        rendered: list[Rendered | BadRecordError] = []
        for encoding in self._backend.encode_batch([document.text for document in documents]):
            ids = encoding.ids if eos is None or encoding.ids[-1:] == [eos] else [*encoding.ids, eos]
            loss = np.ones(len(ids), dtype=np.uint8)
            loss[:1] = 0
            rendered.append(Rendered(np.array(ids, dtype=np.int32), loss, supervises_end=eos is not None))
        return rendered

    def _mask_from_offsets(self, layout: Layout, encoding: PrefixedEncoding) -> Rendered | BadRecordError:
        ids = np.frombuffer(array("i", encoding.ids), dtype=np.int32)
        loss = (np.ones if layout.supervise_all else np.zeros)(len(ids), dtype=np.uint8)
        notes = [REASONING_DROPPED] if layout.reasoning_dropped else []
        if layout.tools_dropped:
            notes.append(TOOLS_DROPPED)
        if (
            layout.template_special_tokens is not None
            and np.count_nonzero(self._is_special[ids]) > layout.template_special_tokens
        ):
            notes.append(CONTROL_TOKENS_IN_TEXT)
        ends = True
        for start, marker, end in layout.spans:
            found = _token_span(encoding, start, marker, end, layout.supervise_all)
            if found is None:
                return BadRecordError(
                    "markers are no tokens",
                    "the tokenizer merges the template's end-of-turn marker with other text, so no exact mask exists",
                )
            loss[found[0] : found[1]] = not layout.supervise_all
            ends &= marker < end
        if layout.supervise_all:
            loss[:1] = 0  # nothing comes before it, so it is no target
            ends = layout.text.rstrip().endswith(tuple(self.stop_markers))
        return Rendered(ids, loss, ends, tuple(notes))


class LayoutMismatchError(Exception):
    """The template treats two conversations of the same shape differently: the cache of shapes must not be used."""


_REASONING_PREFILL = re.compile(r"\s*([<\[][^<>\[\]]*think[^<>\[\]]*[>\]]\s*)+$", re.IGNORECASE)


def _is_in_prefill(prompt: str, place: int) -> bool:
    """A generation prompt may go on with the start of the reasoning, which a turn without reasoning does not have."""
    prefill = _REASONING_PREFILL.search(prompt)
    return prefill is not None and place >= prefill.start()


def _get_chat_template(tokenizer: PreTrainedTokenizerFast) -> str:
    if not tokenizer.chat_template:
        raise WhetError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template, so a conversation has no form yet. "
            "Use the chat (instruct) version of the model, put a chat_template.jinja into its folder, or name a "
            "template: data.template=FILE.jinja"
        )
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:  # several by name, and none of them the default
        raise WhetError(f"the tokenizer of {tokenizer.name_or_path}: {error}. Choose one: data.template=NAME") from None


def _isolating_special_tokens(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Special tokens that swallow nothing around them, the longest first."""
    found = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
    ]
    return sorted(found, key=len, reverse=True)


def _with_content_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _needs_content_parts(template: ChatTemplate) -> bool:
    """Whether the template prints a content only if it comes in parts."""

    def prints(in_parts: bool) -> bool:
        try:
            return "Hello" in template.render([Message("user", "Hello").as_dict(in_parts)])
        except BadRecordError:
            return False

    return not prints(False) and prints(True)


def _token_span(encoding: PrefixedEncoding, start: int, marker: int, end: int, inside: bool) -> tuple[int, int] | None:
    """The tokens of a span of characters. With `inside` every token that has a character of it; otherwise tokens that
    begin in it, up to and with the marker's, which must be a token of its own."""
    first = encoding.char_to_token(start)
    while first is None and start < marker:  # some characters have no token
        start += 1
        first = encoding.char_to_token(start)
    if inside:
        last = next((t for t in map(encoding.char_to_token, range(end - 1, start - 1, -1)) if t is not None), None)
        return None if first is None or last is None else (first, last + 1)
    last = encoding.char_to_token(marker)
    if first is None or last is None or encoding.start_of(last) != marker:
        return None
    straddles = encoding.start_of(first) < start  # a token that straddles the start belongs to the header
    return first + straddles, last + (marker < end)


def _common_prefix_length(a: str, b: str) -> int:
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])
