"""Where the model has to produce what a chat template writes: the spans of a rendered conversation that are supervised.

Steps 1 to 3 of sentinel rendering, which `whet.data.render.renderer` explains.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from string import printable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from whet.core.errors import BadRecordError
from whet.data.conversation import CALCULATOR_SCHEMA, Conversation, Message
from whet.data.render.layout_cache import REASONING_TAG, Layout, LayoutCache, Span
from whet.data.render.sentinels import SHOWN_CHARACTERS, SentinelMessages, SentinelRendering, text_slots
from whet.data.render.shared_prefix import common_prefix_length
from whet.data.render.template_text import PROBE, TemplateText, Tools
from whet.tokenizer.named_templates import INLINE_CALL_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast


NO_SUPERVISED_TOKENS = "nothing to learn"
"""The ledger's reason for a conversation without supervised tokens: dropped, and not an error."""


class MarkerTokens:
    """The markers of a tokenizer: added tokens, special or not, that are more than whitespace."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stop_ids: Sequence[int]) -> None:
        added = tokenizer.added_tokens_decoder
        self.ids = {token.content: i for i, token in added.items() if token.content.strip()}
        self.pattern = _match_any(list(self.ids))
        stops = {tokenizer.eos_token_id, *stop_ids} - {None}
        self.stops = sorted(text for text, i in self.ids.items() if i in stops)
        self.stop_pattern = _match_any(self.stops)
        special = [text for text, i in self.ids.items() if added[i].special]
        self.special_pattern = _match_any(special)
        self.is_special = np.zeros(max([len(tokenizer), *(i + 1 for i in self.ids.values())]), dtype=bool)
        """For each id, whether it is a special token."""
        self.is_special[[self.ids[text] for text in special]] = True


def _match_any(texts: Sequence[str]) -> re.Pattern[str]:
    """Matches any of the texts, the longest where several fit; nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


class _Turn(NamedTuple):
    """An assistant turn that is supervised, and how its generation prompt differs from the conversation."""

    span: Span
    missing_prefill: str
    """The reasoning prefill of the prompt that the turn has not."""
    prompt_differs: bool
    """The whitespace before the answer is another."""
    context_differs: bool
    """The text up to the message before the turn is another."""


