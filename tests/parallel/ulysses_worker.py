"""Run under torchrun by test_ulysses.py: each process compares its slice with attention in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from whet.core.distributed import init_distributed
from whet.model.attention import AttentionSpec, document_kwargs, eager_attention_forward, sdpa_attention_forward
from whet.parallel.ulysses import ulysses_attention

HEADS = ((4, 2), (9, 3), (3, 1), (8, 8), (6, 2), (5, 5), (14, 2), (1, 1))
"""(query heads, key heads): split, split after repeating keys, or padded with zero heads."""
EDGES = (0, 1, 9, 10, 21, 24, 24)
WIDTH, VALUE = 6, 4


def main() -> None:
    ranks = init_distributed()
    group = dist.new_group(list(range(ranks.world_size)))
    wide = EDGES[-1] // ranks.world_size
    here = slice(ranks.rank * wide, (ranks.rank + 1) * wide)
    documents = document_kwargs(torch.tensor(EDGES, dtype=torch.int32), 24, EDGES)["documents"]
    for number, (heads, keys) in enumerate(HEADS):
        for backend, asked in (
            (eager_attention_forward, {"sinks": True}),
            (eager_attention_forward, {"window": 4}),
            (sdpa_attention_forward, {}),
        ):
            torch.manual_seed(number)
            shapes = ((heads, WIDTH), (keys, WIDTH), (keys, VALUE))
            whole = [torch.randn(1, n, EDGES[-1], size, dtype=torch.float64).requires_grad_() for n, size in shapes]
            parts = [states.detach()[:, :, here].clone().requires_grad_() for states in whole]
            sinks = [torch.randn(heads, dtype=torch.float64).requires_grad_() for _ in range(1)]
            sinks.append(sinks[0].detach().clone().requires_grad_())
            weigh = torch.randn(1, EDGES[-1], heads, VALUE, dtype=torch.float64)
            spec = [AttentionSpec(0.5, asked.get("window"), None, sink if "sinks" in asked else None) for sink in sinks]
            wanted = backend(*whole, spec[0], documents)
            found = ulysses_attention(group)(backend)(*parts, spec[1], documents)
            (wanted * weigh).sum().backward()
            (found * weigh[:, here]).sum().backward()
            close(found, wanted[:, here])
            for part, states in zip(parts, whole, strict=True):
                close(part.grad, states.grad[:, :, here])
            if "sinks" in asked:  # each process has the gradients of its heads
                dist.all_reduce(sinks[1].grad)
                close(sinks[1].grad, sinks[0].grad)
    ranks.shutdown()


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


if __name__ == "__main__":
    main()
