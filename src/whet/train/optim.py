"""The optimizer and its groups."""

from __future__ import annotations

import torch
from torch import nn

from whet.train.config import OptimizerConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over the trainable weights; weight decay pulls matrices only, not norms and biases."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [parameter for _, parameter in named if parameter.ndim >= 2]
    vectors = [parameter for _, parameter in named if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay, "highest": config.lr},
        {"params": vectors, "weight_decay": 0.0, "highest": config.lr},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> dict[str, float]:
    """Give each group its highest rate × `factor`; returns what metrics.jsonl says of it."""
    for group in optimizer.param_groups:
        group["lr"] = group["highest"] * factor
    return {"lr": optimizer.defaults["lr"] * factor}
