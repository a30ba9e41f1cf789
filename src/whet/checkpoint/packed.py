"""What torch's checkpoint calls raise: it packs what went wrong on each rank into an error of its own, whatever it was,
being asked to stop too."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from whet.checkpoint.metadata import SafeReader
from whet.checkpoint.quiet import quiet
from whet.core.patience import UnreadableError
from whet.core.ranks import lost_peer

_NOT_ITS_OWN = (UnreadableError, KeyboardInterrupt, torch.OutOfMemoryError)


class NotReadError(Exception):
    """A checkpoint's files do not give what was asked of them; as text the kind of what went wrong."""


def read_into(tensors: dict[str, Any], reader: SafeReader, no_dist: bool = True) -> None:
    """Read into tensors that are there. A NotReadError is the checkpoint's fault; a disk that fails, a process that is
    gone and being asked to stop come out as what they are."""
    quiet()
    try:
        dcp_load(tensors, storage_reader=reader, no_dist=no_dist)
    except (Exception, CheckpointException) as error:
        found = unpacked(error)
        other = next((each for each in found if isinstance(each, _NOT_ITS_OWN) or lost_peer(each)), None)
        if other is not None:
            raise other from None
        raise NotReadError(type(next(iter(found), error)).__name__) from error


def unpacked(error: BaseException) -> list[BaseException]:
    return [each for each, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
