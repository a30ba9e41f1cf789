"""Conversations → token ids and loss mask, together, exactly, for any chat template.

The ids are those that `apply_chat_template` gives for the whole conversation. Most templates do not say which
characters the model has to produce, and searching for the answer's text in the output guesses wrong as soon as a
template strips, repeats or rewrites. So the conversation is rendered a second time with its text *dyed*: every
character of the messages is replaced by a code point that Unicode has not assigned, a different one each. Where the
dye comes out is where the text went:

    rendered   <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎Yes<|im_end|>⏎
    dyed       <|im_start|>user⏎01<|im_end|>⏎<|im_start|>assistant⏎234<|im_end|>⏎
    supervised                                                     ^^^^^^^^^^^^^

A turn starts where its generation prompt ends and ends with its end-of-turn marker, which is supervised: the model
must learn to stop. Where no exact mask exists, the conversation is refused with the reason; nothing is guessed.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from whet.core.errors import WhetError
from whet.data.conversation import BadRecordError, Conversation, Message, Origin

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast

_DYE_START, _DYE_END = 0x40000, 0xE0000  # planes 4 to 13: no character is assigned there


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the model sees it: `loss[i] = 1` means that token i is to be learned."""

    ids: NDArray[np.int32]
    loss: NDArray[np.uint8]
    ends: bool
    """Every supervised turn ends with its end-of-turn token, supervised."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The text of a conversation and the character spans that the model has to produce."""

    text: str
    spans: tuple[tuple[int, int, int], ...]
    """(start, start of the end-of-turn marker, end) of each supervised turn."""


