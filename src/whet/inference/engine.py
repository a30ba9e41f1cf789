"""Continuous batching: a waiting prompt takes the KV-cache slot of a sequence that has finished.

Prompts are prefilled without padding, packed into one row; all sequences in progress are decoded together, one token
per step. A completion does not depend on the other sequences of the batch, up to floating-point rounding of a matmul.

`Engine` completes a list of prompts; `whet.inference.online_engine` completes what arrives, each in its own way.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from whet.core.errors import WhetError
from whet.core.heartbeat import PHASE
from whet.inference.calculator_tool import Tool, ToolState
from whet.inference.kv_cache import DecodeRunner, KVCache, PrefillAttention, use_kv_cache
from whet.inference.sampling import Sampling, rng_keys, sample_next_tokens
from whet.model.attention import choose_backend as choose_attention
from whet.model.attention.dispatch import LayerAttention
from whet.model.attention.interface import Documents
from whet.parallel.fsdp import is_sharded

FINISH_END, FINISH_LENGTH, FINISH_STRING = "end", "length", "string"


@dataclass(frozen=True, slots=True)
class BatchingPolicy:
    """How the engine schedules prefill and decode on a kind of device."""

    decode_steps: int
    """Decode steps between reads of the sampled tokens. A read synchronises with the device; a finished sequence keeps
    its slot until the next read."""
    max_prefill_tokens: int
    """Prompt tokens in one prefill pass; a longer prompt gets a pass of its own."""
    free_slot_divisor: int
    """Prefill waits until 1 / `free_slot_divisor` of the slots are free: on a GPU a pass over one prompt takes as long
    as over several."""
    pad_to_sizes: bool
    """Round the decode batch up to a few sizes, for each of which one CUDA graph is captured."""


CPU_BATCHING = BatchingPolicy(decode_steps=1, max_prefill_tokens=2048, free_slot_divisor=1 << 30, pad_to_sizes=False)
GPU_BATCHING = BatchingPolicy(decode_steps=8, max_prefill_tokens=32768, free_slot_divisor=8, pad_to_sizes=True)


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How to complete a prompt."""

    sampling: Sampling
    stop_ids: frozenset[int]
    decode: Callable[[Sequence[int]], str] | None = None
    """Decodes tokens; needed for `sampling.stop`."""
    tool: Tool | None = None
    on_token: Callable[[int, int], None] | None = None
    """Called with (index of the prompt, token) for every generated token."""

    @property
    def stop_window(self) -> int:
        """Tokens at the end of a completion in which a new stop string lies: at most one per byte, and the one that it
        begins in."""
        return 1 + max((len(string.encode()) for string in self.sampling.stop), default=0)


@dataclass(slots=True)
class Completion:
    """The generated tokens, without the stop token, and why generation finished."""

    ids: list[int] = field(default_factory=list)
    finish_reason: str = FINISH_LENGTH
    stop_token: tuple[int, ...] = ()
    """The stop token that ended it, if one did."""
    text: str | None = None
    """With finish reason `string`: the text before the stop string. `ids` may include the start of that string."""


@dataclass(slots=True, eq=False)
class GenerationSequence:
    """A prompt and its completion in progress."""

    index: int
    prompt: Sequence[int]
    rng_key: int
    limit: int
    options: GenerationOptions
    completion: Completion = field(default_factory=Completion)
    tool_state: ToolState | None = None
    forced: deque[int] = field(default_factory=deque)
    """Tokens that a tool inserts next, in place of sampled ones."""
    num_sampled: int = 0
    done: bool = False
    """Finished, or cancelled: the engine drops it before its next step."""

    @property
    def tokens(self) -> list[int]:
        """What to prefill: the prompt, and what was generated before the sequence lost its slot."""
        return [*self.prompt, *self.completion.ids]

    @property
    def position(self) -> int:
        """The position of the newest token."""
        return len(self.prompt) + len(self.completion.ids) - 1

    def decode_state(self) -> list[int]:
        """One column of DecodeRunner's state."""
        return [self.completion.ids[-1], self.position, self.num_sampled, self.rng_key, 1]


