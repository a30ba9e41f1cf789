"""Making the next things while the present one is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Prefetch(Generic[K, T]):
    """`make(key)`, begun ahead of time in a background thread for the keys that `following` foretells.

    At most `depth` results wait at a time. Any key may be asked for at any time; another than was foretold only waits.
    """

    def __init__(self, make: Callable[[K], T], following: Callable[[K], K | None], depth: int) -> None:
        self._make, self._following, self._depth = make, following, depth
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="whet-prefetch")  # starts with the first task
        self._ahead: deque[tuple[K, Future[T]]] = deque()

    def get(self, key: K) -> T:
        """What `make` makes of the key, or the error that it met."""
        if not self._ahead or self._ahead[0][0] != key:
            self._forget()
            self._ahead.append((key, self._thread.submit(self._make, key)))
        _, wanted = self._ahead.popleft()
        last: K | None = self._ahead[-1][0] if self._ahead else key
        while len(self._ahead) < self._depth and last is not None and (last := self._following(last)) is not None:
            self._ahead.append((last, self._thread.submit(self._make, last)))
        return wanted.result()

    def close(self) -> None:
        """End the thread; nothing can be asked for any more."""
        self._forget()
        self._thread.shutdown()

    def _forget(self) -> None:
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()
