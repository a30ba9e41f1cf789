"""Turns between markers → token ids and loss mask, together.

    text    <<<|user|>>>  Hi  <<<|user|>>>  <<<|assistant|>>>  Yes  <<<|assistant|>>>
    ids          7        …        7               8            …          8            EOD
    loss         0        0        0               0            1          1             1

The opening marker of an answer is given, so it is not learned; the closing one and the end of the document are: the
model must learn to stop. Spans are encoded one by one, and those of whitespace alone have no tokens, as on LUMI.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from whet.core.errors import WhetError
from whet.data.config import Marker, Markers
from whet.data.conversation import BadRecordError, Conversation, Marked, Text
from whet.data.encode import Encoder
from whet.data.render import Rendered
from whet.data.turns import LOOK_ALIKE, Turn, look_alikes, markers_by_role, parse_turns


class MarkedRenderer:
    """Renders with one tokenizer and its markers."""

    def __init__(self, tokenizer: Encoder, markers: Markers, train_on: str) -> None:
        self._encoder, self._markers, self._train_on = tokenizer, markers, train_on
        self.ids = resolve(tokenizer, markers)
        tokenizer.check_markers(list(self.ids.values()))
        self._controls = frozenset([*self.ids.values(), tokenizer.eod])
        known = {*markers_by_role(markers).values(), *(tokenizer.text_of(number) for number in self._controls)}
        self._look_alike = look_alikes(sorted(known))

    def render_items(self, items: Sequence[Conversation | Text | Marked]) -> list[Rendered | BadRecordError]:
        """Each item with its tokens or its reason, in order; the spans of all are encoded together."""
        texts = [item.text for item in items if isinstance(item, Text)]
        documents = (self._plain(ids) for ids in self._encoder.encode_batch(texts))
        turns = iter(self.render([item for item in items if not isinstance(item, Text)]))
        return [next(documents) if isinstance(item, Text) else next(turns) for item in items]

    def _plain(self, ids: list[int]) -> Rendered:
        ids = [*ids, self._encoder.eod]
        return Rendered(np.array(ids, dtype=np.int32), np.array([0] + [1] * (len(ids) - 1), dtype=np.uint8), ends=True)

    def render(self, batch: Sequence[Marked | Conversation]) -> list[Rendered | BadRecordError]:
        """Each record with its tokens or its reason, in order; the spans of all are encoded together."""
        parsed = [self._parse(item) for item in batch]
        turns = itertools.chain.from_iterable(found for found in parsed if isinstance(found, list))
        spans = iter(self._encoder.encode_batch([turn.text for turn in turns if turn.text.strip()]))
        return [self._join(found, spans) if isinstance(found, list) else found for found in parsed]

    def _parse(self, item: Marked | Conversation) -> list[Turn] | BadRecordError:
        try:
            turns = parse_turns(item, self._markers)
        except BadRecordError as error:
            return error
        if self._train_on != "all" and not any(turn.role == "assistant" for turn in turns):
            return BadRecordError("no assistant turn", "no turn is the assistant's, so nothing can be learned")
        return turns

    def _join(self, turns: list[Turn], spans: Iterator[list[int]]) -> Rendered:
        """The spans with their markers around them. `spans` gives the ids of each that is not whitespace."""
        everything = self._train_on == "all"
        last = max((i for i, turn in enumerate(turns) if turn.role == "assistant"), default=-1)
        ids: list[int] = []
        loss: list[int] = []
        learned, notes = False, []
        for i, turn in enumerate(turns):
            span = next(spans) if turn.text.strip() else []
            marker = [] if turn.role is None else [self.ids[turn.role]]
            answer = turn.role == "assistant" and (self._train_on != "last" or i == last)
            learned = turn.learn and (everything or answer)
            ids += [*marker, *span, *marker]
            loss += [int(learned and everything) for _ in marker] + [int(learned)] * (len(span) + len(marker))
            if self._look_alike.search(turn.text) or not self._controls.isdisjoint(span):
                notes.append(LOOK_ALIKE)
        if self._markers.append_eod:
            ids.append(self._encoder.eod)
            loss.append(int(learned))  # after a turn that is learned: an answer ends here, and nothing follows it
        loss[:1] = [0]  # nothing comes before it, so it is no target
        ends = not everything or self._markers.append_eod or turns[-1].role is not None
        return Rendered(
            np.array(ids, dtype=np.int32), np.array(loss, dtype=np.uint8), ends, tuple(dict.fromkeys(notes))
        )


def resolve(encoder: Encoder, markers: Markers) -> dict[str, int]:
    """The id of each marker, by role; refused where it could be anything else."""
    ids = {"user": _id(encoder, markers.user, "user"), "assistant": _id(encoder, markers.assistant, "assistant")}
    if markers.system is not None:
        ids["system"] = _id(encoder, markers.system, "system")
    roles = {encoder.eod: "the end of document"}
    texts: dict[str, str] = {}
    for role, number in ids.items():
        text = markers_by_role(markers)[role]
        if number in roles or text in texts:
            both = roles.get(number) or texts[text]
            raise WhetError(f"data.markers.{role}: {text} (id {number}) is {both} already; they must differ")
        roles[number] = texts[text] = f"the marker of {role}"
    return ids


def _id(encoder: Encoder, marker: Marker, role: str) -> int:
    if marker.id is None:
        found = encoder.id_of(marker.text)
        if found is None:
            raise WhetError(
                f"data.markers.{role}.text: the tokenizer does not know {marker.text} as one piece; give the id of a "
                f"reserved piece: data.markers.{role}.id"
            )
        key, number = "text", found
    else:
        key, number = "id", marker.id
        if number >= encoder.vocabulary:
            raise WhetError(
                f"data.markers.{role}.id: {number} is beyond the tokenizer's {encoder.vocabulary} pieces (from 0)"
            )
    kind = encoder.kind_of(number)
    if kind is not None:
        raise WhetError(
            f"data.markers.{role}.{key}: id {number} is the {kind} piece {encoder.text_of(number)!r}, which text "
            "becomes too, so a turn could not be told from text. Choose a control or unused piece"
        )
    return number
