"""Random numbers that a model draws in training: dropout of any kind, noise in routers, layers skipped at random.

Found by what happens, not by name: eight tokens in training mode, and a look at the generators before and after."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
from torch import Tensor, nn

from whet.core.errors import WhetError
from whet.model.loss.loss_model import LossModel
from whet.model.modules import mode_of_modules
from whet.model.packing_check import hidden_of_documents


def is_stochastic(root: LossModel, vocabulary: int) -> bool:
    """Whether a forward pass in training draws random numbers. The generators keep their states."""
    return root.with_full_weights(functools.partial(_is_stochastic, root, vocabulary))


@torch.no_grad()
def _is_stochastic(root: LossModel, vocabulary: int) -> bool:
    device = next(root.parameters()).device
    tokens = torch.arange(8, device=device) * 7919 % vocabulary
    python = random.getstate()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), mode_of_modules(root, training=True):
        before = _generator_states(device)
        root.hidden_unpacked([tokens]) if root.unpacked else hidden_of_documents(root, [tokens])
        after = _generator_states(device)
    is_same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    is_same = is_same and random.getstate() == python
    random.setstate(python)
    return not is_same


def _generator_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def ignored_attention_dropout(model: nn.Module) -> str | None:
    """The setting in config.json for dropout of attention weights, which whet's attention does not apply."""
    names = [name for name in _probabilities(model) if "att" in name and "drop" in name]
    return f"{names[0]}={_probabilities(model)[names[0]]:g}" if names else None


def require_no_layer_drop(model: nn.Module) -> None:
    """Refuse layers that are skipped at random: each process would skip others, and sharded layers need all of them."""
    for name, value in _probabilities(model).items():
        if "layerdrop" in name and not name.startswith("encoder"):
            raise WhetError(
                f"model.path: {name} is {value:g} in this model's config.json: layers are skipped at random, different "
                f"ones in each process, but sharded layers need all processes. Set {name} to 0 there, or remove "
                "parallel.shard"
            )


def _probabilities(model: Any) -> dict[str, float]:
    settings = model.config.get_text_config().to_dict()
    return {name: value for name, value in settings.items() if isinstance(value, float | int) and 0 < value <= 1}
