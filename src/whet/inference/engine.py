"""Continuous batching: a waiting prompt takes the KV-cache slot of a finished answer."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from whet.core.errors import WhetError
from whet.core.heartbeat import PHASE
from whet.inference.calculator_tool import Tool, ToolState
from whet.inference.decode_runner import DecodeRunner
from whet.inference.kv_cache import KVCache, PrefillAttention, use_kv_cache
from whet.inference.sampling import Sampling, rng_keys, sample_next_tokens
from whet.model.attention import choose_backend as choose_attention
from whet.model.attention.interface import Documents
from whet.model.attention.requirements import LayerAttention
from whet.parallel.fsdp import is_sharded

# Many prompts through one model: a prompt takes the slot of an answer that is finished.
#
# Prompts are computed without padding, packed into rows; answers grow a token at a time, all together. What a row gets
# does not depend on its neighbours, up to the rounding of a product's last bit.

FINISH_END, FINISH_LENGTH, FINISH_STRING = "end", "length", "string"


@dataclass(frozen=True, slots=True)
class BatchingPolicy:
    """What suits a device."""

    steps: int
    """Between looks at what came out: a look waits for the device, and a finished answer for the look."""
    together: int
    """Tokens of prompts in one forward pass; a longer prompt has one of its own."""
    free: int
    """Prompts wait until a part 1 / `free` of the slots is free: on a GPU a pass over one takes as long as over
    several."""
    few_sizes: bool
    """Rows are filled up to a few sizes, each of which is recorded once."""


CPU_BATCHING = BatchingPolicy(steps=1, together=2048, free=1 << 30, few_sizes=False)
GPU_BATCHING = BatchingPolicy(steps=8, together=8192, free=8, few_sizes=True)


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What is wanted of every prompt."""

    sampling: Sampling
    stops: frozenset[int]
    text: Callable[[Sequence[int]], str] | None = None
    """Decodes an answer; texts that end one are looked for in it."""
    tools: Tool | None = None
    heard: Callable[[int, int], None] | None = None
    """Called with (number of the prompt, token) as soon as a token is there."""


@dataclass(slots=True)
class Completion:
    """What came of a prompt: the tokens without the one that ended it, and why it ended."""

    ids: list[int] = field(default_factory=list)
    stopped: str = FINISH_LENGTH
    end: tuple[int, ...] = ()
    """The token that ended it, if one did."""
    text: str | None = None
    """Where a text ended it: what was before, to the character. `ids` may hold the beginning of that text too."""


@dataclass(slots=True)
class _ActiveSequence:
    """A prompt and its answer, in a slot."""

    number: int
    prompt: Sequence[int]
    key: int
    limit: int
    answer: Completion
    watcher: ToolState | None
    forced: deque[int] = field(default_factory=deque)
    drawn: int = 0
    done: bool = False

    @property
    def position(self) -> int:
        """Where the newest token stands."""
        return len(self.prompt) + len(self.answer.ids) - 1


