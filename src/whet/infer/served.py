"""Whether a model can be served through slots, found out by trying.

Models with state (Mamba, Qwen3-Next), with a cache of their own kind, or with an attention that is not transformers'
common one keep something that slots do not hold. No list knows them all, so each model is tried once: two prompts and
a further token of each, compared with what the model says of the whole texts.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from whet.infer.slots import Reading, Slots, Writing, attending
from whet.model.attention import look, plain, unserved
from whet.model.attention.ask import Documents
from whet.model.attention.look import Asked
from whet.model.lora import vocabulary_of
from whet.model.rope import changing_rope

_FAILURES = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
_known: weakref.WeakKeyDictionary[nn.Module, list[Asked] | None] = weakref.WeakKeyDictionary()


def what_is_asked(model: nn.Module, longest: int) -> list[Asked] | None:
    """What each layer asks of attention, if slots serve the model for texts of up to `longest` tokens; else None."""
    if changing_rope(model, longest) is not None:
        return None
    if model not in _known:
        seen = look(model)
        _known[model] = seen if seen and unserved(model, seen) is None and _agrees(model) else None
    return _known[model]


def _agrees(model: nn.Module) -> bool:
    """Whether two short texts have the same logits through slots as by the model's own attention."""
    vocabulary = vocabulary_of(model)
    device = next(model.parameters()).device
    texts = [torch.arange(n, device=device) * 7919 % vocabulary for n in (7, 4)]
    try:
        with plain(model):
            expected = torch.stack([model(input_ids=text[None], use_cache=False).logits[0, -1] for text in texts])
        found = _through_slots(model, texts)
    except torch.OutOfMemoryError:
        raise
    except _FAILURES:
        return False
    coarse = torch.is_autocast_enabled(device.type) or expected.dtype.itemsize < 4
    size = expected.float().abs().max().item()
    difference = (expected.float() - found.float()).abs().max().item()
    return difference <= (0.05 if coarse else 1e-3) * size


def _through_slots(model: nn.Module, texts: Sequence[Tensor]) -> Tensor:
    """[N V] logits of the last token of each text: all others are read as prompts, packed, then it is written."""
    device = texts[0].device
    slots = Slots(len(texts), 16)
    lengths = [len(text) - 1 for text in texts]
    edges = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    at = torch.cat([torch.arange(length, device=device) + 16 * row for row, length in enumerate(lengths)])
    documents = Documents(torch.tensor(edges, dtype=torch.int32, device=device), max(lengths), edges)
    with attending(model):
        model(
            input_ids=torch.cat([text[:-1] for text in texts])[None], position_ids=positions[None], use_cache=False,
            slots=Reading(slots, at, documents, "sdpa"),
        )  # fmt: skip
        last = torch.tensor(lengths, device=device)
        output = model(
            input_ids=torch.stack([text[-1:] for text in texts]), position_ids=last[:, None], use_cache=False,
            slots=Writing(slots, last, 16),
        )  # fmt: skip
    return output.logits[:, -1]
