"""Answers through transformers' own generation, for models that slots do not serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whet.core.errors import WhetError
from whet.core.whereabouts import HERE
from whet.infer.engine import END, LENGTH, STRING, Answer, Ask, until_string
from whet.infer.sampling import row_keys
from whet.model.attention import plain

_NEVER = 1 << 30
"""No token's id: without any, transformers would take the model's own."""


def answer_plainly(
    model: nn.Module, prompts: Sequence[Sequence[int]], limits: Sequence[int], pad_id: int, ask: Ask, batch: int,
    done: Callable[[int], None],
) -> list[Answer]:  # fmt: skip
    """Prompts of the same length share a batch: a model with state would take padding for text. Sampled ones are alone,
    because torch's random numbers depend on the batch."""
    if ask.tools is not None:
        raise WhetError(
            f"model.path: tools cannot be used with this model ({type(model).__name__}): it keeps a state or cache of "
            "its own kind, into which whet cannot put their results. Ask it without tools"
        )
    answers = [Answer() for _ in prompts]
    keys = row_keys(prompts, ask.sampling.seed)
    alone = ask.sampling.temperature > 0 or ask.heard is not None
    with plain(model):
        for numbers in _groups(prompts, limits, 1 if alone else batch):
            HERE.at("answering prompts")
            torch.manual_seed(keys[numbers[0]])
            for number, ids in zip(numbers, _generated(model, prompts, limits, pad_id, ask, numbers), strict=True):
                answers[number] = _finished(ids, limits[number], ask)
            done(len(numbers))
    return answers


def _groups(prompts: Sequence[Sequence[int]], limits: Sequence[int], batch: int) -> list[list[int]]:
    """Numbers of prompts that share length and limit, at most `batch` together."""
    groups: list[list[int]] = []
    for number in sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), limits[i], i)):
        first = groups[-1][0] if groups else None
        alike = first is not None and (len(prompts[first]), limits[first]) == (len(prompts[number]), limits[number])
        if alike and len(groups[-1]) < batch:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def _generated(
    model: nn.Module, prompts: Sequence[Sequence[int]], limits: Sequence[int], pad_id: int, ask: Ask, numbers: list[int]
) -> list[list[int]]:
    from transformers import GenerationConfig

    sampling = ask.sampling
    options: dict[str, Any] = {"repetition_penalty": sampling.repetition_penalty}
    if sampling.temperature > 0:
        options |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        options |= {"min_p": sampling.min_p} if sampling.min_p > 0 else {}
    settings = GenerationConfig(
        max_new_tokens=limits[numbers[0]], do_sample=sampling.temperature > 0,
        eos_token_id=sorted(ask.stops) or _NEVER, pad_token_id=pad_id, **options,
    )  # fmt: skip
    tokens = torch.tensor([list(prompts[i]) for i in numbers]).to(next(model.parameters()).device)
    width = tokens.shape[1]

    def found_string(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        assert ask.text is not None
        ended = [until_string(row, sampling.stop, ask.text) is not None for row in ids[:, width:].tolist()]
        return torch.tensor(ended, device=ids.device)

    output = model.generate(  # type: ignore[operator]
        tokens, attention_mask=torch.ones_like(tokens), generation_config=settings,
        stopping_criteria=[found_string] if sampling.stop else None,
        streamer=_Heard(numbers[0], ask) if ask.heard is not None else None,
    )  # fmt: skip
    return output[:, width:].tolist()


class _Heard:
    """Passes tokens on; the first call has the prompt."""

    def __init__(self, number: int, ask: Ask) -> None:
        self._number, self._ask, self._is_prompt = number, ask, True

    def put(self, tokens: Tensor) -> None:
        if not self._is_prompt and self._ask.heard is not None:
            for token in tokens.flatten().tolist():
                if token not in self._ask.stops:
                    self._ask.heard(self._number, token)
        self._is_prompt = False

    def end(self) -> None:
        pass


def _finished(ids: list[int], limit: int, ask: Ask) -> Answer:
    end = next((i for i, token in enumerate(ids) if token in ask.stops), None)
    last = () if end is None else (ids[end],)
    ids = ids if end is None else ids[:end]
    kept = until_string(ids, ask.sampling.stop, ask.text) if ask.sampling.stop and ask.text else None
    if kept is not None:
        return Answer(kept[0], STRING, text=kept[1])
    return Answer(ids[:limit], LENGTH if end is None else END, last)
