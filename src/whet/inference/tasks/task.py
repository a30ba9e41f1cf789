"""The types of a task: examples, scorer, answers and result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Example:
    """One question with its right answers, of which any will do."""

    messages: tuple[dict[str, Any], ...]
    """What the model is asked, as chat templates expect it."""
    answers: tuple[str, ...]
    place: str
    """Where it stands, for messages: a file and line."""
    choices: int = 0
    """Of multiple choice: how many there are. Then the answer is a letter, read from the logits."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What the scorer needs besides: a schema, the tests of a function."""

    @property
    def prompt(self) -> str:
        """To be shown: the question, or all turns where there are several."""
        if len(self.messages) == 1:
            return str(self.messages[0]["content"])
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.messages)

    @property
    def expected(self) -> str:
        return self.answers[0]


@dataclass(frozen=True, slots=True)
class Scorer:
    """Judges answers: 0 is wrong, 1 is right."""

    name: str
    score: Callable[[str, Example], float]
    graded: bool = False
    """Whether there is something between 0 and 1."""
    empty: float | None = None
    """The score of an empty answer where it need not be tried."""
    waits: bool = False
    """Whether judging is waiting for other processes, so that several can be judged at a time."""
    verbatim: bool = False
    """Whether spaces around an answer are part of it, as the indent of a program's first line is."""
    whole: Callable[[Sequence[str], Sequence[Example]], float] | None = None
    """Over all answers at once, where that is not the mean over examples."""


@dataclass(frozen=True, slots=True)
class Task:
    """Questions and how their answers are judged. Where examples have choices, the scorer sees a letter."""

    name: str
    examples: Callable[[int], list[Example]]
    """The first so many; fewer if there are no more."""
    max_new_tokens: int
    scorer: Scorer
    calculator: bool | None = None
    """Whether the model may use one; None: if it needs no offer."""


@dataclass(frozen=True, slots=True)
class AnsweredExample:
    """One answered example."""

    task: str
    prompt: str
    expected: str
    answer: str
    right: bool | None
    """None where answers are graded."""
    score: float
    number: int
    """Of the example in its task, from 0."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TaskResult:
    """How a model did on a task."""

    task: str
    scorer: str
    samples: list[AnsweredExample]
    """In the order of the examples."""
    asked_for: int
    """Examples that would have been scored, had there been time."""
    baseline: float
    """What costs nothing: chance for multiple choice, else the score of empty answers."""
    graded: bool
    whole: float | None = None
    """The scorer's number over all answers at once, where it has one."""

    @property
    def scores(self) -> list[float]:
        return [sample.score for sample in self.samples]

    @property
    def score(self) -> float:
        return sum(self.scores) / len(self.samples)
