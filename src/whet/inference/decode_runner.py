"""The decode step: forward pass and sampling of one token per sequence, captured as a CUDA graph where possible.

A decode step of a small model is hundreds of kernels of a few microseconds each, and Python takes longer to launch them
than the GPU to run them. A CUDA graph replays the whole step with one launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from whet.core.console import warn
from whet.execution.cuda_graphs import make_capture, root_cause
from whet.inference.kv_cache import DecodeAttention, KVCache
from whet.inference.sampling import Sampling, sample_next_tokens

TOKEN, POSITION, NUM_SAMPLED, RNG_KEY, ACTIVE = range(5)
"""The rows of the decode state: each sequence's newest token and its position, how many tokens were sampled, the key of
its random numbers, and 1 for a sequence in progress or 0 for padding."""


class DecodeRunner:
    """Runs decode steps on the first rows of a state [5, num_slots] that stays on the device."""

    def __init__(
        self, model: nn.Module, cache: KVCache, sampling: Sampling | None, seen_tokens: Tensor | None,
        device: torch.device, use_cuda_graphs: bool, pad_to_sizes: bool,
    ) -> None:  # fmt: skip
        """`sampling`: None if sequences differ in it; then only `logits` works. `seen_tokens` [num_slots, vocabulary]:
        the tokens of each sequence, for the repetition penalty."""
        self._model, self._cache, self._sampling, self._seen_tokens = model, cache, sampling, seen_tokens
        self.state = torch.zeros((5, cache.num_slots), dtype=torch.int64, device=device)
        self._capture, self._pad_to_sizes = make_capture() if use_cuda_graphs else None, pad_to_sizes
        self._graphs: dict[tuple[int, int], Callable[[], None] | None] = {}
        self._logits: Tensor | None = None

    def run(self, state: Tensor, max_length: int, steps: int) -> Tensor:
        """[steps, N]: the next tokens of N sequences with state [5, N] on the host; the longest has `max_length`."""
        rows = state.shape[1]
        padded, limit = self._load_state(state, max_length + steps)
        tokens = torch.empty((steps, rows), dtype=torch.int64, device=self.state.device)
        for step in range(steps):
            self._run_step(padded, limit)
            tokens[step].copy_(self.state[TOKEN, :rows])
        return tokens.cpu()

    def logits(self, state: Tensor, max_length: int) -> Tensor:
        """[N, V]: the logits of one step, for sequences that are sampled each in its own way."""
        self._run_step(*self._load_state(state, max_length + 1))
        assert self._logits is not None
        return self._logits[: state.shape[1]]

    def _load_state(self, state: Tensor, max_length: int) -> tuple[int, int]:
        """Copy the state to the device; return (rows, positions) to compute."""
        rows = state.shape[1]
        padded, limit = self._padded_shape(rows, max_length)
        if padded > rows:  # padding rows are inactive: their position stays 0
            state = torch.cat([state, state.new_zeros((5, padded - rows))], dim=1)
        state = state.contiguous()
        self.state[:, :padded].copy_(state.pin_memory() if self._capture else state, non_blocking=True)
        return padded, limit

    def _padded_shape(self, rows: int, max_length: int) -> tuple[int, int]:
        """(rows, positions) to compute, rounded up to a few sizes so that few graphs are captured.

        A capture takes as long as about ten steps, and a quarter of the rows takes nearly as long as all of them,
        because reading the weights dominates.
        """
        if not self._pad_to_sizes:
            return rows, min(max_length, self._cache.slot_length)
        padded = 1
        while padded < rows:
            padded *= 4
        limit = max(512, 1 << (max_length - 1).bit_length())
        return min(padded, self._cache.num_slots), min(limit, self._cache.slot_length)

    def _run_step(self, rows: int, limit: int) -> None:
        """The first step of a shape runs eagerly, which initialises every kernel; the second is captured."""
        shape = rows, limit
        if self._capture is None or shape not in self._graphs:
            self._graphs[shape] = None
            self._decode_step(rows, limit)
            return
        replay = self._graphs[shape]
        if replay is None:
            try:
                replay = self._capture(lambda: self._decode_step(rows, limit))
            except RuntimeError as error:
                warn(f"CUDA graph capture failed ({root_cause(error)}); decoding without graphs, which is slower")
                self._capture = None
                self._decode_step(rows, limit)
                return
            self._graphs[shape] = replay
        replay()

    def _decode_step(self, rows: int, limit: int) -> None:
        token, position, num_sampled, key, active = self.state[:, :rows]
        seen_tokens = None
        if self._seen_tokens is not None:
            seen_tokens = self._seen_tokens[:rows]
            seen_tokens.scatter_(1, token[:, None], True)
        with _sdpa_backends(token.device):
            output = self._model(
                input_ids=token[:, None], position_ids=position[:, None], use_cache=False,
                kv_attention=DecodeAttention(self._cache, position, limit),
            )  # fmt: skip
        if self._sampling is None:
            if self._logits is None:  # in the first step, which is never captured
                self._logits = output.logits.new_empty((self._cache.num_slots, output.logits.shape[-1]))
            self._logits[:rows].copy_(output.logits[:, -1])
            return
        token.copy_(sample_next_tokens(output.logits[:, -1], key, num_sampled, self._sampling, seen_tokens))
        position.add_(active)
        num_sampled.add_(1)


def _sdpa_backends(device: torch.device) -> AbstractContextManager[None]:
    """Excludes cuDNN attention on CUDA: it builds a plan for every new shape, which takes longer than many steps."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
