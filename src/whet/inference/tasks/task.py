"""The types of a task: examples, scorer, answers and result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from whet.data.conversation import Message


@dataclass(frozen=True, slots=True)
class Example:
    """A question with its correct answers; any of them counts."""

    messages: tuple[Message, ...]
    """The conversation up to the model's answer."""
    answers: tuple[str, ...]
    origin: str
    """File and line, for error messages."""
    choices: int = 0
    """The number of choices of a multiple-choice question, whose answer is a letter read from the logits; else 0."""
    tools: tuple[dict[str, Any], ...] = ()
    """What the assistant may call, according to the record."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What else the scorer needs: a JSON schema, the tests of a function."""

    @property
    def prompt(self) -> str:
        """For display: the question, or all messages if there are several."""
        if len(self.messages) == 1:
            return self.messages[0].content
        return "\n".join(f"{message.role}: {message.content}" for message in self.messages)

    @property
    def expected(self) -> str:
        return self.answers[0]


@dataclass(frozen=True, slots=True)
class Scorer:
    """Scores an answer between 0 (wrong) and 1 (right)."""

    name: str
    score: Callable[[str, Example], float]
    graded: bool = False
    """Whether scores between 0 and 1 occur."""
    empty_score: float | None = None
    """The score of an empty answer, if known without running the scorer."""
    is_io_bound: bool = False
    """Whether scoring waits for other processes, so that several answers are scored in parallel."""
    verbatim: bool = False
    """Whether surrounding whitespace is part of an answer, such as the indent of a program's first line."""
    corpus_score: Callable[[Sequence[str], Sequence[Example]], float] | None = None
    """The score over all answers at once, for metrics where it is not the mean over examples."""


@dataclass(frozen=True, slots=True)
class Task:
    """Examples and how to score answers to them. For multiple choice the scorer gets a letter."""

    name: str
    examples: Callable[[int], list[Example]]
    """The first n examples, or all if there are fewer."""
    max_new_tokens: int
    scorer: Scorer
    calculator: bool | None = None
    """Whether the model may use the calculator; None: if its tokenizer has the tokens of inline calculations."""


@dataclass(frozen=True, slots=True)
class AnsweredExample:
    """An example with the model's answer and its score; a line of samples.jsonl."""

    task: str
    prompt: str
    expected: str
    answer: str
    right: bool | None
    """None for graded scores."""
    score: float | None
    """None for answers to prompts without a task."""
    number: int
    """The index of the example in its task."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The scores of a model on a task."""

    task: str
    scorer: str
    samples: list[AnsweredExample]
    """In the order of the examples."""
    requested: int
    """Examples that were to be scored; a time limit may leave fewer samples."""
    baseline: float
    """The score without any skill: chance for multiple choice, else that of empty answers."""
    graded: bool
    corpus_score: float | None = None

    @property
    def scores(self) -> list[float]:
        return [sample.score for sample in self.samples if sample.score is not None]

    @property
    def score(self) -> float:
        return sum(self.scores) / len(self.samples)
