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
   prefill such as `<think>` that the turn has not, and up to whitespace before its last word; no marker is cut in two.
   Whitespace at the end of the prompt is left to the model where the tokenizer merges it with the first word of an
   answer (`whet.data.render.layout_finder`).
3. End of the turn: render the messages up to and including it. What follows the turn there and in the whole rendering
   has a common prefix, too, up to whitespace before it. The first stop token in it, else the last marker, is the
   end-of-turn marker. It is supervised, because the model must learn to stop; whitespace after it is not. Where the
   template always appends a generation prompt, the first marker is taken, and one more question must leave it in place.
4. Encode the rendered text once and map the spans of characters to tokens by the tokenizer's offsets. A token that
   straddles the start of an answer is supervised if it holds text of the answer, and is not if it holds whitespace
   alone.
5. Cache the layout by the structure of the conversation (`whet.data.render.layout_cache`), because rendering costs as
   much as encoding.

Masks are exact or refused: where a step fails (the template rewrites, repeats, reorders or drops text, has no common
header or no end of turn), the conversation is refused with the reason. Nothing is guessed. Steps 1 to 3 are in
`whet.data.render.layout_finder`.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from whet.core.errors import BadRecordError, WhetError
from whet.data.conversation import Conversation, MarkedText, Message, Origin, PlainText, with_system
from whet.data.render.layout_cache import Layout, LayoutCache, Span
from whet.data.render.layout_finder import FIRST_WORDS, LayoutFinder, MarkerTokens, PromptEncoder
from whet.data.render.shared_prefix import PrefixedEncoding, SharedPrefixEncoder
from whet.data.render.template_text import PROBE, PROBE_TOOL, TemplateText, Tools
from whet.tokenizer.chat_template import template_limits

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast

CONTROL_TOKENS_IN_TEXT, REASONING_DROPPED = "control tokens in the text", "reasoning left out by the template"
TOOLS_DROPPED, PREFILL_MISSING = "tools left out by the template", "reasoning tag only in the prompt"
PROMPT_DIFFERS = "other whitespace in the prompt"
CONTEXT_DIFFERS = "other text in the prompt"
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
        system: str | None = None,
    ) -> None:
        """`template` replaces the tokenizer's own; `cached=False` renders every conversation in full. `system`: the
        system message of prompts that have none (data.system; sources add it to conversations)."""
        if not getattr(tokenizer, "is_fast", False):
            raise WhetError(
                f"the tokenizer of {tokenizer.name_or_path} is a slow tokenizer, which gives no token offsets. "
                "Use a model folder with a tokenizer.json"
            )
        self.tokenizer = tokenizer
        self.train_on = train_on
        self._system = system
        self.text = TemplateText(tokenizer, template, today)
        self._markers = MarkerTokens(tokenizer, stop_ids)
        self.stop_markers = self._markers.stops
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()

        self._prompt_encoder = PromptEncoder(self._backend, self._markers.pattern)
        self.layouts = LayoutFinder(self.text, self._markers, self._prompt_encoder, tokenizer.eos_token)
        self._prefix_encoder = SharedPrefixEncoder(
            self._backend, _isolating_special_tokens(tokenizer) if cached else ()
        )
        self._layout_cache = None
        if cached:
            self._layout_cache = LayoutCache(
                self.text.chat_template, self.text.content_parts, train_on, self._markers.pattern,
                {text: bool(self._markers.is_special[i]) for text, i in self._markers.ids.items()},
                self._prompt_encoder.encode,
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

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """The ids to generate an answer from: those that come before it in training."""
        return self.encode_prompt(self.prompt_text(messages, tools))

    def prompt_text(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """The rendered messages, and the generation prompt."""
        self.text.require()
        messages = with_system(messages, self._system)
        conversation = Conversation(tuple(messages), Origin("prompt", 1), tuple(tools))
        return self.text.apply_with_arguments(conversation, prompt=True)[1]

    def default_system(self) -> str:
        """The system message that the template inserts where a conversation has none; empty if it inserts none, or has
        no place for one."""
        question, system = Message("user", "\ue000Hi\ue000"), Message("system", "\ue001Be\ue001")
        try:
            texts = [self.text.apply_with_arguments(Conversation(each, Origin("prompt", 1)), prompt=True)[1]
                     for each in ((system, question), (question,))]  # fmt: skip
        except BadRecordError:
            return ""
        before, found, rest = texts[0].partition(system.content)
        between, plain = rest.partition(question.content)[0], texts[1].partition(question.content)[0]
        if not found or not (plain.startswith(before) and plain.endswith(between)):
            return ""
        return plain[len(before) : len(plain) - len(between)]

    def encode_prompt(self, prompt: str) -> list[int]:
        """The ids of a rendered prompt."""
        return self._prompt_encoder.encode(prompt)

    def decode_answer(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a generated answer, without the whitespace that the template writes before every answer."""
        text = str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
        return text.removeprefix(self._generated_whitespace)

    @cached_property
    def _generated_whitespace(self) -> str:
        """What generated answers begin with, as it is decoded, because the template writes it behind the prompt, or
        `prompt_ids` ends before it."""
        prompt = text = ""
        if not self.text.exists:
            return prompt
        for tools in ((PROBE_TOOL,), ()):  # some templates require tools, others refuse them
            with contextlib.suppress(BadRecordError):
                prompt = text = self.prompt_text(PROBE.messages[:1], tools)
                text = self.text.apply(with_system(PROBE.messages, self._system), tools)
        before = text.removeprefix(prompt).partition(PROBE.messages[1].content)[0]
        whitespace = before if text.startswith(prompt) and before.isspace() else ""
        if not whitespace and not self._prompt_encoder.open_end(prompt):
            return ""
        ids = self._backend.encode(prompt + whitespace + FIRST_WORDS[0], add_special_tokens=False).ids
        return str(self.tokenizer.decode(ids[len(self.encode_prompt(prompt)) :])).removesuffix(FIRST_WORDS[0])

    def end_of_turn(self) -> int | None:
        """The id that ends an answer in this template; None if there is no exact one."""
        marker = self.layouts.end_of_turn_marker(()) or self.layouts.end_of_turn_marker((PROBE_TOOL,))
        return None if marker is None else self._markers.ids[marker]

    # Step 5: the rendered text and its supervised spans of characters, cached.

    def layout(self, conversation: Conversation) -> Layout:
        """The rendered text and its supervised spans, from the cache where possible."""
        self.text.require()
        cached = None if self._layout_cache is None else self._layout_cache.get(conversation)
        if self._layout_cache is None or cached is None:
            return self.layouts.compute(conversation, self.train_on, self._layout_cache)
        if self._layout_cache.should_verify(conversation) and not self._matches_full_render(cached, conversation):
            raise LayoutMismatchError(f"{conversation.origin}: the cached layout differs from the full rendering")
        return cached

    def _matches_full_render(self, cached: Layout, conversation: Conversation) -> bool:
        """Whether the full rendering has the same text and spans, and offsets give the same ids and mask."""
        try:
            if cached != self.layouts.compute(conversation, self.train_on):
                return False
        except BadRecordError:
            return False
        fast, full = self.encode_layouts([cached, replace(cached, fast_mask=None)])
        if not isinstance(fast, Rendered) or not isinstance(full, Rendered):
            return str(fast) == str(full)
        return np.array_equal(fast.ids, full.ids) and np.array_equal(fast.loss, full.loss)

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
        loss = layout.fast_mask.compute(ids, self._markers.is_special)
        if loss is None:
            return self._mask_from_offsets(layout, self._prefix_encoder.encode([layout.text])[0])
        supervises_end = all(span.supervises_end for span in layout.fast_mask.spans)
        return Rendered(ids, loss, supervises_end, tuple(_layout_notes(layout)))

    def _mask_from_offsets(self, layout: Layout, encoding: PrefixedEncoding) -> Rendered | BadRecordError:
        ids = np.frombuffer(array("i", encoding.ids), dtype=np.int32)
        loss = (np.ones if layout.supervise_all else np.zeros)(len(ids), dtype=np.uint8)
        supervises_end, prompt_differs = True, False
        for start, marker, end in layout.spans:
            found = _token_span(encoding, layout.text, (start, marker, end), layout.supervise_all)
            if found is None:
                return BadRecordError(
                    "markers are no tokens",
                    "the tokenizer merges the template's end-of-turn marker with other text, so no exact mask exists",
                )
            loss[found[0] : found[1]] = not layout.supervise_all
            supervises_end &= marker < end
            if not layout.supervise_all:
                prompt_differs |= self._differs_from_prompt(encoding, ids, found[0], layout.text[:start])
        if layout.supervise_all:
            loss[:1] = 0  # the first token has no context to be predicted from
            supervises_end = layout.text.rstrip().endswith(tuple(self.stop_markers))
        notes = _layout_notes(replace(layout, prompt_differs=layout.prompt_differs or prompt_differs))
        from_template = layout.template_special_tokens
        if from_template is not None and np.count_nonzero(self._markers.is_special[ids]) > from_template:
            notes.append(CONTROL_TOKENS_IN_TEXT)
        return Rendered(ids, loss, supervises_end, tuple(notes))

    def _differs_from_prompt(self, encoding: PrefixedEncoding, ids: NDArray[np.int32], first: int, prompt: str) -> bool:
        """Whether the whitespace that ends the prompt has other tokens before the answer, which begins at token
        `first`."""
        straddles = first > 0 and encoding.token_end(first - 1) > len(prompt)
        is_whitespace = straddles or prompt[-1:].isspace()
        return is_whitespace and not self._prompt_encoder.ends_like_prompt(ids[:first], prompt)


def _layout_notes(layout: Layout) -> list[str]:
    dropped = {REASONING_DROPPED: layout.reasoning_dropped, TOOLS_DROPPED: layout.tools_dropped}
    prompts = {PREFILL_MISSING: layout.missing_prefills, PROMPT_DIFFERS: layout.prompt_differs}
    notes = {**dropped, **prompts, CONTEXT_DIFFERS: layout.context_differs}
    return [note for note, applies in notes.items() if applies]


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
    straddles = first > 0 and (encoding.token_end(first - 1) < start or encoding.token_start(first) < start)
    if straddles and not text[start : encoding.token_end(first)].strip():
        first += 1
    return first, last + (marker < end)


def _isolating_special_tokens(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Special tokens that split the text without stripping or normalizing anything around them."""
    return [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
    ]