class Renderer:
    """Renders with one tokenizer and its chat template."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, train_on: str, stop_ids: Sequence[int] = (), today: str | None = None
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise WhetError(
                f"the tokenizer of {tokenizer.name_or_path} is a slow one, which cannot say which characters a token "
                "came from. Use a model folder with a tokenizer.json"
            )
        if not tokenizer.chat_template:
            raise WhetError(
                f"the tokenizer of {tokenizer.name_or_path} has no chat template, so a conversation has no form yet. "
                "Use the chat (instruct) version of the model, or put a chat_template.jinja into its folder"
            )
        try:
            template = str(tokenizer.get_chat_template())
        except ValueError as error:  # several by name, and none of them the default
            raise WhetError(f"the tokenizer of {tokenizer.name_or_path}: {error}") from None
        self.tokenizer = tokenizer
        self.train_on = train_on
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.today = (today or datetime.date.today().isoformat()) if _DATE.search(template) else None
        self.template = _with_date(template, self.today) if self.today else template
        self._constants = _compared_constants(self.template)
        self._markers = {
            token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()
        }
        self._marker = re.compile(
            "|".join(re.escape(text) for text in sorted(self._markers, key=len, reverse=True)) or "(?!)"
        )
        stops = {tokenizer.eos_token_id, *stop_ids} - {None}
        self.stops = sorted(text for text, i in self._markers.items() if i in stops)

    def text(self, messages: Sequence[dict[str, str]], prompt: bool = False) -> str:
        """What the template makes of the messages; with `prompt`, up to where the assistant begins to speak."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), chat_template=self.template, tokenize=False, add_generation_prompt=prompt
                )
            )
        except Exception as error:  # a template is a program of someone else's: it can fail in any way
            raise BadRecordError("template refuses", f"the chat template refuses it: {error}") from None

    def end_of_turn(self) -> int | None:
        """The id that ends an answer in this template; None if there is no exact one."""
        probe = Conversation((Message("user", "Hi"), Message("assistant", "Yes")), Origin("probe", 1))
        try:
            layout = self._layout(probe, "assistant")
        except BadRecordError:
            return None
        _, start, end = layout.spans[0]
        return self._markers[layout.text[start:end]]

    def prompt_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The ids to generate an answer from."""
        return list(self._backend.encode(self.text(messages, prompt=True), add_special_tokens=False).ids)

    def layout(self, conversation: Conversation) -> Layout:
        """Where in the rendered text the supervised turns are."""
        return self._layout(conversation, self.train_on)

    def _layout(self, conversation: Conversation, train_on: str) -> Layout:
        messages = conversation.messages
        text = self.text([message.as_dict() for message in messages])
        if train_on == "all":
            return Layout(text, ())
        turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if not turns:
            raise BadRecordError("no assistant turn", "no message has the role 'assistant', so nothing can be learned")
        dyed, whole = self._dye(messages, text)
        chosen = turns[-1:] if train_on == "last" else turns
        return Layout(text, tuple(self._span(dyed, whole, turn) for turn in chosen))

    def _dye(self, messages: Sequence[Message], text: str) -> tuple[_Dyed, str]:
        """The dyed messages and their rendering. If dyeing everything changes what the template does, quotes and the
        words that it looks for are left as they are."""
        dyed = _Dyed(messages)
        try:
            return dyed, dyed.check(text, self.text(dyed.messages))
        except BadRecordError:
            dyed = _Dyed(messages, self._constants)
            return dyed, dyed.check(text, self.text(dyed.messages))

    def _span(self, dyed: _Dyed, whole: str, turn: int) -> tuple[int, int, int]:
        if turn == 0:
            raise BadRecordError("starts with the assistant", "message 1 is the assistant's, so nothing asks for it")
        first, last = dyed.extent(whole, turn)
        before = dyed.last_dyed(whole[:first])
        prompt = self.text(dyed.messages[:turn], prompt=True)
        asked, opening = prompt[dyed.last_dyed(prompt) :], whole[before:first]
        header = _common_prefix(asked, opening)
        start = before + header
        rest = opening[header:]  # what follows the header must be the answer's own, or the prompt must end there
        agrees = header == len(asked) or dyed.messages[turn]["content"].startswith(rest)
        if header == 0 or not agrees or self._cuts_marker(opening, header):
            raise BadRecordError(
                "no common header", f"the template opens message {turn + 1} otherwise than its generation prompt does"
            )
        alone = self.text(dyed.messages[: turn + 1])
        tail = alone[dyed.last_dyed(alone) :]
        tail = tail[: _common_prefix(tail, whole[last:])]
        markers = list(self._marker.finditer(tail))
        ends = [marker for marker in markers if marker.group() in self.stops] or markers[-1:]
        if not ends:
            raise BadRecordError(
                "no end of turn", f"the template puts no end-of-turn token after message {turn + 1}, so the model "
                "would never learn to stop",
            )  # fmt: skip
        return start, last + ends[0].start(), last + ends[0].end()

    def _cuts_marker(self, text: str, length: int) -> bool:
        return any(marker.start() < length < marker.end() for marker in self._marker.finditer(text))

    def render(self, layouts: Sequence[Layout]) -> list[Rendered | BadRecordError]:
        """Encode a batch of texts, once each, and carry the spans over to tokens."""
        encodings = self._backend.encode_batch([layout.text for layout in layouts], add_special_tokens=False)
        return [self._carry_over(layout, encoding) for layout, encoding in zip(layouts, encodings, strict=True)]

    def _carry_over(self, layout: Layout, encoding: Any) -> Rendered | BadRecordError:
        ids = np.array(encoding.ids, dtype=np.int32)
        if self.train_on == "all":
            loss = np.ones(len(ids), dtype=np.uint8)
            loss[:1] = 0  # nothing comes before it, so it is no target
            return Rendered(ids, loss, ends=layout.text.rstrip().endswith(tuple(self.stops)))
        loss = np.zeros(len(ids), dtype=np.uint8)
        for start, marker, _end in layout.spans:
            places = (encoding.char_to_token(place) for place in range(start, marker + 1))
            first = next((token for token in places if token is not None), None)  # some characters have no token
            last = encoding.char_to_token(marker)
            if first is None or last is None or encoding.token_to_chars(last)[0] != marker:
                return BadRecordError(
                    "markers are no tokens",
                    "the tokenizer merges the template's end-of-turn marker with other text, so no exact mask exists",
                )
            if encoding.token_to_chars(first)[0] < start:  # a token that straddles the start belongs to the header
                first += 1
            loss[first : last + 1] = 1
        return Rendered(ids, loss, ends=True)


class _Dyed:
    """The messages with their characters replaced, and the way back."""

    def __init__(self, messages: Sequence[Message], constants: Sequence[str] | None = None) -> None:
        """Whitespace is never dyed, because templates strip it; with `constants`, neither are they and quotes."""
        contents = [message.content for message in messages]
        codes = _codes("".join(contents))
        if len(codes) > _DYE_END - _DYE_START:
            raise BadRecordError("too long to mask", f"over {_DYE_END - _DYE_START} characters cannot be masked")
        if _is_dye(codes).any():
            raise BadRecordError("unassigned characters", "the text holds code points that Unicode has not assigned")
        self._plain = codes
        self._owner = np.repeat(np.arange(len(contents)), [len(content) for content in contents])
        dyed = np.where(_keep(codes, contents, constants), codes, np.arange(len(codes), dtype=np.uint32) + _DYE_START)
        self._expected = np.flatnonzero(dyed >= _DYE_START)[_is_dye(dyed[dyed >= _DYE_START])]
        edges = np.cumsum([0, *map(len, contents)])
        self.messages = [
            {"role": message.role, "content": _text(dyed[a:b])}
            for message, a, b in zip(messages, edges[:-1], edges[1:], strict=True)
        ]

    def check(self, text: str, dyed: str) -> str:
        """`dyed`, once it is proven that washing the dye out gives `text` and that no character was lost."""
        codes = _codes(dyed)
        where = np.flatnonzero(_is_dye(codes))
        sources = codes[where] - _DYE_START
        codes[where] = self._plain[sources]
        if _text(codes) != text:
            raise BadRecordError("template rewrites", "the template changes the text itself, so no exact mask exists")
        found = np.sort(sources)
        if len(found) != len(self._expected) or (found != self._expected).any():
            missing = np.setdiff1d(self._expected, found)
            if len(missing):
                number = int(self._owner[missing[0]]) + 1
                role = self.messages[number - 1]["role"]
                raise BadRecordError(
                    "template drops text",
                    f"the chat template leaves out message {number} (role '{role}') or part of it",
                )
            raise BadRecordError(
                "template repeats text", "the chat template repeats a message, so no exact mask exists"
            )
        return dyed

    def extent(self, dyed: str, turn: int) -> tuple[int, int]:
        """The first character of a message in the rendering, and the one behind its last."""
        codes = _codes(dyed)
        where = np.flatnonzero(_is_dye(codes))
        owners = self._owner[codes[where] - _DYE_START]
        mine = np.flatnonzero(owners == turn)
        if not len(mine):
            raise BadRecordError("empty turn", f"message {turn + 1} (role 'assistant') has no text to learn")
        if (np.diff(codes[where[mine]].astype(np.int64)) <= 0).any() or len(mine) != mine[-1] - mine[0] + 1:
            raise BadRecordError("template reorders text", f"the template reorders message {turn + 1}")
        return int(where[mine[0]]), int(where[mine[-1]]) + 1

    def last_dyed(self, dyed: str) -> int:
        """The place behind the last dyed character, 0 if there is none."""
        where = np.flatnonzero(_is_dye(_codes(dyed)))
        return int(where[-1]) + 1 if len(where) else 0


def _codes(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32).copy()


def _text(codes: NDArray[np.uint32]) -> str:
    return codes.astype("<u4").tobytes().decode("utf-32-le")


def _is_dye(codes: NDArray[np.uint32]) -> NDArray[np.bool_]:
    return (codes >= _DYE_START) & (codes < _DYE_END)


_SPACES = np.array([code for code in range(0x3001) if chr(code).isspace()], np.uint32)
_QUOTES = np.array([ord(char) for char in "\"'\\"], np.uint32)


def _keep(codes: NDArray[np.uint32], contents: Sequence[str], constants: Sequence[str] | None) -> NDArray[np.bool_]:
    """Characters that stay undyed: templates strip whitespace, escape quotes and look for certain words."""
    kept: NDArray[np.bool_] = np.isin(codes, _SPACES)
    if constants is None:
        return kept
    kept |= np.isin(codes, _QUOTES)
    offset = 0
    for content in contents:
        for constant in constants:
            at = content.find(constant)
            while at >= 0:
                kept[offset + at : offset + at + len(constant)] = True
                at = content.find(constant, at + len(constant))
        offset += len(content)
    return kept


_DATE = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>[^'"]*)(?P=quote)\s*\)""")


def _with_date(template: str, today: str) -> str:
    """The template with its calls for today's date answered: every rendering, also of a resumed run, sees the same."""
    date = datetime.datetime.fromisoformat(today)
    return _DATE.sub(lambda call: f"'{date.strftime(call['format'])}'", template)


def _compared_constants(template: str) -> tuple[str, ...]:
    """Texts that the template compares with or searches for, such as `</think>`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    try:
        tree = environment.parse(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template))
    except TemplateError as error:
        raise WhetError(f"the chat template is not valid Jinja: {error}") from None
    found = {
        constant.value
        for kind in (nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)
        for parent in tree.find_all(kind)
        for constant in parent.find_all(nodes.Const)
        if isinstance(constant.value, str) and constant.value.strip()
    }
    return tuple(sorted(found))


def _common_prefix(a: str, b: str) -> int:
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])
