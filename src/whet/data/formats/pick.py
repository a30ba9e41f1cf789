"""Finding fields under the names that people give them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def present(record: Mapping[str, Any], field: str, names: Sequence[str], fields: Mapping[str, str]) -> list[str]:
    """Those of a field's usual names that a record has; if the user named the field, that name alone counts."""
    wanted = [fields[field]] if field in fields else names
    return [name for name in wanted if record.get(name) is not None]


def readings(
    record: Any, known: Mapping[str, Sequence[str]], needed: Sequence[str], fields: Mapping[str, str]
) -> list[dict[str, str]]:
    """Every way to find the `needed` fields in a record; more than one: the names do not tell what is meant."""
    if not isinstance(record, dict):
        return []
    options = [[(field, name) for name in present(record, field, known[field], fields)] for field in needed]
    return [dict(choice) for choice in itertools.product(*options)]