class LayoutFinder:
    """Finds the supervised spans of conversations with one chat template."""

    def __init__(
        self, template: TemplateText, markers: MarkerTokens, prompt_encoder: PromptEncoder, eos_token: str | None
    ) -> None:
        self._template, self._markers, self._prompt_encoder = template, markers, prompt_encoder
        self._eos_token = eos_token
        self._constants = template.chat_template.constants()
        self._end_of_turn_markers: dict[bool, str | None] = {}
        self._question = PROBE.messages[0].as_dict(template.content_parts)

    def compute(self, conversation: Conversation, train_on: str, cache: LayoutCache | None = None) -> Layout:
        """The rendered text and its supervised spans; what `cache` can use is added to it."""
        conversation, text = self._template.apply_with_arguments(conversation)
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
        found: list[_Turn] = []
        if train_on == "all":
            spans = tuple((start, end, end) for start, end in map(rendering.message_span, excluded))
        else:
            supervised = [i for i in (turns[-1:] if train_on == "last" else turns) if i not in excluded]
            if not supervised:
                raise BadRecordError(NO_SUPERVISED_TOKENS, "every assistant turn is excluded from training")
            found = self._supervised_turns(sentinels, rendering, text, supervised, tools)
            spans = tuple(turn.span for turn in found)
        from_messages = sentinels.count_unreplaced(self._markers.special_pattern)
        needed = [tool for tool in tools if not (self._template.calls_inline and tool == CALCULATOR_SCHEMA)]
        layout = Layout(
            text,
            spans,
            supervise_all=train_on == "all",
            reasoning_dropped=rendering.reasoning_dropped,
            missing_prefills=tuple(sorted({turn.missing_prefill for turn in found} - {""})),
            prompt_differs=any(turn.prompt_differs for turn in found),
            context_differs=any(turn.context_differs for turn in found) and not rendering.reasoning_dropped,
            tools_dropped=bool(needed) and self._template.ignores_tools(messages, text),
            template_special_tokens=len(self._markers.special_pattern.findall(rendering.text)) - from_messages,
        )
        dropped = layout.reasoning_dropped or layout.tools_dropped
        if cache is not None and not dropped:
            cache.add(conversation, layout, sentinels.text_spans(rendering))
        return layout

    def _render_sentinels(
        self, messages: Sequence[Message], tools: Tools, text: str
    ) -> tuple[SentinelMessages, SentinelRendering]:
        """Step 1. If sentinels change what the template does, quotes and the constants that it compares with stay."""
        slots = text_slots(messages)
        sentinels = SentinelMessages(messages, slots, self._template.content_parts)
        try:
            return sentinels, sentinels.verify(text, self._template.render(sentinels.messages, tools))
        except BadRecordError:
            sentinels = SentinelMessages(messages, slots, self._template.content_parts, self._constants)
            return sentinels, sentinels.verify(text, self._template.render(sentinels.messages, tools))

    def _supervised_turns(
        self,
        sentinels: SentinelMessages,
        rendering: SentinelRendering,
        text: str,
        turns: Sequence[int],
        tools: Tools,
    ) -> list[_Turn]:
        try:
            return [self._supervised_turn(sentinels, rendering, text, turn, tools) for turn in turns]
        except BadRecordError as error:
            with contextlib.suppress(BadRecordError):
                self._supervised_turn(sentinels, rendering, text, turns[-1], tools)
                hint = "The last answer alone can be learned: data.train_on=last"
                error = BadRecordError(error.reason, f"{error}. {hint}")
            raise error from None

    def _supervised_turn(
        self,
        sentinels: SentinelMessages,
        rendering: SentinelRendering,
        text: str,
        turn: int,
        tools: Tools,
    ) -> _Turn:
        """Steps 2 and 3: the span of an assistant turn, from the end of its header to the end of its marker."""
        if turn == 0:
            raise BadRecordError(
                "starts with the assistant",
                "message 1 is the assistant's, so there is no prompt before it; data.system adds one",
            )
        first, last = rendering.message_span(turn)
        previous = rendering.end_of_previous_sentinel(first)

        whole_prompt = sentinels.unescape(self._template.render(sentinels.messages[:turn], tools, prompt=True))
        prompt = sentinels.tail(whole_prompt)
        respaced = _with_whitespace_of(text[previous:first], prompt)
        header = self._header_length(respaced, text[previous:last], turn, sentinels.messages[turn - 1]["role"])
        start = previous + header
        if header == len(respaced) and not text[start].isspace():
            start -= self._prompt_encoder.open_end(f"x{respaced}")  # x: the message before it
        marker, end = self._end_of_turn(sentinels, turn, tools, rendering.text[last:])
        prefill, whitespace_missing = respaced[header:].strip(), respaced[header:].isspace()
        return _Turn(
            (start, last + marker, last + end),
            prefill,
            respaced != prompt or whitespace_missing,
            whole_prompt.removesuffix(prompt) != rendering.text[:previous],
        )

    def _header_length(self, prompt: str, text: str, turn: int, role_before: str) -> int:
        """How many characters the generation prompt and a turn have in common, both from the text before them on.

        All that the prompt has must be in the turn, except a reasoning prefill, of which no tag is cut in two.
        """
        header = same = common_prefix_length(prompt, text)
        if header < len(prompt):
            prefill = _REASONING_PREFILL.search(prompt)
            whole = [*self._markers.pattern.finditer(text), *REASONING_TAG.finditer(prompt)]
            header = min([header, *(each.start() for each in whole if each.start() < header < each.end())])
            header = header if prefill and header >= prefill.start() else 0
        remedy = f"Join it with message {turn}, which is the assistant's, too" if role_before == "assistant" else None
        if not prompt:
            raise BadRecordError(
                "no common header",
                f"the chat template writes nothing before message {turn + 1} that would tell the model to answer. "
                f"{remedy or self._header_remedy()}",
            )
        if not header:
            given, written = (each[same : same + SHOWN_CHARACTERS] for each in (prompt, text))
            raise BadRecordError(
                "no common header",
                f"the chat template starts message {turn + 1} differently from its generation prompt, which has "
                f"{given!r} where the message has {written!r}. "
                f"{remedy or 'Make them the same in a copy of the template: data.template=COPY.jinja'}",
            )
        return header

    def _header_remedy(self) -> str:
        token = "eos_token" if self._eos_token else "'END-OF-TURN TOKEN'"
        line = (
            f"{{% for m in messages %}}{{{{ '### ' + m.role + '\\n' + m.content + {token} + '\\n' }}}}{{% endfor %}}"
            "{% if add_generation_prompt %}{{ '### assistant\\n' }}{% endif %}"
        )
        return f"Use the model's own template, or one that names the speakers, such as {line}: data.template=FILE.jinja"

    def _end_of_turn(self, sentinels: SentinelMessages, turn: int, tools: Tools, following: str) -> tuple[int, int]:
        """Step 3: (start, end) of the end-of-turn marker in `following`, what comes after the turn."""
        messages = sentinels.messages[: turn + 1]
        tail = sentinels.tail(self._template.render(messages, tools))
        own, met = self._markers.stop_pattern.search(tail), self._markers.stop_pattern.search(following)
        is_call = "tool_calls" in messages[turn]
        alone, within = tail[: own.start() if own else None], following[: met.start() if met else None]
        if met and (alone.split() == within.split() or (is_call and own and self._same_markers(alone, within))):
            return met.span()
        after = following.lstrip()
        respaced, shared = len(following) - len(after), tail.lstrip()
        shared = shared[: common_prefix_length(shared, after)]
        may_prompt = self._template.ignores_prompt_flag(messages[:turn], tools)
        continued = self._template.render_or_none([*messages, self._question], tools)
        continued = tail if continued is None else sentinels.tail(continued)
        if may_prompt:
            shared = shared[: common_prefix_length(shared, continued.lstrip())]
        found = self._markers.pattern.finditer(after)  # in `shared`, the last one could be cut in two
        markers = list(itertools.takewhile(lambda marker: marker.end() <= len(shared), found))
        if is_call or not sentinels.has_answer(turn):
            # the marker that closes a call or reasoning does not end the turn, unless the call is inline
            ends = (self.end_of_turn_marker(tools), INLINE_CALL_TOKENS[1])
            markers = [marker for marker in markers if marker.group() in ends]
        if markers:
            closes_conversation = not continued.startswith(tail.rstrip())  # such as with a part of the next header
            end = markers[0 if may_prompt or closes_conversation else -1]
            return respaced + end.start(), respaced + end.end()
        edge = sentinels.whitespace_at_end(turn)
        edge = edge if tail.startswith(edge) and following.startswith(edge) else ""
        own, met = (self._markers.pattern.match(each, len(edge)) for each in (tail, following))
        if own and met and own.group() != met.group() and not may_prompt:
            return len(edge), len(edge)  # the template rewrites the ends of earlier turns
        raise BadRecordError(
            "no end of turn",
            f"the chat template writes no end-of-turn token after message {turn + 1}, so the model could not learn to "
            f"stop. {self._end_of_turn_remedy(tools)}",
        )

    def _same_markers(self, alone: str, within: str) -> bool:
        """Whether what follows a call has the same markers and no text of a message in both: only the template's words
        differ, such as the call's id, which some write where the result follows."""
        is_template = SentinelMessages.tail(within) == within
        return is_template and self._markers.pattern.findall(alone) == self._markers.pattern.findall(within)

    def _end_of_turn_remedy(self, tools: Tools) -> str:
        question, answer = (message.as_dict(self._template.content_parts) for message in PROBE.messages)
        alone, answered = (
            (self._template.render_or_none(messages, tools) or "").partition(PROBE.messages[1].content)[2]
            for messages in ([question, answer], [question, answer, question])
        )
        stop = self._markers.stop_pattern.search(answered)
        if stop and answered[: stop.start()] == alone:
            line = f"{{%- if not add_generation_prompt %}}{{{{ {stop.group()!r} }}}}{{% endif %}}"
            return f"Append {line} to a copy of the template, and use that: data.template=COPY.jinja"
        token = self._eos_token or "an end-of-turn token"
        written = _LIKE_A_MARKER.match(alone)
        if written and written[1] not in self._markers.ids:
            return f"It writes {written[1]}, which is not a token: add it with model.add_tokens"
        return f"Write {token} after each answer and call in a copy of the template: data.template=COPY.jinja"

    def end_of_turn_marker(self, tools: Tools) -> str | None:
        """What ends a plain answer; found once without tools and once with some, since templates may require them."""
        if bool(tools) not in self._end_of_turn_markers:
            try:
                layout = self.compute(replace(PROBE, tools=tuple(tools)), "assistant")
                _, start, end = layout.spans[0]
                self._end_of_turn_markers[bool(tools)] = layout.text[start:end] or None
            except BadRecordError:
                self._end_of_turn_markers[bool(tools)] = None
        return self._end_of_turn_markers[bool(tools)]

    def supervised_header(self) -> str:
        """What the template writes before an answer and the model learns, for want of a generation prompt."""
        try:
            if not self._template.ignores_prompt_flag([self._question], ()):
                return ""
            layout = self.compute(PROBE, "assistant")
        except BadRecordError:
            return ""
        header = layout.text[layout.spans[0][0] :].partition(PROBE.messages[1].content)[0]
        return header if header.strip() else ""


