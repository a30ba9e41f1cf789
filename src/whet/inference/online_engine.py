"""Continuous batching of sequences that arrive at any time, each with its own sampling and adapter.

The KV cache has one slot per sequence. Slots are as long as the longest sequence needs now, so many short ones run
together and a long one with few: when a sequence outgrows its slot, all slots are made longer, and where memory then
holds fewer of them, the newest sequences return to the queue and are prefilled again. Queue order is arrival order.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from whet.core.errors import first_line
from whet.inference.engine import (
    CPU_BATCHING,
    GPU_BATCHING,
    GenerationSequence,
    append_token,
    choose_prefill_backend,
    compact_rows,
    has_experts,
    max_cached_tokens,
    prefill_logits,
)
from whet.inference.generate import context_length, generate
from whet.inference.kv_cache import DecodeRunner, KVCache, use_kv_cache
from whet.inference.sampling import Sampling, sample_next_tokens
from whet.model.attention.dispatch import LayerAttention

_MIN_SLOT_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Adapters:
    """How the adapters of a model are chosen. The name None is the model without them."""

    use: Callable[[Sequence[str | None]], AbstractContextManager[Any]]
    """Entered around a forward pass: one name for all rows, or, if `mixed`, one for each."""
    mixed: bool
    """Rows of a batch may have different adapters."""


NO_ADAPTERS = Adapters(lambda names: contextlib.nullcontext(), mixed=True)


@dataclass(slots=True, eq=False)
class OnlineSequence(GenerationSequence):
    """A sequence with its own adapter and log probabilities."""

    adapter: str | None = None
    top_logprobs: int | None = None
    """How many likely tokens to report beside each token; None: no log probabilities."""
    logprobs: list[TokenLogprob] | None = None
    """Of each token of the completion, and of the stop token."""
    failure: str | None = None
    """Why it could not be continued; the other sequences go on."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of a token and of the likeliest ones, before temperature and filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class OnlineEngine:
    """Completes submitted sequences, step by step."""

    def __init__(
        self, model: nn.Module, layers: Sequence[LayerAttention], max_sequences: int, adapters: Adapters = NO_ADAPTERS,
        max_tokens: int | None = None,
    ) -> None:  # fmt: skip
        """`layers`: as `probe_kv_cache` returns them; `max_tokens` in the cache: as many as memory allows if absent."""
        self._model, self._adapters, self._max_sequences = model, adapters, max_sequences
        self._device = next(model.parameters()).device
        self._policy = CPU_BATCHING if self._device.type == "cpu" else GPU_BATCHING
        self._prefill_backend = choose_prefill_backend(model, layers)
        self._max_tokens = max_tokens or max_cached_tokens(model)
        self._max_length = (context_length(model) or 1 << 30) + 2
        self._waiting: deque[OnlineSequence] = deque()
        self._rows: list[OnlineSequence | None] = []
        self._cache = KVCache(1, 0)

    def submit(self, sequence: OnlineSequence) -> None:
        """Add a sequence to the queue. Set `done` to cancel it, from any thread."""
        self._waiting.append(sequence)

    @property
    def running(self) -> list[OnlineSequence]:
        return [row for row in self._rows if row is not None]

    @property
    def waiting(self) -> list[OnlineSequence]:
        return list(self._waiting)

    @torch.inference_mode()
    def step(self) -> None:
        """Prefill some waiting prompts, then generate one token of each sequence in progress."""
        self._drop_done()
        with use_kv_cache(self._model):
            self._make_room_for_running()
            self._prefill(self._admit())
            self._drop_done()
            for _ in compact_rows(self._rows, self._cache):  # type: ignore[arg-type]
                pass
            self._make_room_for_running()
            if self._rows:
                self._decode()
        self._drop_done()

    def _drop_done(self) -> None:
        """Free the slots of sequences that finished or were cancelled."""
        self._rows = [None if row is None or row.done else row for row in self._rows]
        if any(row.done for row in self._waiting):
            self._waiting = deque(row for row in self._waiting if not row.done)
        if not any(self._rows):
            self._rows, self._cache = [], KVCache(1, 0)  # idle: the memory is free for others

    # Slots: as long as needed, as many as fit.

    def _slot_length(self, needed: int) -> int:
        """A power of two, so that slots are lengthened seldom, but not more than the context."""
        return max(_MIN_SLOT_LENGTH, min(1 << (needed - 1).bit_length(), self._max_length))

    def _slots(self, slot_length: int) -> int:
        return min(self._max_sequences, max(1, self._max_tokens // slot_length))

    def _make_room_for_running(self) -> None:
        """Lengthen the slots if a sequence in progress needs it; the newest lose theirs if memory holds fewer."""
        needed = max((_needed_length(row) for row in self.running), default=0)
        if needed <= self._cache.slot_length:
            return
        newest = sorted(self.running, key=lambda row: row.index)
        for row in newest[self._slots(self._slot_length(needed)) :][::-1]:
            self._rows[self._rows.index(row)] = None
            self._waiting.appendleft(row)
        needed = max(_needed_length(row) for row in self.running)
        if needed > self._cache.slot_length:
            self._resize(self._slot_length(needed))

    def _resize(self, slot_length: int) -> None:
        for _ in compact_rows(self._rows, self._cache):  # type: ignore[arg-type]
            pass
        old, self._cache = self._cache, KVCache(self._slots(slot_length), slot_length)
        kept = min(old.slot_length, slot_length)
        for layer, tensors in old.layers.items():
            keys, values = (
                tensor.new_zeros((self._cache.num_slots, slot_length, *tensor.shape[2:])) for tensor in tensors
            )
            for slot, row in enumerate(self._rows):
                assert row is not None
                for new, tensor in zip((keys, values), tensors, strict=True):
                    new[slot, : min(kept, row.position)].copy_(tensor[slot, : min(kept, row.position)])
            self._cache.layers[layer] = keys, values
        use_cuda_graphs = self._device.type == "cuda" and self._adapters is NO_ADAPTERS and not has_experts(self._model)
        self._runner = DecodeRunner(
            self._model, self._cache, None, None, self._device, use_cuda_graphs,
            self._policy.pad_to_sizes and use_cuda_graphs,
        )  # fmt: skip

    def _admit(self) -> list[tuple[int, OnlineSequence]]:
        """Assign free slots to the first waiting sequences: those of one adapter, as many as fit into one pass."""
        admitted: list[tuple[int, OnlineSequence]] = []
        tokens = 0
        while self._waiting:
            first = self._waiting[0]
            needed = max(_needed_length(row) for row in (first, *self.running))
            if needed > self._cache.slot_length:
                if admitted or len(self.running) >= self._slots(self._slot_length(needed)):
                    break
                self._resize(self._slot_length(needed))
            tokens += len(first.tokens)
            alike = not admitted or first.adapter == admitted[0][1].adapter
            if len(self.running) >= self._cache.num_slots or not alike:
                break
            if admitted and tokens > self._policy.max_prefill_tokens:
                break
            slot = self._rows.index(None) if None in self._rows else len(self._rows)
            self._rows[slot : slot + 1] = [self._waiting.popleft()]
            admitted.append((slot, first))
        return admitted

    def _prefill(self, admitted: Sequence[tuple[int, OnlineSequence]]) -> None:
        if not admitted:
            return
        with self._adapters.use([admitted[0][1].adapter]):
            logits = prefill_logits(self._model, self._cache, admitted, self._prefill_backend)
        self._append(logits, [row for _, row in admitted])

    def _decode(self) -> None:
        """One token for each sequence; rows whose adapters cannot share a pass take turns."""
        rows = self.running  # without gaps
        names = [row.adapter for row in rows]
        max_length = 1 + max(row.position for row in rows)
        states = torch.tensor([row.decode_state() for row in rows])
        if self._adapters.mixed or len(set(names)) == 1:
            with self._adapters.use(names if self._adapters.mixed else names[:1]):
                return self._append(self._runner.logits(states.T, max_length), rows)
        logits: Tensor | None = None
        for name in dict.fromkeys(names):
            is_other = torch.tensor([each != name for each in names])
            # the others write to the last position of their slots, which no sequence reaches
            idle = torch.tensor([0, self._cache.slot_length - 1, 0, 0, 0])
            with self._adapters.use([name]):
                found = self._runner.logits(torch.where(is_other[:, None], idle, states).T, max_length)
            logits = found.clone() if logits is None else torch.where(is_other[:, None].to(found.device), logits, found)
        assert logits is not None
        return self._append(logits, rows)

    def _append(self, logits: Tensor, rows: Sequence[OnlineSequence]) -> None:
        tokens = sample_each(logits, rows)
        for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            if row.done:  # cancelled meanwhile
                continue
            if row.logprobs is not None and not row.forced:
                row.logprobs.append(_token_logprob(logits[index], token, row.top_logprobs or 0))
            try:
                append_token(row, token)
            except Exception as error:  # such as a tokenizer that cannot decode it
                row.failure, row.done = first_line(error), True


def sample_each(logits: Tensor, rows: Sequence[OnlineSequence]) -> list[int]:
    """The next token of each row of logits [N, V] by its own sampling; rows with the same settings are sampled
    together, and a row's token does not depend on the others."""
    groups: dict[Sampling, list[int]] = {}
    for index, row in enumerate(rows):
        settings = replace(row.options.sampling, seed=0, stop=(), max_new_tokens=1)
        groups.setdefault(settings, []).append(index)
    tokens = [0] * len(rows)
    for sampling, members in groups.items():
        chosen = logits if len(members) == len(rows) else logits[members]
        state = torch.tensor([[rows[i].rng_key, rows[i].num_sampled] for i in members]).to(logits.device)
        seen = None
        if sampling.repetition_penalty != 1:
            seen = torch.zeros_like(chosen, dtype=torch.bool)
            for position, i in enumerate(members):
                seen[position, torch.tensor(rows[i].tokens).to(logits.device)] = True
        found = sample_next_tokens(chosen, state[:, 0], state[:, 1], sampling, seen).tolist()
        for i, token in zip(members, found, strict=True):
            tokens[i] = token
    return tokens


def _token_logprob(logits: Tensor, token: int, top: int) -> TokenLogprob:
    logprobs = logits.float().log_softmax(dim=-1)
    values, tokens = logprobs.topk(min(top, len(logprobs)))
    likeliest = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, logprobs[token].item(), likeliest)


def _needed_length(row: GenerationSequence) -> int:
    """The slot length that the next token needs, with one position that no sequence reaches."""
    return len(row.prompt) + len(row.completion.ids) + 2


# The same interface, one sequence at a time: for models that the KV cache does not support (recurrent, custom caches).


class _CancelledSequence(Exception):  # noqa: N818
    """Raised in the callback of a token to leave transformers' loop."""


class SerialEngine:
    """Completes submitted sequences through transformers, in the order of their arrival."""

    def __init__(self, model: nn.Module, adapters: Adapters = NO_ADAPTERS) -> None:
        self._model, self._adapters = model, adapters
        self._waiting: deque[OnlineSequence] = deque()
        self._running: OnlineSequence | None = None

    def submit(self, sequence: OnlineSequence) -> None:
        """Add a sequence to the queue. Set `done` to cancel it, from any thread."""
        self._waiting.append(sequence)

    @property
    def running(self) -> list[OnlineSequence]:
        return [] if self._running is None else [self._running]

    @property
    def waiting(self) -> list[OnlineSequence]:
        return list(self._waiting)

    def step(self) -> None:
        """Complete the next sequence."""
        while self._waiting and self._waiting[0].done:
            self._waiting.popleft()
        if not self._waiting:
            return
        row = self._running = self._waiting.popleft()

        def on_token(_: int, token: int) -> None:
            if row.done:
                raise _CancelledSequence
            row.completion.ids.append(token)
            if row.options.on_token is not None:
                row.options.on_token(row.index, token)

        try:
            with self._adapters.use([row.adapter]):
                (row.completion,) = generate(
                    self._model, [row.prompt], replace(row.options.sampling, max_new_tokens=row.limit),
                    sorted(row.options.stop_ids), decode=row.options.decode, on_token=on_token,
                )  # fmt: skip
        except _CancelledSequence:
            pass
        finally:
            row.done, self._running = True, None
