"""Making the chunks of a preparation, on all cores."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from whet.core.console import progress
from whet.core.errors import WhetError
from whet.data.chunk import Chunk
from whet.data.config import DataConfig
from whet.data.containers.base import Raw
from whet.data.pool import FailedAtError, Share, Team
from whet.data.render import UnevenTemplateError
from whet.data.settle import Rendering, settle
from whet.data.sources import Reader, expected

if TYPE_CHECKING:
    from whet.data.prepare import Language

_SMALL, _LARGE = 256, 1024  # records of a chunk; large ones where there is much data, to have fewer files
_MUCH = 2**28
_UNEVEN = "uneven"


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be done, the same for every process and machine that takes part."""

    folder: Path
    config: DataConfig
    readers: Sequence[Reader]
    size: int
    language: Language

    @property
    def records(self) -> int:
        """Records of a chunk."""
        return _LARGE if self.size > _MUCH else _SMALL

    @property
    def is_cached(self) -> bool:
        """Whether skeletons may be used; not if the template was found to treat one shape in several ways."""
        return not (self.folder / _UNEVEN).exists()

    def render_in_full(self) -> None:
        """From now on every conversation is rendered by itself; chunks that were made otherwise do not count."""
        (self.folder / _UNEVEN).touch()

    def file(self, number: int, cached: bool | None = None) -> Path:
        """Of a chunk; those that were made with skeletons and those without have names of their own."""
        cached = self.is_cached if cached is None else cached
        return self.folder / f"{number:08d}{'' if cached else '-full'}.npz"

    def missing(self) -> tuple[list[int], int]:
        """Numbers of chunks that are not made yet, and how many there are in all."""
        total = sum(1 for _ in self.chunks())
        return [number for number in range(total) if not self.file(number).exists()], total

    def chunks(self) -> Iterator[tuple[int, int, list[Raw]]]:
        """(number, source, records) of all chunks, in order; nothing is parsed."""
        numbers = itertools.count()
        for source, reader in enumerate(self.readers):
            records = reader.records()
            while batch := list(itertools.islice(records, self.records)):
                yield next(numbers), source, batch


@dataclass(frozen=True, slots=True)
class Kit:
    """What every process works with."""

    rendering: Rendering
    vocabulary: int
    cached: bool


def make(job: Job, first: int, step: int) -> int:
    """Make the chunks first, first + step, …, but for those that are there; returns how many there are in all."""
    total = sum(expected(reader.source) for reader in job.readers)
    cached = job.is_cached  # another machine may change it at any time
    kit = Kit(job.language.rendering(cached), job.language.vocabulary(), cached)
    workers = max(1, min(len(os.sched_getaffinity(0)), -(-total // (step * job.records))))
    share = Share(first, step, workers)
    began, seen = time.monotonic(), 0

    def work(worker: int, share: Share) -> None:
        _work(job, kit, worker, share, (lambda: None) if share.is_shared else tell)

    def tell() -> None:
        nonlocal seen
        done, tokens = sum(share.done), sum(share.tokens)
        if done > seen:
            bar.advance(done - seen, f"{tokens:,} tokens, {tokens / (time.monotonic() - began):,.0f}/s")
            seen = done

    team = Team(work, workers, share) if share.is_shared else None
    with progress("preparing", total // step) as bar:
        if team is not None:
            team.wait(tell)
        else:
            try:
                work(0, share)
            except FailedAtError as failure:
                raise failure.error from None
    return share.last + 1


def _work(job: Job, kit: Kit, worker: int, share: Share, tell: Callable[[], None]) -> None:
    """Walk through all chunks and make those whose turn it is."""
    numbers = share.numbers()
    wanted, highest = next(numbers, None), -1
    for highest, source, records in job.chunks():
        if wanted is None:
            return
        if highest != wanted:
            continue
        path = job.file(wanted, kit.cached)
        if not path.exists():
            chunk = Chunk(source, kit.vocabulary)
            try:
                settle(map(job.readers[source].parse, records), chunk, kit.rendering, job.config)
            except (WhetError, UnevenTemplateError) as error:
                raise FailedAtError(wanted, error) from None
            chunk.save(path)
            share.tokens[worker] += chunk.account.tokens
        share.done[worker] += len(records)
        tell()
        wanted = next(numbers, None)
    share.stop_after(highest)