_LIKE_A_MARKER = re.compile(r"\s*(<[^<>\s]+>|\[[^\[\]\s]+\])")
"""What a template writes after an answer as a marker, such as `<|im_end|>`."""
_REASONING_PREFILL = re.compile(rf"\s*((?:{REASONING_TAG.pattern})\s*)+$", re.IGNORECASE)
"""What opens reasoning at the end of a generation prompt, such as `<think>⏎`; a turn without reasoning has it not."""


def _with_whitespace_of(header: str, prompt: str) -> str:
    """The prompt with the whitespace of the header, if they differ in nothing else and the whitespace at its end is
    there."""
    characters = "".join(prompt.split())
    if header.startswith(prompt) or not characters or not "".join(header.split()).startswith(characters):
        return prompt
    ends = (i for i, character in enumerate(header, 1) if not character.isspace())
    end = next(itertools.islice(ends, len(characters) - 1, None))
    ending = prompt[len(prompt.rstrip()) :]
    return header[:end] + ending if header.startswith(ending, end) else prompt


# Prompts as token ids: those that come before every answer.
#
# Where a prompt ends in whitespace, the tokenizer may merge it with the word that follows. No answer then follows the
# ids of the prompt by itself, so that a model would be asked to continue tokens that it was never trained on:
#
# prompt            Assistant:␣           ‹Assistant› ‹:› ‹␣›
# with an answer    Assistant:␣Yes        ‹Assistant› ‹:› ‹␣Yes›
# with another      Assistant:␣42         ‹Assistant› ‹:› ‹␣› ‹4› ‹2›
# prompt's ids                            ‹Assistant› ‹:›
#
# So the prompt's ids end before such whitespace, for every answer alike. The model generates it, and the loss mask
# (`whet.data.render.renderer`) starts there.

