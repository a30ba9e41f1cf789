"""What a model answers: letters from its logits where there are choices, generated text where there are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

import torch
from torch import nn

from whet.core.errors import WhetError
from whet.core.whereabouts import HERE
from whet.data.conversation import BadRecordError
from whet.data.render import Renderer
from whet.infer.generate import Sampling, generate
from whet.infer.tasks.task import Example, Task
from whet.infer.tools import Tools, calculator_for, has_markers, offer_of
from whet.model.attention import plain
from whet.model.head import head_of

_TOKENS_AT_ONCE = 16_384  # of one forward pass over questions with choices


@dataclass(frozen=True, slots=True)
class Answerer:
    """A model that can be asked, with what it takes to write questions for it and to read its answers."""

    model: nn.Module
    renderer: Renderer
    stops: Sequence[int]

    def prompts(self, task: Task, examples: Sequence[Example]) -> list[list[int]]:
        """The tokens of each question; a WhetError for one that leaves no room for an answer."""
        prompts = []
        room = context_of(self.model)
        longest = 1 if examples and examples[0].choices else task.max_new_tokens
        offer = offer_of(self._calculator(task))
        for example in examples:
            try:
                prompts.append(self.renderer.prompt_ids(example.messages, offer))
            except BadRecordError as error:
                raise WhetError(f"{example.place}: {error}") from None
            if room is not None and len(prompts[-1]) + longest > room:
                raise WhetError(
                    f"{example.place}: the question has {len(prompts[-1]):,} tokens and its answer may have "
                    f"{longest:,}, more than the {room:,} that the model can see. Shorten the question, leave it out, "
                    f"or set max_new_tokens of the task {task.name}"
                )
        return prompts

    def answers(
        self, task: Task, examples: Sequence[Example], prompts: Sequence[Sequence[int]], done: Callable[[int], None]
    ) -> list[str]:
        """The answer to each question."""
        if not examples:
            return []
        if examples[0].choices:
            return self._letters(examples, prompts, done)
        pad = self.renderer.tokenizer.pad_token_id
        sampling = Sampling(max_new_tokens=task.max_new_tokens)
        tools = self._calculator(task)
        ids = generate(self.model, prompts, self.stops, pad if pad is not None else 0, sampling, done=done, tools=tools)
        if tools is not None:
            ids = [list(tools.said(each)) for each in ids]
        texts = [str(self.renderer.tokenizer.decode(each, skip_special_tokens=True)) for each in ids]
        return texts if task.scorer.verbatim else [text.strip() for text in texts]

    def _calculator(self, task: Task) -> Tools | None:
        wanted = has_markers(self.renderer) if task.calculator is None else task.calculator
        return calculator_for(self.renderer) if wanted else None

    @torch.inference_mode()
    def _letters(
        self, examples: Sequence[Example], prompts: Sequence[Sequence[int]], done: Callable[[int], None]
    ) -> list[str]:
        """Of the letters, the one with the highest logit where the answer begins: one pass, and only one position of
        each question needs the head. Padding stands behind the question, where it cannot be seen."""
        self.model.eval()
        lead, tokens = letter_tokens(self.renderer, max(example.choices for example in examples))
        prompts = [[*prompt, *lead] for prompt in prompts]
        device = next(self.model.parameters()).device
        letters = torch.tensor(tokens, device=device)
        found = [""] * len(examples)
        with plain(self.model):
            for numbers in batches([len(prompt) for prompt in prompts], _TOKENS_AT_ONCE):
                HERE.at("answering prompts")
                width = max(len(prompts[i]) for i in numbers)
                rows = torch.tensor([[*prompts[i], *[0] * (width - len(prompts[i]))] for i in numbers], device=device)
                ends = torch.tensor([len(prompts[i]) - 1 for i in numbers], device=device)
                body: Any = self.model.base_model
                hidden = body(input_ids=rows, use_cache=False).last_hidden_state[torch.arange(len(numbers)), ends]
                logits = head_of(self.model).logits(hidden)[:, letters].float().cpu()
                for i, row in zip(numbers, logits, strict=True):
                    found[i] = ascii_uppercase[int(row[: examples[i].choices].argmax())]
                done(len(numbers))
        return found


def letter_tokens(renderer: Renderer, count: int) -> tuple[list[int], list[int]]:
    """With what an answer A, B, … begins in this template: what comes before all letters, such as a space, and then the
    token of each, which some join with that space."""
    question = {"role": "user", "content": "?"}
    prompt = renderer.prompt_ids([question])
    tails = []
    for letter in ascii_uppercase[:count]:
        text = renderer.text([question, {"role": "assistant", "content": letter}])
        whole = renderer.tokenizer(text, add_special_tokens=False).input_ids
        alone = renderer.tokenizer(letter, add_special_tokens=False).input_ids
        tails.append(whole[len(prompt) :] if whole[: len(prompt)] == prompt else alone)
    same = next((i for i, tokens in enumerate(zip(*tails, strict=False)) if len(set(tokens)) > 1), None)
    if same is None or len({tail[same] for tail in tails}) < count:
        raise WhetError(
            "the tokenizer does not tell the letters of choices apart, so multiple choice cannot be scored by them. "
            "Give the task as questions with answers instead"
        )
    return list(tails[0][:same]), [int(tail[same]) for tail in tails]


def batches(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Numbers of like length together, so that little is padded, and no more than `most` tokens at once with it."""
    made: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda i: lengths[i]):  # the last of a batch is its longest
        if made and (len(made[-1]) + 1) * lengths[number] <= most:
            made[-1].append(number)
        else:
            made.append([number])
    return made


def context_of(model: nn.Module) -> int | None:
    """The most tokens that the model can see; None if it does not say."""
    config: Any = model.config
    return getattr(config.get_text_config(), "max_position_embeddings", None)
