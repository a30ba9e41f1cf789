"""Random weights as files, for tools that take nothing else: `python -m whet.bench.random_weights FOLDER DTYPE`.

A process of its own, so that neither its time nor its memory counts as anyone's.
"""

from __future__ import annotations

import sys
from pathlib import Path

_WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")


def write_random_weights(folder: Path, dtype: str) -> None:
    """Beside the config.json in `folder`, of the shape that it describes."""
    import torch

    from whet.model.config import ModelConfig
    from whet.model.load.pretrained import load_model
    from whet.model.load.random_models import RANDOM_PREFIX

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kept = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    model = load_model(ModelConfig(path=f"{RANDOM_PREFIX}{folder}"), kept, accelerator)
    model.save_pretrained(folder)  # type: ignore[operator]


def delete_weights(folder: Path) -> None:
    """Of an 8B model they are 16 GB, and anyone can draw them again."""
    for pattern in _WEIGHT_PATTERNS:
        for file in folder.glob(pattern):
            file.unlink()


if __name__ == "__main__":
    write_random_weights(Path(sys.argv[1]), sys.argv[2])
