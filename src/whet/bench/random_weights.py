"""Random weights as files, for tools that need files: `python -m whet.bench.random_weights FOLDER DTYPE`.

Runs in its own process, so that no contender's time or memory includes it.
"""

from __future__ import annotations

import sys
from pathlib import Path

_WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")


def write_random_weights(folder: Path, dtype: str) -> None:
    """Write weights for the config.json in `folder`, next to it."""
    import torch

    from whet.model.config import ModelConfig
    from whet.model.load.pretrained import load_model
    from whet.model.load.random_models import RANDOM_PREFIX

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    weights_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    model = load_model(ModelConfig(path=f"{RANDOM_PREFIX}{folder}"), weights_dtype, accelerator)
    model.save_pretrained(folder)  # type: ignore[operator]


def delete_weights(folder: Path) -> None:
    """Delete the weights: 16 GB for an 8B model, and easily created again."""
    for pattern in _WEIGHT_PATTERNS:
        for file in folder.glob(pattern):
            file.unlink()


if __name__ == "__main__":
    write_random_weights(Path(sys.argv[1]), sys.argv[2])
