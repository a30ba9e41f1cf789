"""The loader of a run: which rows this rank computes at a time, in training and without gradients."""

from __future__ import annotations

from whet.config import Config
from whet.core.distributed import Ranks
from whet.data.loader import Loader
from whet.data.plan.planner import Plan
from whet.data.prepare.store import Store
from whet.model.loss.loss_model import LossModel
from whet.parallel.fsdp import has_collectives_in_passes

_FORWARD_ROWS, _FORWARD_TOKENS = 4, 32768
"""Without gradients, a micro-batch on a GPU has so many times the rows, or so many tokens if that is more: a training
step holds the activations of all layers, or with recomputation those of one layer and the inputs of all."""


def make_loader(
    config: Config, store: Store, plan: Plan, ranks: Ranks, root: LossModel, with_gradients: bool = True
) -> Loader:
    """This rank's loader of a plan. Micro-batches are padded where kernels are compiled for their sizes. Without
    gradients, nothing is kept for a backward pass, so those of a GPU are larger, where running out of memory can be
    survived.
    """
    on_gpu = ranks.device.type == "cuda"
    micro_rows = config.train.least_micro_rows
    if root.unpacked and not root.pads:
        micro_rows = 1
    elif root.unpacked and config.train.micro_rows == "auto" and len(plan.documents):  # as many as fill a packed row
        micro_rows = max(1, int(config.row_length // store.lengths[plan.documents].mean()))
    elif on_gpu and not with_gradients and not has_collectives_in_passes(root, ranks):
        micro_rows = max(micro_rows * _FORWARD_ROWS, _FORWARD_TOKENS // config.row_length)
    return Loader(
        store, plan, micro_rows, ranks.data_rank, ranks.data_size, on_gpu or config.model.compile is True, ranks.device,
        (ranks.context_rank, ranks.context_size),
    )  # fmt: skip
