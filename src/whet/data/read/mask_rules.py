"""Loss masks of pretokenized documents, by GPT-NeoX's rules on token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from whet.data.config import MaskRules

# Which tokens of a ready document are learned, by GPT-NeoX's rules on ids.
#
# NeoX's fork on LUMI computes them on *outputs*, and so does whet: `loss[i] = 1` means that token i is to be predicted.
#
# ids          7  a  b  7  8  c  d  8  EOD        pairs [[7, 7]], alternating [8]
# pairs        ·  ·  ·  ·  1  1  1  1  1          a pair of one id: from each odd occurrence to the next, inclusive
# alternating  1  1  1  1  ·  1  1  1  1          each odd occurrence of the id
# loss         0  0  0  0  0  1  1  1  1
#
# A pair of two ids counts: masked is what more openings than closings came before, nested ones too. `eod` masks the
# token *after* that id, which NeoX predicts from the end of another document; in whet no document sees another.

if TYPE_CHECKING:
    from numpy.typing import NDArray


def loss_mask_from_rules(ids: NDArray[np.int32], rules: MaskRules | None) -> NDArray[np.uint8]:
    """1 for each token of a document that is learned. The first has nothing before it, so it never is."""
    masked = np.zeros(len(ids), dtype=np.bool_)
    masked[:1] = True
    if rules is not None:
        for opening, closing in rules.pairs or ():
            masked |= _inside_pairs(ids, opening, closing)
        masked |= np.isin(ids, rules.individual or [])
        for number in rules.alternating or ():
            found = ids == number
            masked |= found & (np.cumsum(found) % 2 == 1)
        if rules.eod is not None:
            masked[1:] |= ids[:-1] == rules.eod
    return (~masked).astype(np.uint8)


def _inside_pairs(ids: NDArray[np.int32], opening: int, closing: int) -> NDArray[np.bool_]:
    """From an opening to its closing, both included; to the end where it is never closed."""
    opened = np.cumsum(ids == opening)
    inside = opened % 2 == 1 if opening == closing else opened > np.cumsum(ids == closing)
    inside[1:] |= inside[:-1]  # the closing itself
    return inside


def describe_mask_rules(rules: MaskRules | None) -> str:
    """What is learned of a source of ready tokens, in a sentence for the ledger."""
    given = [] if rules is None else [name for name in type(rules).model_fields if getattr(rules, name) is not None]
    if not given:
        return "every token is learned, because the source has no mask rules (data.sources.N.mask)"
    return f"learned is what the mask rules leave: {', '.join(given)}"
