"""What one process of a large run needs, on paper: whet's own sharding run on tensors without memory.

    python bench/scale.py        no GPU, no network; a few minutes

torch's fake process group stands for the others: everything is called as in a real run, nothing is sent. Printed are,
for each case, the memory of one process (weights, gradients and AdamW's states as they are divided, what the backward
pass keeps, the most that is alive at a time beside them) and the bytes that it receives in one step of one micro-batch,
by kind of collective. Weights in fp32, arithmetic and travelling weights in bf16, gradients summed in fp32, every layer
computed again in the backward pass. The last line is a JSON object.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from whet.core.distributed import Ranks
from whet.data.batch import PackedBatch
from whet.execution.transform import transform_layers
from whet.model import attention
from whet.model.loss.loss_model import LossModel
from whet.parallel.config import ParallelConfig
from whet.parallel.dtensor import local_tensor
from whet.parallel.fsdp import apply_fsdp
from whet.parallel.mesh import build_mesh
from whet.parallel.ulysses import apply_ulysses

GIB = 2**30
LEARNED = 0.6


@dataclass(frozen=True)
class Case:
    name: str
    layers: int
    width: int
    middle: int
    heads: int
    key_heads: int
    world: int
    shard: int
    context: int
    tokens: int
    """Of one micro-batch, on all that compute it together."""


CASES = (
    Case("8B on 8", 32, 4096, 14336, 32, 8, 8, 8, 1, 8192),
    Case("8B on 8, rows of 128 k", 32, 4096, 14336, 32, 8, 8, 1, 8, 131072),
    Case("70B on 64", 80, 8192, 28672, 64, 8, 64, 64, 1, 8192),
    Case("30B on 1536, shard 16", 60, 6656, 17920, 52, 52, 1536, 16, 1, 4096),
    Case("30B on 1536, shard 1536", 60, 6656, 17920, 52, 52, 1536, 1536, 1, 4096),
)


class Received(TorchDispatchMode):
    """Bytes that come over the wire, by collective, as rings and pairs bring them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, float] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(op)
        if name.startswith("c10d."):
            kind = name.split(".")[1].strip("_")
            group = next(each for each in args if isinstance(each, torch.ScriptObject))
            members = dist.ProcessGroup.unbox(group).size()
            largest = max(
                tensor.nbytes for tensor in torch.utils._pytree.tree_leaves(args) if hasattr(tensor, "nbytes")
            )
            passes = 2 if kind == "allreduce" else 1
            self.bytes[kind] = self.bytes.get(kind, 0) + passes * largest * (members - 1) / members
        return op(*args, **(kwargs or {}))


def main() -> None:
    found = {}
    for case in CASES:
        found[case.name] = measured(case)
        sys.stdout.write(f"{case.name}: {json.dumps(found[case.name])}\n")
        sys.stdout.flush()
    sys.stdout.write(json.dumps(found) + "\n")


def measured(case: Case) -> dict[str, Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world)
    config = ParallelConfig(shard=case.shard, context=case.context, recompute="full")
    mesh = build_mesh(config, Ranks(0, case.world, torch.device("cpu")))
    shape = LlamaConfig(
        hidden_size=case.width, intermediate_size=case.middle, num_hidden_layers=case.layers,
        num_attention_heads=case.heads, num_key_value_heads=case.key_heads, vocab_size=128256,
        tie_word_embeddings=False, max_position_embeddings=131072,
    )  # fmt: skip
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = LlamaForCausalLM(shape)
            attention.install_backend(model, "sdpa")
            root = LossModel(model)
            apply_ulysses(root, mesh)
            transform_layers(model, config, compile=False)
            apply_fsdp(root, mesh, torch.bfloat16)
            return one_step(case, root)
    finally:
        dist.destroy_process_group()


def one_step(case: Case, root: LossModel) -> dict[str, Any]:
    weights = sum(local_tensor(weight).nbytes for weight in root.parameters())
    numbers = sum(weight.numel() for weight in root.parameters())
    tracker, wire = FSDPMemTracker(root), Received()
    with tracker, wire, torch.autocast("cpu", torch.bfloat16):
        root(batch_of(case), 1.0).objective.backward()
    [peaks] = tracker.get_tracker_snapshot("peak").values()
    divided = ("Total", "Sharded Param", "Sharded Grad", "OptState")
    return {
        "parameters": numbers,
        "weights_gib": round(weights / GIB, 3),
        "gradients_gib": round(weights / GIB, 3),
        "states_gib": round(2 * weights / GIB, 3),
        "beside_them_gib": round(
            sum(size for kind, size in peaks.items() if getattr(kind, "value", kind) not in divided) / GIB, 3
        ),
        "received_gib": {kind: round(size / GIB, 3) for kind, size in sorted(wire.bytes.items())},
    }


def batch_of(case: Case) -> PackedBatch:
    """A row of one document, of which this process has a slice."""
    tokens = case.tokens // case.context
    edges, learned = (0, case.tokens), int(LEARNED * tokens)
    return PackedBatch(
        tokens=torch.zeros(tokens, dtype=torch.int64), labels=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.arange(tokens), cu_seqlens=torch.tensor(edges, dtype=torch.int32), max_seqlen=case.tokens,
        supervised_at=torch.arange(learned), place_at=torch.zeros(learned, dtype=torch.int64), cu_seqlens_host=edges,
        documents=np.zeros(1, dtype=np.int64),
    )  # fmt: skip


if __name__ == "__main__":
    main()
