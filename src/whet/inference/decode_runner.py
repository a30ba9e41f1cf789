"""The decode step: forward pass and sampling of one token per sequence, captured as a CUDA graph where possible."""

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

# One further token for every row: the forward pass, the choice, and on CUDA both as one recorded graph.
#
# A small model's step is hundreds of kernels of a few microseconds each, and Python takes longer to launch them than the
# GPU to run them: a recorded step is launched at once.

TOKEN, POSITION, DRAW_COUNT, RNG_KEY, ACTIVE = range(5)
"""The state of a row: its newest token and where that stands, how many it drew, what its random numbers come from, and
whether somebody waits for it (1 or 0)."""


class DecodeRunner:
    """Advances the first rows of a state [5, slots] that stays on the device."""

    def __init__(
        self, model: nn.Module, slots: KVCache, sampling: Sampling, seen: Tensor | None, device: torch.device,
        recorded: bool, few_sizes: bool,
    ) -> None:  # fmt: skip
        self._model, self._slots, self._sampling, self._seen = model, slots, sampling, seen
        self.state = torch.zeros((5, slots.count), dtype=torch.int64, device=device)
        self._capture, self._few_sizes = make_capture() if recorded else None, few_sizes
        self._graphs: dict[tuple[int, int], Callable[[], None] | None] = {}

    def steps(self, state: Tensor, longest: int, count: int) -> Tensor:
        """[count, N] the next tokens of N rows, given their state [5, N] on the host. `longest`: how many tokens the
        longest row has."""
        rows = state.shape[1]
        padded, limit = self._shape(rows, longest + count)
        if padded > rows:  # nobody waits for these rows; they stay where they are
            state = torch.cat([state, state.new_zeros((5, padded - rows))], dim=1)
        state = state.contiguous()
        self.state[:, :padded].copy_(state.pin_memory() if self._capture else state, non_blocking=True)
        tokens = torch.empty((count, rows), dtype=torch.int64, device=self.state.device)
        for number in range(count):
            self._step(padded, limit)
            tokens[number].copy_(self.state[TOKEN, :rows])
        return tokens.cpu()

    def _shape(self, rows: int, longest: int) -> tuple[int, int]:
        """How many rows are computed, and how many places they read: where steps are recorded, a few sizes. Recording
        takes as long as some ten steps, and a quarter of the rows not much less than all of them: weights are read
        once for all."""
        if not self._few_sizes:
            return rows, min(longest, self._slots.places)
        padded = 1
        while padded < rows:
            padded *= 4
        limit = max(512, 1 << (longest - 1).bit_length())
        return min(padded, self._slots.count), min(limit, self._slots.places)

    def _step(self, rows: int, limit: int) -> None:
        """The first step of a size runs as it is, which readies every kernel; the second is recorded."""
        shape = rows, limit
        if self._capture is None or shape not in self._graphs:
            self._graphs[shape] = None
            self._compute(rows, limit)
            return
        again = self._graphs[shape]
        if again is None:
            try:
                again = self._capture(lambda: self._compute(rows, limit))
            except RuntimeError as error:
                warn(
                    f"this model's steps cannot be recorded ({root_cause(error)}), so answering is slower than it could be"
                )
                self._capture = None
                self._compute(rows, limit)
                return
            self._graphs[shape] = again
        again()

    def _compute(self, rows: int, limit: int) -> None:
        token, position, drawn, key, live = self.state[:, :rows]
        seen = None
        if self._seen is not None:
            seen = self._seen[:rows]
            seen.scatter_(1, token[:, None], True)
        with _sdpa_backends(token.device):
            output = self._model(
                input_ids=token[:, None], position_ids=position[:, None], use_cache=False,
                slots=DecodeAttention(self._slots, position, limit),
            )  # fmt: skip
        token.copy_(sample_next_tokens(output.logits[:, -1], key, drawn, self._sampling, seen))
        position.add_(live)
        drawn.add_(1)


def _sdpa_backends(device: torch.device) -> AbstractContextManager[None]:
    """On CUDA without cuDNN's attention, which plans anew for every size: a plan takes longer than many steps."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
