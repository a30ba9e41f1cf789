"""Who talks in `whet chat`: the model, one beside it, its adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.core.console import progress
from whet.core.errors import WhetError
from whet.infer.chat import ChatSession, Message, Said, Speaker
from whet.infer.explain import explain
from whet.infer.sampling import Sampling
from whet.infer.tools import CalledCalculator, calculator_for
from whet.recipe.ready import BASE, Load, Ready, load_adapters, load_beside, load_ready


@dataclass(frozen=True, slots=True)
class Party:
    """Those who can be asked."""

    speaker: Speaker
    beside: Speaker | None
    adapters: dict[str, Speaker]
    load: Callable[[str], Speaker]
    system: str | None = None

    @property
    def asked(self) -> list[Speaker]:
        return [each for each in (self.speaker, self.beside) if each is not None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line says."""

    model: str
    sampling: Sampling
    against: str | None = None
    adapters: dict[str, Path] = field(default_factory=dict)
    load: Load = "auto"
    calculator: bool = False
    system: str | None = None


def gather(wanted: Wanted) -> Party:
    """Load everybody. Models that differ in adapters alone share their weights."""

    def speak(ready: Ready) -> Speaker:
        calculator = calculator_for(ready.renderer) if wanted.calculator else None
        return Speaker(ready.model, ready.renderer, ready.stops, wanted.sampling, calculator, ready.name, ready.within)

    def load(reference: str) -> Speaker:
        return speak(load_ready(reference, wanted.load))

    if wanted.adapters:
        by_name = {
            name: speak(ready) for name, ready in load_adapters(wanted.model, wanted.adapters, wanted.load).items()
        }
        first = by_name[next(iter(wanted.adapters))]
        same = wanted.against in (wanted.model, BASE)
        beside = None if wanted.against is None else by_name[BASE] if same else load(wanted.against)
        return Party(first, beside, by_name, load, wanted.system)
    if wanted.against is None:
        return Party(load(wanted.model), None, {}, load, wanted.system)
    both = load_beside(wanted.model, wanted.against, wanted.load)
    return Party(speak(both[0]), speak(both[1]), {}, load, wanted.system)


def ask_all(party: Party, questions: Sequence[Sequence[Message]], explains: bool = False) -> list[dict[str, Any]]:
    """What everybody says to questions that have nothing to do with each other, as JSON objects."""
    opening: list[Message] = [{"role": "system", "content": party.system}] if party.system else []
    whole = [list(each) if each[0]["role"] == "system" else [*opening, *each] for each in questions]
    return _together(party, [_asked(speaker, whole) for speaker in party.asked], explains)


def ask_once(
    party: Party, text: str, explains: bool = False, show: Callable[[Speaker, str], None] | None = None
) -> dict[str, Any]:
    """What everybody says to one message; `show` gets the text as it comes."""
    said = []
    for speaker in party.asked:
        hear = None if show is None else (lambda piece, speaker=speaker: show(speaker, piece))
        said.append([ChatSession(speaker, party.system).say(text, hear)])
    return {"prompt": text, **_together(party, said, explains)[0]}


def ask_nothing(party: Party, explains: bool = False) -> dict[str, Any]:
    """What everybody says out of the blue: from the token that begins a text, without a chat template."""
    return {
        "prompt": None,
        **_together(party, [[speaker.answer(_beginning(speaker))] for speaker in party.asked], explains)[0],
    }


def _beginning(speaker: Speaker) -> list[int]:
    tokenizer = speaker.renderer.tokenizer
    begins = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if begins is None:
        raise WhetError(
            f"--unconditional: the tokenizer of {speaker.name} has neither a BOS nor an EOS token to begin with"
        )
    return [begins]


def _asked(speaker: Speaker, questions: Sequence[Sequence[Message]]) -> list[Said]:
    with progress(f"asking {speaker.name}", len(questions)) as bar:
        if not isinstance(speaker.calculator, CalledCalculator):
            return speaker.answer_all([speaker.prompt(each) for each in questions], bar.advance)
        found = []
        for each in questions:  # calls are turns of their own, which sessions take part in
            session = ChatSession(speaker)
            session.messages = list(each[:-1])
            found.append(session.say(each[-1]["content"]))
            bar.advance()
        return found


def _together(party: Party, said: Sequence[Sequence[Said]], explains: bool) -> list[dict[str, Any]]:
    """One object for each question: the first speaker's answer, and under `against` the other's."""
    told = [
        [_told(speaker, each, explains) for each in answers] for speaker, answers in zip(party.asked, said, strict=True)
    ]
    if len(told) == 1:
        return told[0]
    return [first | {"against": second} for first, second in zip(*told, strict=True)]


def _told(speaker: Speaker, said: Said, explains: bool) -> dict[str, Any]:
    result: dict[str, Any] = {
        "model": speaker.name, "answer": said.text, "stopped": said.stopped, "tokens": len(said.ids),
    }  # fmt: skip
    if explains:
        with speaker.within():
            tokens = explain(speaker.model, said.prompt, said.ids, speaker.piece)
        result["explain"] = [each.as_dict() for each in tokens]
    return result
