"""One sequence at a time, for models that the KV cache does not support: recurrent ones, custom caches."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from torch import nn

from whet.inference.generate import generate
from whet.inference.online_engine import NO_ADAPTERS, Adapters, OnlineSequence


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
