"""Rotary positions whose frequencies depend on how long the text is.

transformers looks at the largest position of a whole row for that, so that one long document would change how the
short ones beside it are turned. Documents that are no longer than what the model was first trained on are all turned
the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def changing_rope(model: nn.Module, longest: int) -> str | None:
    """The kind of rotary position that would mix up documents of up to `longest` tokens; None if there is none."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    for settings in _settings(getattr(config, "rope_parameters", None) or {}):
        kind = settings.get("rope_type")
        first = settings.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if kind in ("dynamic", "longrope") and longest > (first or config.max_position_embeddings):
            return str(kind)
    return None


def _settings(parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One for the model, or one for each kind of layer."""
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (value for value in parameters.values() if isinstance(value, dict))