class Engine:
    """Answers prompts with a model that attends through slots."""

    def __init__(
        self,
        model: nn.Module,
        ask: GenerationOptions,
        seen: Sequence[LayerAttention],
        pace: BatchingPolicy | None = None,
    ) -> None:
        """`seen`: what the model's layers ask of attention."""
        self._model, self._ask = model, ask
        self._device = next(model.parameters()).device
        self._backend = _prefill_backend(self._device, _compute_dtype(model), seen)
        self._divided = any(is_sharded(module) for module in model.modules())
        watched = bool(ask.tools or ask.heard or ask.sampling.stop)
        self._pace = pace or (CPU_BATCHING if self._device.type == "cpu" else GPU_BATCHING)
        self._count = 1 if watched else self._pace.steps
        self._tail = 1 + max((len(string.encode()) for string in ask.sampling.stop), default=0)

    @torch.inference_mode()
    def run(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], batch: int, done: Callable[[int], None]
    ) -> list[Completion]:
        """The answer to each prompt, of at most so many tokens; `batch`: so many at a time."""
        answers = [Completion() for _ in prompts]
        keys = rng_keys(prompts, self._ask.sampling.seed)
        tools = self._ask.tools
        waiting = deque(
            _ActiveSequence(i, prompts[i], keys[i], limits[i], answers[i], tools.watch() if tools else None)
            for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        )
        longest = max(len(row.prompt) + row.limit for row in waiting)
        places = longest + self._count + -(longest + self._count) % 64
        self._slots = KVCache(min(batch, len(prompts), self._affordable(places)), places)
        self._seen = self._seen_before() if self._ask.sampling.repetition_penalty != 1 else None
        recorded = self._device.type == "cuda" and not self._divided and not _has_experts(self._model)
        self._stepper = DecodeRunner(
            self._model, self._slots, self._ask.sampling, self._seen, self._device, recorded, self._pace.few_sizes
        )
        rows: list[_ActiveSequence | None] = []
        with use_kv_cache(self._model):
            while waiting or any(rows):
                PHASE.enter("answering prompts")
                finished = 0
                while self._wants_more(rows, waiting):
                    finished += self._read(self._seat(rows, waiting))
                self._close_ranks(rows, waiting)
                if any(rows):
                    finished += self._write(rows)
                for place, row in enumerate(rows):
                    if row is not None and row.done:
                        rows[place] = None
                if finished:
                    done(finished)
        return answers

    def _wants_more(self, rows: list[_ActiveSequence | None], waiting: deque[_ActiveSequence]) -> bool:
        free = self._slots.count - sum(row is not None for row in rows)
        return bool(waiting) and free >= min(max(1, self._slots.count // self._pace.free), len(waiting))

    def _seat(
        self, rows: list[_ActiveSequence | None], waiting: deque[_ActiveSequence]
    ) -> list[tuple[int, _ActiveSequence]]:
        """Prompts and their slots: as many as are free and fit into one pass, but at least one."""
        rows.extend([None] * (self._slots.count - len(rows)))
        seated: list[tuple[int, _ActiveSequence]] = []
        tokens = 0
        for place, row in enumerate(rows):
            if row is None and waiting and (not seated or tokens + len(waiting[0].prompt) <= self._pace.together):
                rows[place] = waiting.popleft()
                seated.append((place, rows[place]))  # type: ignore[arg-type]
                tokens += len(seated[-1][1].prompt)
        return seated

    def _read(self, seated: list[tuple[int, _ActiveSequence]]) -> int:
        """Compute prompts and their first tokens; how many answers that finished."""
        edges = [0]
        tokens, positions, at = list[int](), list[int](), list[int]()
        for place, row in seated:
            length = len(row.prompt)
            edges.append(edges[-1] + length)
            tokens += row.prompt
            positions += range(length)
            at += range(place * self._slots.places, place * self._slots.places + length)
        whole = torch.tensor([tokens, positions, at]).to(self._device)
        cu_seqlens = torch.tensor(edges, dtype=torch.int32).to(self._device)
        documents = Documents(cu_seqlens, max(len(row.prompt) for _, row in seated), edges)
        last = cu_seqlens[1:].long() - 1
        output = self._model(
            input_ids=whole[:1], position_ids=whole[1:2], use_cache=False, logits_to_keep=last,
            slots=PrefillAttention(self._slots, whole[2], documents, self._backend),
        )  # fmt: skip
        logits = output.logits[0]
        if len(logits) != len(seated):  # a model that keeps all
            logits = logits[last]
        seen = None
        if self._seen is not None:
            for place, row in seated:
                self._seen[place] = False
                self._seen[place, torch.tensor(row.prompt).to(self._device)] = True
            seen = self._seen[[place for place, _ in seated]]
        drawn = torch.tensor([[row.key, row.drawn] for _, row in seated]).to(self._device)
        chosen = sample_next_tokens(logits, drawn[:, 0], drawn[:, 1], self._ask.sampling, seen).tolist()
        return sum(self._take(row, token) for (_, row), token in zip(seated, chosen, strict=True))

    def _write(self, rows: list[_ActiveSequence | None]) -> int:
        """Some further tokens of every answer; how many that finished."""
        state = torch.tensor([_decode_state(row) for row in rows]).T
        longest = max(row.position for row in rows if row is not None)
        finished = 0
        tokens = self._stepper.steps(state, longest + 1, self._count).T.tolist()
        for row, chosen in zip(rows, tokens, strict=True):
            if row is not None and not row.done:
                finished += any(self._take(row, token) for token in chosen)
        return finished

    def _take(self, row: _ActiveSequence, token: int) -> bool:
        """Add a token that was drawn to an answer, or the one that a tool put in its place; whether that ends it."""
        ask = self._ask
        row.drawn += 1
        was_forced = bool(row.forced)
        token = row.forced.popleft() if was_forced else token
        if row.watcher is not None:
            row.forced.extend(row.watcher.see(token))
        if token in ask.stops and not row.forced and not was_forced:
            row.done, row.answer.stopped, row.answer.end = True, FINISH_END, (token,)
            return True
        row.answer.ids.append(token)
        if ask.heard is not None:
            ask.heard(row.number, token)
        if ask.sampling.stop and ask.text is not None:
            # if it was not there before, it is in the last tokens: as many as it has bytes, and one that it begins in
            tail = row.answer.ids[-self._tail :]
            kept = None
            if any(string in ask.text(tail) for string in ask.sampling.stop):
                kept = truncate_at_stop_string(row.answer.ids, ask.sampling.stop, ask.text)
            if kept is not None:
                (row.answer.ids, row.answer.text), row.answer.stopped = kept, FINISH_STRING
                row.done = True
        row.done = row.done or len(row.answer.ids) >= row.limit
        return row.done

    def _close_ranks(self, rows: list[_ActiveSequence | None], waiting: deque[_ActiveSequence]) -> None:
        """Where nothing waits, move the last answers into the slots that are free, so that fewer are computed."""
        for place, row in enumerate(rows):
            if row is not None and row.done:
                rows[place] = None
        while not waiting and rows:
            if rows[-1] is None:
                rows.pop()
            elif None in rows:
                free, last = rows.index(None), rows.pop()
                assert last is not None
                self._slots.move(len(rows), free, last.position)
                if self._seen is not None:
                    self._seen[free].copy_(self._seen[len(rows)])
                rows[free] = last
            else:
                break

    def _seen_before(self) -> Tensor:
        vocabulary = self._model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
        return torch.zeros((self._slots.count, vocabulary), dtype=torch.bool, device=self._device)

    def _affordable(self, places: int) -> int:
        """How many slots fit into half of what the device has left, or a quarter of the host's memory. Processes that
        share a model must agree, so they do not ask."""
        if self._divided:
            return 1 << 30
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            room = free // 2
        else:
            room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
        return max(1, room // (places * _kv_bytes_per_token(self._model)))


def truncate_at_stop_string(
    ids: list[int], strings: Sequence[str], text: Callable[[Sequence[int]], str]
) -> tuple[list[int], str] | None:
    """All text before the first of `strings`, and the tokens that hold it; None where none of them is in the text."""
    whole = text(ids)
    begins = [whole.find(string) for string in strings if string in whole]
    if not begins:
        return None
    wanted = whole[: min(begins)]
    kept = next(n for n in range(len(ids) + 1) if text(ids[:n]).startswith(wanted))
    return ids[:kept], wanted


def _decode_state(row: _ActiveSequence | None) -> list[int]:
    if row is None:
        return [0] * 5
    return [row.answer.ids[-1], row.position, row.drawn, row.key, 1]


def _has_experts(model: nn.Module) -> bool:
    """How many rows an expert gets is asked of the device in every layer, which cannot be recorded."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    return any(getattr(config, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _compute_dtype(model: nn.Module) -> torch.dtype:
    device = next(model.parameters()).device
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def _prefill_backend(device: torch.device, dtype: torch.dtype, seen: Sequence[LayerAttention]) -> str:
    try:
        return choose_attention("varlen", device, dtype, seen)
    except WhetError:
        return "sdpa"


def _kv_bytes_per_token(model: nn.Module) -> int:
    """Of its keys and values in all layers."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * 2 * heads * width * _compute_dtype(model).itemsize)
