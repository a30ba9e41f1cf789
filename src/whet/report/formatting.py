"""Numbers, counts, shares, durations and tables as text; a missing value is a dash."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.cells import cell_len

from whet.core.display import escape_controls

DASH = "–"
_YEAR_3000 = 32_503_680_000


_LARGEST = 1e100  # nothing that a run measures; in a damaged file, sums and axes of larger numbers would overflow


def finite_number(value: object) -> float | None:
    """`value` as a float if it is a number that a run can have measured, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= _LARGEST else None


def int_or_none(value: object) -> int | None:
    """A count as a run can have; larger numbers are damage."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else None


def format_number(value: float | None) -> str:
    """Three significant digits, such as 0.0512 or 3.1e-05."""
    return DASH if value is None else f"{value:.3g}"


def format_count(value: float | None) -> str:
    """A whole number with separators; from ten million with a unit: M, G, T or P."""
    if value is None:
        return DASH
    if abs(value) < 1e7:
        return f"{value:,.0f}"
    size, unit = next(
        ((size, unit) for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G")) if abs(value) >= size), (1e6, "M")
    )
    return f"{value / size:.4g} {unit}"


def format_share(value: float | None) -> str:
    """A share as a percentage. Only exactly 1 is 100% and only exactly 0 is 0%."""
    if value is None:
        return DASH
    text = f"{value:.1%}".replace(".0%", "%")
    if text == "100%" and value < 1:
        return ">99.9%"
    return "<0.1%" if text == "0%" and value > 0 else text


def format_seconds(value: float | None) -> str:
    """A duration in its two largest units, such as `3 min 12 s`."""
    if value is None:
        return DASH
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 10:
        return f"{value:.1f} s"
    seconds = round(value)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02} min"


def format_gib(value: float | None) -> str:
    """Memory, of which the third digit matters."""
    return DASH if value is None else f"{value:.2f} GiB"


def format_time(value: float | None) -> str:
    """A Unix time in UTC, because a report may be read in another time zone."""
    if value is None or not 0 <= value < _YEAR_3000:
        return DASH
    return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M UTC")


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns, two blanks apart; the last one is not padded."""
    table = [
        [escape_controls(cell).replace("\n", "\\n").replace("\t", "\\t") for cell in row] for row in (header, *rows)
    ]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
