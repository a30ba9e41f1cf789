"""Questions that are nearly the same and have different answers: a model cannot learn which one to give."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from whet.data.conversation import Conversation, Origin

_MIN_WORDS = 4
"""Shorter prompts, such as greetings, have many good answers."""
_MAX_COURTESY = 3
"""A sentence of at most so many words, none with a digit, may be a greeting or thanks."""


class _Question(NamedTuple):
    prompt: int
    answer: int
    origin: Origin


def find_conflicting_answers(items: Iterable[object]) -> list[list[Origin]]:
    """Groups of conversations that begin with nearly the same question and answer it differently, as the first two do.

    Questions count as the same if they differ in case, punctuation and whitespace only, or if one of them is the other
    with short sentences added, such as "Thank you!". Linear in time; keeps two hashes and the place of each question.
    """
    groups: dict[int, list[_Question]] = {}
    for item in items:
        if not isinstance(item, Conversation):
            continue
        first = next((n for n, message in enumerate(item.messages) if message.role == "assistant"), 0)
        text = "\n".join(message.content for message in item.messages[:first])
        words = _normalize(text)
        if len(words) < _MIN_WORDS:
            continue
        answer = item.messages[first]
        calls = str(answer.tool_calls) if answer.tool_calls else ""
        question = _Question(hash(words), hash((_normalize(answer.content), calls)), item.origin)
        groups.setdefault(hash(_without_courtesies(text) or words), []).append(question)
    found = []
    for key, group in groups.items():
        if len({question.answer for question in group}) == 1:
            continue
        if all(question.prompt != key for question in group):  # the question by itself is not among them
            group = _largest_conflict(group)
        if others := [question for question in group if question.answer != group[0].answer]:
            same = [question for question in group if question.answer == group[0].answer]
            found.append([question.origin for question in (same[0], *others, *same[1:])])
    return found


def describe_conflicts(groups: list[list[Origin]], total: int) -> str:
    """Number, two examples, remedy."""
    number = sum(map(len, groups))
    examples = "; ".join(f"{group[0]} and {group[1]}" for group in groups[:2])
    return (
        f"{number:,} of {total:,} conversations ask nearly the same question as another one, but have a different "
        f"answer, such as {examples}. Unless all answers are good, keep one, or write into the question what decides "
        "between them"
    )


def _largest_conflict(group: list[_Question]) -> list[_Question]:
    """Those of a group whose prompts are the same, short sentences included."""
    same: dict[int, list[_Question]] = {}
    for question in group:
        same.setdefault(question.prompt, []).append(question)
    return max(same.values(), key=lambda part: (len({question.answer for question in part}), len(part)))


def _normalize(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text.casefold()))


def _without_courtesies(text: str) -> tuple[str, ...]:
    """The words of all sentences but the short ones; none if all are short."""
    sentences = [_normalize(sentence) for sentence in re.split(r"[.!?\n]+", text)]
    long = [words for words in sentences if len(words) > _MAX_COURTESY or any(map(_has_digit, words))]
    return tuple(word for words in long for word in words)


def _has_digit(word: str) -> bool:
    return any(map(str.isdigit, word))