class Engine:
    """Generates completions with a model that attends through a KV cache."""

    def __init__(
        self,
        model: nn.Module,
        options: GenerationOptions,
        layers: Sequence[LayerAttention],
        policy: BatchingPolicy | None = None,
    ) -> None:
        """`layers`: what the model's layers require of attention, as `probe_kv_cache` returns it."""
        self._model, self._options = model, options
        self._device = next(model.parameters()).device
        self._prefill_backend = choose_prefill_backend(model, layers)
        self._sharded = any(is_sharded(module) for module in model.modules())
        self._policy = policy or (CPU_BATCHING if self._device.type == "cpu" else GPU_BATCHING)
        # tools, streaming and stop strings must see every token before the next step
        every_token = bool(options.tool or options.on_token or options.sampling.stop)
        self._decode_steps = 1 if every_token else self._policy.decode_steps

    @torch.inference_mode()
    def run(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        batch_size: int,
        on_finished: Callable[[int], None],
    ) -> list[Completion]:
        """A completion of at most `limits[i]` tokens for each prompt, with at most `batch_size` in progress."""
        completions = [Completion() for _ in prompts]
        keys = rng_keys(prompts, self._options.sampling.seed)
        tool = self._options.tool
        waiting = deque(
            GenerationSequence(
                i, prompts[i], keys[i], limits[i], self._options, completions[i], tool.new_state() if tool else None
            )
            for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        )
        max_length = max(len(row.prompt) + row.limit for row in waiting) + self._decode_steps
        slot_length = max_length + -max_length % 64
        self._cache = KVCache(min(batch_size, len(prompts), self._max_slots(slot_length)), slot_length)
        self._seen_tokens = self._allocate_seen_tokens() if self._options.sampling.repetition_penalty != 1 else None
        use_cuda_graphs = self._device.type == "cuda" and not self._sharded and not has_experts(self._model)
        self._runner = DecodeRunner(
            self._model, self._cache, self._options.sampling, self._seen_tokens, self._device, use_cuda_graphs,
            self._policy.pad_to_sizes,
        )  # fmt: skip
        rows: list[GenerationSequence | None] = []  # the sequence in each slot
        with use_kv_cache(self._model):
            while waiting or any(rows):
                PHASE.enter("generating")
                finished = 0
                while self._should_prefill(rows, waiting):
                    finished += self._prefill(self._admit(rows, waiting))
                self._compact(rows, waiting)
                if any(rows):
                    finished += self._decode(rows)
                for slot, row in enumerate(rows):
                    if row is not None and row.done:
                        rows[slot] = None
                if finished:
                    on_finished(finished)
        return completions

    def _should_prefill(self, rows: list[GenerationSequence | None], waiting: deque[GenerationSequence]) -> bool:
        free = self._cache.num_slots - sum(row is not None for row in rows)
        return bool(waiting) and free >= min(
            max(1, self._cache.num_slots // self._policy.free_slot_divisor), len(waiting)
        )

    def _admit(
        self, rows: list[GenerationSequence | None], waiting: deque[GenerationSequence]
    ) -> list[tuple[int, GenerationSequence]]:
        """Assign free slots to waiting prompts: as many as fit into one prefill pass, at least one."""
        rows.extend([None] * (self._cache.num_slots - len(rows)))
        admitted: list[tuple[int, GenerationSequence]] = []
        tokens = 0
        for slot, row in enumerate(rows):
            fits = not admitted or (waiting and tokens + len(waiting[0].tokens) <= self._policy.max_prefill_tokens)
            if row is None and waiting and fits:
                rows[slot] = sequence = waiting.popleft()
                admitted.append((slot, sequence))
                tokens += len(sequence.tokens)
        return admitted

    def _prefill(self, admitted: list[tuple[int, GenerationSequence]]) -> int:
        """Run the prompts and sample their first tokens; return how many sequences finished."""
        logits = prefill_logits(self._model, self._cache, admitted, self._prefill_backend)
        seen_tokens = None
        if self._seen_tokens is not None:
            for slot, row in admitted:
                self._seen_tokens[slot] = False
                self._seen_tokens[slot, torch.tensor(row.prompt).to(self._device)] = True
            seen_tokens = self._seen_tokens[[slot for slot, _ in admitted]]
        keys, counts = torch.tensor([[row.rng_key, row.num_sampled] for _, row in admitted]).to(self._device).T
        sampled = sample_next_tokens(logits, keys, counts, self._options.sampling, seen_tokens).tolist()
        return sum(append_token(row, token) for (_, row), token in zip(admitted, sampled, strict=True))

    def _decode(self, rows: list[GenerationSequence | None]) -> int:
        """Run some decode steps for all sequences; return how many finished."""
        state = torch.tensor([[0] * 5 if row is None else row.decode_state() for row in rows]).T
        max_length = 1 + max(row.position for row in rows if row is not None)
        finished = 0
        tokens = self._runner.run(state, max_length, self._decode_steps).T.tolist()
        for row, sampled in zip(rows, tokens, strict=True):
            if row is not None and not row.done:
                finished += append_tokens(row, sampled)
        return finished

    def _compact(self, rows: list[GenerationSequence | None], waiting: deque[GenerationSequence]) -> None:
        """Once no prompt waits, move the last sequences into free slots, so that decode steps get smaller."""
        for slot, row in enumerate(rows):
            if row is not None and row.done:
                rows[slot] = None
        if not waiting:
            for source, target in compact_rows(rows, self._cache):
                if self._seen_tokens is not None:
                    self._seen_tokens[target].copy_(self._seen_tokens[source])

    def _allocate_seen_tokens(self) -> Tensor:
        vocabulary = self._model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
        return torch.zeros((self._cache.num_slots, vocabulary), dtype=torch.bool, device=self._device)

    def _max_slots(self, slot_length: int) -> int:
        """Slots that fit into the memory for the KV cache. Unlimited for a sharded model: its ranks must agree on the
        number, and their free memory differs."""
        return 1 << 30 if self._sharded else max(1, max_cached_tokens(self._model) // slot_length)


def prefill_logits(
    model: nn.Module, cache: KVCache, admitted: Sequence[tuple[int, GenerationSequence]], backend: str
) -> Tensor:
    """[N, V]: the logits after the tokens of each sequence; they run packed into one row, and the cache keeps them."""
    edges = [0]
    tokens, positions, indices = list[int](), list[int](), list[int]()
    for slot, row in admitted:
        length = len(row.tokens)
        edges.append(edges[-1] + length)
        tokens += row.tokens
        positions += range(length)
        indices += range(slot * cache.slot_length, slot * cache.slot_length + length)
    device = next(model.parameters()).device
    inputs = torch.tensor([tokens, positions, indices]).to(device)
    cu_seqlens = torch.tensor(edges, dtype=torch.int32).to(device)
    documents = Documents(cu_seqlens, max(len(row.tokens) for _, row in admitted), edges)
    last = cu_seqlens[1:].long() - 1
    output = model(
        input_ids=inputs[:1], position_ids=inputs[1:2], use_cache=False, logits_to_keep=last,
        kv_attention=PrefillAttention(cache, inputs[2], documents, backend),
    )  # fmt: skip
    logits: Tensor = output.logits[0]
    return logits if len(logits) == len(admitted) else logits[last]  # a model that ignores logits_to_keep


def append_tokens(row: GenerationSequence, sampled: list[int]) -> bool:
    """`append_token` for several, up to the one that ends the sequence; return whether it is done."""
    options, ids = row.options, row.completion.ids
    if row.tool_state is not None or options.on_token is not None or options.sampling.stop:
        return any(append_token(row, token) for token in sampled)
    end = next((i for i, token in enumerate(sampled) if token in options.stop_ids), len(sampled))
    kept = min(end, row.limit - len(ids))
    ids += sampled[:kept]
    row.num_sampled += kept
    if end < len(sampled) and len(ids) < row.limit:
        row.num_sampled += 1
        row.completion.finish_reason, row.completion.stop_token = FINISH_END, (sampled[end],)
        row.done = True
    row.done = row.done or len(ids) >= row.limit
    return row.done


def append_token(row: GenerationSequence, token: int) -> bool:
    """Append a sampled token, or the one that a tool forces in its place; return whether the sequence is done."""
    options, completion = row.options, row.completion
    row.num_sampled += 1
    was_forced = bool(row.forced)
    token = row.forced.popleft() if was_forced else token
    if row.tool_state is not None:
        row.forced.extend(row.tool_state.observe(token))
    if token in options.stop_ids and not row.forced and not was_forced:
        row.done, completion.finish_reason, completion.stop_token = True, FINISH_END, (token,)
        return True
    completion.ids.append(token)
    if options.on_token is not None:
        options.on_token(row.index, token)
    if options.sampling.stop and options.decode is not None:
        tail = options.decode(completion.ids[-options.stop_window :])
        kept = None
        if any(string in tail for string in options.sampling.stop):
            kept = truncate_at_stop_string(completion.ids, options.sampling.stop, options.decode)
        if kept is not None:
            (completion.ids, completion.text), completion.finish_reason = kept, FINISH_STRING
            row.done = True
    row.done = row.done or len(completion.ids) >= row.limit
    return row.done


def compact_rows(rows: list[GenerationSequence | None], cache: KVCache) -> Iterator[tuple[int, int]]:
    """Move the last sequences into free slots; yields (slot, new slot) of each."""
    while rows:
        if rows[-1] is None:
            rows.pop()
        elif None in rows:
            free, last = rows.index(None), rows.pop()
            assert last is not None
            cache.copy_slot(len(rows), free, last.position)
            rows[free] = last
            yield len(rows), free
        else:
            break


def truncate_at_stop_string(
    ids: list[int], strings: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> tuple[list[int], str] | None:
    """(tokens, text) before the first of `strings`; None if the text contains none of them."""
    text = decode(ids)
    starts = [text.find(string) for string in strings if string in text]
    if not starts:
        return None
    kept_text = text[: min(starts)]
    kept = next(n for n in range(len(ids) + 1) if decode(ids[:n]).startswith(kept_text))
    return ids[:kept], kept_text


def has_experts(model: nn.Module) -> bool:
    """Mixture-of-experts layers read each expert's row count from the device, which a CUDA graph cannot capture."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    return any(getattr(config, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _compute_dtype(model: nn.Module) -> torch.dtype:
    device = next(model.parameters()).device
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def choose_prefill_backend(model: nn.Module, layers: Sequence[LayerAttention]) -> str:
    """varlen where the device has it, else SDPA for each prompt."""
    try:
        return choose_attention("varlen", next(model.parameters()).device, _compute_dtype(model), layers)
    except WhetError:
        return "sdpa"


def max_cached_tokens(model: nn.Module) -> int:
    """Tokens whose keys and values fit into half of the device's free memory, or a quarter of the host's."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        budget = free // 2
    else:
        budget = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    return budget // _kv_bytes_per_token(model)


def _kv_bytes_per_token(model: nn.Module) -> int:
    """Bytes of keys and values of one token in all layers, whose heads may differ in size (Gemma 4)."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    return sum(map(_kv_width, layers)) * 2 * _compute_dtype(model).itemsize


def _kv_width(config: Any) -> int:
    """Elements of the keys, and of the values, of one token in one layer."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads))