FIRST_WORDS = (
    "The", "I", "Yes", "No", "It", "is", "a", "In", "To", "You", "This", "Here", "Sure", "Hello", "and", "of",
    *printable.split()[0],
)  # fmt: skip
"""What answers may begin with: common words; digits, letters and punctuation."""
_CONTEXT_CHARACTERS = 64
"""As many characters before an answer, or fewer from the last marker on, decide how it is split into tokens."""
_LAST_WORD = re.compile(r"\s*\S*\s*$")


class PromptEncoder:
    """Encodes prompts with one tokenizer."""

    def __init__(self, backend: Any, markers: re.Pattern[str]) -> None:
        """`markers` finds the tokens at which `backend` splits a text."""
        self._backend, self._markers = backend, markers
        self._cached_open_end = lru_cache(maxsize=256)(self._find_open_end)
        self._cached_last_ids = lru_cache(maxsize=256)(self._find_last_ids)

    def encode(self, prompt: str) -> list[int]:
        """The ids of a prompt as they are before every answer."""
        return [token for token, _ in self._encode_with_ends(prompt)]

    def _encode_with_ends(self, prompt: str) -> list[tuple[int, int]]:
        """The ids of a prompt, and where each ends."""
        word = FIRST_WORDS[0] if prompt[-1:].isspace() else ""
        encoding = self._backend.encode(prompt + word, add_special_tokens=False)
        length = len(prompt) - self.open_end(prompt)
        return [(token, end) for token, (_, end) in zip(encoding.ids, encoding.offsets, strict=True) if end <= length]

    def ends_like_prompt(self, ids: NDArray[np.int32], prompt: str) -> bool:
        """Whether the ids before an answer end as those of its prompt do."""
        last = self._cached_last_ids(_LAST_WORD.findall(self._context(prompt[-_CONTEXT_CHARACTERS:]))[0])
        return ids[len(ids) - len(last) :].tolist() == last

    def _find_last_ids(self, last_word: str) -> list[int]:
        """The ids of a prompt from its last character on that is not whitespace."""
        prompt = f"x{last_word}" if last_word[0].isspace() else last_word  # x: the word before it
        return [token for token, end in self._encode_with_ends(prompt) if end >= len(prompt.rstrip())]

    def open_end(self, prompt: str) -> int:
        """How many characters of whitespace at the end of a prompt are not the same tokens before every answer."""
        if not prompt[-1:].isspace():
            return 0
        return self._cached_open_end(self._context(prompt))

    def _context(self, prompt: str) -> str:
        """The end of a prompt that decides how its whitespace is split into tokens."""
        start = max((marker.start() for marker in self._markers.finditer(prompt)), default=0)
        return prompt[max(start, len(prompt) - _CONTEXT_CHARACTERS) :]

    def _find_open_end(self, prompt: str) -> int:
        before = []
        for encoding in self._backend.encode_batch([prompt + word for word in FIRST_WORDS], add_special_tokens=False):
            tokens = list(zip(encoding.ids, encoding.offsets, strict=True))
            cut = min((start for _, (start, end) in tokens if end > len(prompt)), default=len(prompt))
            before.append([(token, end) for token, (_, end) in tokens if end <= cut])
        same = list(itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*before, strict=False)))
        open_end = len(prompt) - (same[-1][0][1] if same else 0)
        is_whitespace = open_end <= len(prompt) - len(prompt.rstrip())
        return open_end if is_whitespace else 0
