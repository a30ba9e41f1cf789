"""whet fine-tunes language models on conversations."""

import logging

__version__ = "0.1.0"

# Before anything imports transformers, which imports torchao where it finds it, which complains of what is not used.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
