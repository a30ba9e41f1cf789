"""Functions of the user's own: scorers, metrics and data sources that installed distributions offer as entry points."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any, Literal

from whet.core.errors import WhetError, first_line

Kind = Literal["scorers", "metrics", "sources"]


def plugin_names(kind: Kind) -> list[str]:
    """The names in the entry-point group `whet.KIND`."""
    return sorted({point.name for point in entry_points(group=f"whet.{kind}")})


def require_plugin(kind: Kind, name: str, builtin: Sequence[str] = ()) -> None:
    """For validators of settings: a ValueError that lists what there is, unless an installed package offers `name`."""
    own = plugin_names(kind)
    if name in own:
        return
    close = difflib.get_close_matches(name, [*builtin, *own], n=1)
    hint = f"; did you mean {close[0]}?" if close else "."
    known = f" whet has {', '.join(builtin)}." if builtin else ""
    raise ValueError(
        f"there is no {kind[:-1]} {name!r}{hint}{known} Installed packages offer: {', '.join(own) or 'none'} (entry "
        f"points in whet.{kind})"
    )


def load_plugin(kind: Kind, name: str, key: str) -> Callable[..., Any]:
    """The function of that name; a WhetError that names `key` if there is none or several, or it cannot be imported."""
    found = list(entry_points(group=f"whet.{kind}", name=name))
    if not found:
        installed = ", ".join(plugin_names(kind)) or "none"
        raise WhetError(
            f"{key}: no installed package offers {name!r}. Installed: {installed}. Declare it in the package's "
            f'pyproject.toml, [project.entry-points."whet.{kind}"], and install the package'
        )
    if len({point.value for point in found}) > 1:
        packages = ", ".join(sorted(point.dist.name for point in found if point.dist is not None))
        raise WhetError(f"{key}: {name!r} is offered by several packages ({packages}). Uninstall all but one")
    try:
        function = found[0].load()
    except Exception as error:  # whatever the package raises when it is imported
        raise WhetError(
            f"{key}: {name!r} ({found[0].value}) cannot be imported: {type(error).__name__}: {first_line(error)}"
        ) from error
    if not callable(function):
        raise WhetError(f"{key}: {name!r} ({found[0].value}) is not a function, but {type(function).__name__}")
    return _named_errors(function, f"{key}: {name!r} ({found[0].value})")


def require_number(value: Any, place: str, low: float = -math.inf, high: float = math.inf) -> float:
    """What a scorer or a metric returned, if it is a finite number in the range."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and low <= number <= high):
        wanted = "a finite number" + (f" from {low:g} to {high:g}" if math.isfinite(low) else "")
        raise WhetError(f"{place} returned {str(value)[:60]!r}, not {wanted}. Correct the function")
    return number


def _named_errors(function: Callable[..., Any], place: str) -> Callable[..., Any]:
    """The function, whose errors say whose they are; the traceback stays in their cause."""

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except WhetError:
            raise
        except Exception as error:
            raise WhetError(f"{place} raised {type(error).__name__}: {first_line(error)}") from error

    return call
