"""Internals of typer, seen in 0.29: how help shows the type of a parameter."""

from __future__ import annotations

import re
from typing import Any

from typer import core

_LIST = re.compile(r"<list\[(.*)\]>")


def hide_obvious_types() -> None:
    """Leave `<bool>` out of the help of flags, and every type out of that of arguments, which their names tell."""
    for kind in (core.TyperOption, core.TyperArgument):
        if hasattr(kind, "display_type_rich"):
            kind.display_type_rich = _display_type  # type: ignore[method-assign, assignment]


def _display_type(parameter: Any, ctx: Any) -> str | None:
    if isinstance(parameter, core.TyperArgument) or getattr(parameter, "is_flag", False):
        return None
    shown = str(parameter.metavar or parameter.display_type(ctx) or "")
    return _LIST.sub(r"<\1>", shown).replace(" range>", ">")
