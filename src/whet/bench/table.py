"""The outcome as Markdown."""

from __future__ import annotations

from typing import Any

from whet.bench.speed import CONVENTIONS

_TITLES = ("tool", "tokens/s", "supervised tokens/s", "TFLOP/s", "peak GiB", "first step, s", "ms a step", "whet ÷ it")


def markdown(result: dict[str, Any]) -> str:
    """A heading with the terms, the table, and below it what the columns mean and what must be known of each tool."""
    rows = [_row(contender) for contender in result["contenders"] if contender["state"] != "not installed"]
    lines = [
        f"## {_heading(result['terms'])}",
        "",
        f"{result['device']}; {result['model']['weights']:,} random weights; {result['data']['from']}, "
        f"{result['data']['mean_length']:.0f} tokens a conversation on average.",
        "",
        f"| {' | '.join(_TITLES)} |",
        f"|---|{'---:|' * (len(_TITLES) - 1)}",
        *rows,
        "",
        *(f"- {note}" for note in [*_notes(result["contenders"]), *CONVENTIONS]),
    ]
    return "\n".join(lines) + "\n"


def _heading(terms: dict[str, Any]) -> str:
    return (
        f"{terms['model']}, {terms['mode']}, {terms['precision']}: {terms['rows']} rows of {terms['length']}, "
        f"recompute {terms['recompute']}, steps {terms['warm'] + 1} to {terms['steps']}"
    )


def _row(contender: dict[str, Any]) -> str:
    name = _name(contender)
    if contender["state"] == "failed":
        return f"| {name} | failed: {contender['error'].replace('|', '/')} |{' |' * (len(_TITLES) - 2)}"
    speed = contender["speed"]
    ratio = contender["ratio"]
    cells = (
        name,
        f"{speed['tokens_per_s']:,.0f}",
        f"{speed['supervised_per_s']:,.0f}",
        f"{speed['tflops']:,.1f}" if speed["tflops"] >= 1 else f"{speed['tflops']:.3f}",
        f"{contender['peak_gib']:.1f}",
        f"{speed['first_step_s']:.1f}",
        f"{speed['step_ms']:,.0f}",
        "–" if ratio is None else f"{ratio:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def _notes(contenders: list[dict[str, Any]]) -> list[str]:
    found = []
    for contender in contenders:
        if contender["state"] == "not installed":
            found.append(f"{contender['title']} is not installed here, so it is left out.")
        found += [f"{_name(contender)}: {note}." for note in contender["notes"]]
    return found


def _name(contender: dict[str, Any]) -> str:
    return f"{contender['title']} {contender['version']}".strip()
