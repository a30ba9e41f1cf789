"""Time of the fused SwiGLU kernels with LoRA, by tile, compared with memory traffic alone and one low-rank product.

python bench/swiglu.py [tokens] [width] [rank]     (needs a GPU)
"""

from __future__ import annotations

import sys

import torch
from triton.testing import do_bench

from whet.model.lora import lora_kernels
from whet.model.lora.swiglu import SwigluInputs

TILES = [lora_kernels._SwigluTiles(64, 64, segments, stages) for segments in (4, 7, 14) for stages in (2, 3, 4)]


def main(tokens: int = 16384, width: int = 14336, rank: int = 16) -> None:
    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    xa = drawn(tokens, 2 * rank)
    inputs = SwigluInputs(
        drawn(tokens, width),
        drawn(tokens, width),
        xa[:, :rank],
        xa[:, rank:],
        drawn(width, rank),
        drawn(width, rank),
    )
    d_h, d_xa, a_down = drawn(tokens, width), drawn(tokens, rank), drawn(rank, width)
    copying = do_bench(lambda: d_h.copy_(inputs.gate0)) / 2  # one [T, F] matrix, read or written
    sys.stdout.write(f"a low-rank product: {do_bench(lambda: d_h @ a_down.T):.3f} ms; one forward, four backward\n")
    matrices = 5 if rank <= lora_kernels._MAX_RANK_OVER_ROWS else 6  # with h itself
    sys.stdout.write(f"memory traffic alone: {3 * copying:.3f} ms forward, {matrices * copying:.3f} ms backward\n")
    for tiles in TILES:
        lora_kernels._TILES_BY_RANK = {rank: tiles}
        try:
            forward = do_bench(lambda: lora_kernels.lora_swiglu_triton(inputs, a_down))
            backward = do_bench(lambda: lora_kernels.lora_swiglu_triton_backward(d_h, d_xa, a_down, inputs))
        except Exception as error:  # a tile that does not fit
            sys.stdout.write(f"{tiles}: {type(error).__name__}\n")
            continue
        sys.stdout.write(f"{tiles}: {forward:.3f} ms forward, {backward:.3f} ms backward\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
