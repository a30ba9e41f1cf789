"""Whether processes can compute a model's layers together, asked before anything else is done."""

from __future__ import annotations

from whet.config import Config


def need_tensor_plan(config: Config) -> None:
    """Refuse parallel.tensor for a model that cannot be divided so, by a look at the model without its weights.

    Code that comes with a model is run once, where it is loaded; such a model is refused there.
    """
    if config.parallel.tensor == 1 or config.model.trust_remote_code:
        return
    import torch

    from whet.model.hollow import bare_model
    from whet.parallel.tensor_plan import read_plan

    read_plan(bare_model(config.model, torch.float32), config.parallel.tensor)
