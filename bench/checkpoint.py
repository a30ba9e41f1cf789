"""How long training waits for a checkpoint, how long writing takes beside it, and how fast one is loaded.

    python bench/checkpoint.py --gib 2 --dir /a/disk

A model of so many GiB in fp32 with AdamW, so that a checkpoint is three times as large, on the accelerator if there is
one. Beside it what the machine can do at best: a copy of as many bytes to the host in the same pieces, and a plain file
written, synced and read again. The first save also makes room on the host; the others are what a run sees.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from whet.checkpoint.load import load_checkpoint, model_tensors, optimizer_tensors
from whet.checkpoint.save import CheckpointSaver
from whet.core.distributed import Ranks, get_local_device

_PIECE = 2**24  # numbers in a weight, 64 MiB
_SAVES = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.25, help="size of the weights")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where checkpoints go")
    options = parser.parse_args()
    ranks = Ranks(0, 1, get_local_device())
    count = max(1, round(options.gib * 2**30 / 4 / _PIECE))
    model = nn.ParameterList([torch.randn(_PIECE // 4096, 4096, device=ranks.device) for _ in range(count)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tensors = [*model_tensors(model).values(), *optimizer_tensors(model, optimizer).values()]
    size = sum(tensor.nbytes for tensor in tensors)
    folder = Path(tempfile.mkdtemp(prefix="whet-bench-", dir=options.dir))
    try:
        host = size / _best(lambda: _copy(tensors, room), 3) if (room := _room(tensors)) else 0.0
        room.clear()
        blocked, written = [], []
        with CheckpointSaver(folder, model, optimizer, ranks) as saver:
            for number in range(1, _SAVES + 2):
                saver.save(number, {})
                saver.wait()
                blocked.append(saver.blocked_s)
                written.append(saver.write_s)
        path = folder / f"step-{_SAVES + 1:06d}"
        warm = _timed(lambda: load_checkpoint(path, model, optimizer, ranks))
        _forget(path)
        cold = _timed(lambda: load_checkpoint(path, model, optimizer, ranks))
        plain_write, plain_read = _plain(folder / "plain", size)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    usual = statistics.median(blocked[1:])
    result = {
        "device": str(ranks.device),
        "checkpoint_gib": size / 2**30,
        "host_gib_per_s": host / 2**30,
        "first_blocked_s": blocked[0],
        "blocked_s": usual,
        "blocked_over_copy": usual / (size / host),
        "background_s": statistics.median(written[1:]),
        "load_cold_s": cold,
        "load_warm_s": warm,
        "plain_write_s": plain_write,
        "plain_read_cold_s": plain_read,
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


def _room(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda) for tensor in tensors]


def _copy(tensors: list[Tensor], room: list[Tensor]) -> None:
    for tensor, place in zip(tensors, room, strict=True):
        place.copy_(tensor, non_blocking=True)
    if tensors[0].device.type != "cpu":
        torch.accelerator.synchronize()


def _plain(file: Path, size: int) -> tuple[float, float]:
    """Seconds to write and sync so many bytes, and to read them when the system has forgotten them."""
    piece = os.urandom(2**26)

    def write() -> None:
        with file.open("wb", buffering=0) as handle:
            for _ in range(-(-size // len(piece))):
                handle.write(piece)
            os.fsync(handle.fileno())

    def read() -> None:
        with file.open("rb", buffering=0) as handle:
            while handle.read(2**26):
                pass

    written = _timed(write)
    _forget(file.parent)
    return written, _timed(read)


def _forget(folder: Path) -> None:
    """Ask the system to drop these files from its memory, so that they come from the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _best(work: Callable[[], object], times: int) -> float:
    return min(_timed(work) for _ in range(times))


if __name__ == "__main__":
    main()
