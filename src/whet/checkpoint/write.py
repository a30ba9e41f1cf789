"""torch's writer of checkpoints, with several files at a time.

torch's own threads lose what goes wrong in them (seen in 2.13: a full disk gave a checkpoint without some tensors and
no error), so each file is written by a call of its own, whose error counts.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

_FILES = 4  # on each rank, so that they can be written, hashed and read beside each other


class Writer(FileSystemWriter):
    """Writes into a folder that exists and is empty."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, thread_count=1, sync_files=True, per_thread_copy_ahead=0)  # all is on the host

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        def write(number: int, items: list[WriteItem]) -> list[WriteResult]:
            prefix = dataclasses.replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            part: Any = dataclasses.replace(plan, items=items, storage_data=prefix)
            return super(Writer, self).write_data(part, planner).wait()

        shares = _shares(plan.items)
        with ThreadPoolExecutor(_FILES) as pool:
            results = list(pool.map(write, range(len(shares)), shares))
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for each in results for result in each])
        return done


def _shares(items: list[WriteItem]) -> list[list[WriteItem]]:
    """Of about the same size, the largest tensor first to the smallest share."""
    shares: list[list[WriteItem]] = [[] for _ in range(_FILES)]
    sizes = [0] * _FILES
    for item in sorted(items, key=_size, reverse=True):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(item)
        sizes[smallest] += max(1, _size(item))
    return [share for share in shares if share]


def _size(item: WriteItem) -> int:
    about = item.tensor_data
    return 0 if about is None else about.chunk.sizes.numel() * about.properties.dtype.itemsize
