"""The models of a `whet chat`: the model, a second one to compare with, its adapters; and their answers as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.core.console import progress
from whet.core.errors import WhetError
from whet.inference.calculator_tool import FunctionCallCalculator, make_calculator
from whet.inference.chat import ChatModel, ChatSession, MessageDict, Reply, explain_tokens
from whet.inference.sampling import Sampling
from whet.run.load_models import (
    NO_ADAPTER,
    InferenceModel,
    LoadMode,
    load_adapter_models,
    load_inference_model,
    load_model_pair,
)


@dataclass(frozen=True, slots=True)
class ChatModels:
    """Those who can be asked."""

    speaker: ChatModel
    beside: ChatModel | None
    adapters: dict[str, ChatModel]
    load: Callable[[str], ChatModel]
    system: str | None = None

    @property
    def asked(self) -> list[ChatModel]:
        return [each for each in (self.speaker, self.beside) if each is not None]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What the command line says."""

    model: str
    sampling: Sampling
    against: str | None = None
    adapters: dict[str, Path] = field(default_factory=dict)
    load: LoadMode = "auto"
    calculator: bool = False
    system: str | None = None


def load_chat_models(wanted: ChatRequest) -> ChatModels:
    """Load everybody. Models that differ in adapters alone share their weights."""

    def speak(ready: InferenceModel) -> ChatModel:
        calculator = make_calculator(ready.renderer) if wanted.calculator else None
        return ChatModel(
            ready.model, ready.renderer, ready.stops, wanted.sampling, calculator, ready.name, ready.within
        )

    def load(reference: str) -> ChatModel:
        return speak(load_inference_model(reference, wanted.load))

    if wanted.adapters:
        by_name = {
            name: speak(ready)
            for name, ready in load_adapter_models(wanted.model, wanted.adapters, wanted.load).items()
        }
        first = by_name[next(iter(wanted.adapters))]
        same = wanted.against in (wanted.model, NO_ADAPTER)
        beside = None if wanted.against is None else by_name[NO_ADAPTER] if same else load(wanted.against)
        return ChatModels(first, beside, by_name, load, wanted.system)
    if wanted.against is None:
        return ChatModels(load(wanted.model), None, {}, load, wanted.system)
    both = load_model_pair(wanted.model, wanted.against, wanted.load)
    return ChatModels(speak(both[0]), speak(both[1]), {}, load, wanted.system)


def answer_conversations(
    party: ChatModels, questions: Sequence[Sequence[MessageDict]], explains: bool = False
) -> list[dict[str, Any]]:
    """What everybody says to questions that have nothing to do with each other, as JSON objects."""
    opening: list[MessageDict] = [{"role": "system", "content": party.system}] if party.system else []
    whole = [list(each) if each[0]["role"] == "system" else [*opening, *each] for each in questions]
    return _merge_records(party, [_replies_of(speaker, whole) for speaker in party.asked], explains)


def answer_message(
    party: ChatModels, text: str, explains: bool = False, show: Callable[[ChatModel, str], None] | None = None
) -> dict[str, Any]:
    """What everybody says to one message; `show` gets the text as it comes."""
    said = []
    for speaker in party.asked:
        hear = None if show is None else (lambda piece, speaker=speaker: show(speaker, piece))
        said.append([ChatSession(speaker, party.system).say(text, hear)])
    return {"prompt": text, **_merge_records(party, said, explains)[0]}


def generate_unconditional(party: ChatModels, explains: bool = False) -> dict[str, Any]:
    """What everybody says out of the blue: from the token that begins a text, without a chat template."""
    return {
        "prompt": None,
        **_merge_records(party, [[speaker.answer(_bos_prompt(speaker))] for speaker in party.asked], explains)[0],
    }


def _bos_prompt(speaker: ChatModel) -> list[int]:
    tokenizer = speaker.renderer.tokenizer
    begins = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if begins is None:
        raise WhetError(
            f"--unconditional: the tokenizer of {speaker.name} has neither a BOS nor an EOS token to begin with"
        )
    return [begins]


def _replies_of(speaker: ChatModel, questions: Sequence[Sequence[MessageDict]]) -> list[Reply]:
    with progress(f"asking {speaker.name}", len(questions)) as bar:
        if not isinstance(speaker.calculator, FunctionCallCalculator):
            return speaker.answer_all([speaker.prompt(each) for each in questions], bar.advance)
        found = []
        for each in questions:  # calls are turns of their own, which sessions take part in
            session = ChatSession(speaker)
            session.messages = list(each[:-1])
            found.append(session.say(each[-1]["content"]))
            bar.advance()
        return found


def _merge_records(party: ChatModels, said: Sequence[Sequence[Reply]], explains: bool) -> list[dict[str, Any]]:
    """One object for each question: the first speaker's answer, and under `against` the other's."""
    told = [
        [_reply_record(speaker, each, explains) for each in answers]
        for speaker, answers in zip(party.asked, said, strict=True)
    ]
    if len(told) == 1:
        return told[0]
    return [first | {"against": second} for first, second in zip(*told, strict=True)]


def _reply_record(speaker: ChatModel, said: Reply, explains: bool) -> dict[str, Any]:
    result: dict[str, Any] = {
        "model": speaker.name, "answer": said.text, "stopped": said.stopped, "tokens": len(said.ids),
    }  # fmt: skip
    if explains:
        with speaker.within():
            tokens = explain_tokens(speaker.model, said.prompt, said.ids, speaker.piece)
        result["explain"] = [each.as_dict() for each in tokens]
    return result
