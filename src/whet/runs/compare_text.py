"""A comparison of runs as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from whet.core.display import escape_controls
from whet.report.formatting import DASH, format_count, format_number, format_seconds
from whet.report.terminal_report import draw_loss_curve
from whet.runs.compare import ComparedRun
from whet.runs.text import format_table


def format_comparison(runs: Sequence[ComparedRun], result: dict[str, Any]) -> list[str]:
    """Settings that differ, final metrics, curves on the same axes, and differences by conversation."""
    labels = [run.label for run in runs]
    settings = [[key, *map(_value, values)] for key, values in result["settings"].items()]
    lines = format_table(["SETTING", *labels], settings) if settings else ["the settings are the same"]
    metrics = [[key, *(_metric(key, value) for value in values)] for key, values in result["metrics"].items()]
    lines += ["", *format_table(["METRIC", *labels], metrics)]
    for title, curves in (
        ("loss", [run.view.losses for run in runs]),
        ("validation loss", [run.view.val_losses for run in runs]),
    ):
        frame = [point for curve in curves for point in curve]
        for label, curve in zip(labels, curves, strict=True):
            if len(curve) > 1:
                chart = draw_loss_curve(curve, height=8, frame=frame)
                lines += ["", f"{title} of {escape_controls(label)}", *chart.split("\n")]
    return [*lines, "", *(escape_controls(format_difference(found)) for found in result["paired"])]


def _value(value: Any) -> str:
    return DASH if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _metric(key: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or DASH
    if key == "train_s":
        return format_seconds(value)
    if key in ("step", "supervised_tokens", "tokens_per_s"):
        return format_count(value)
    return format_number(value) if key == "peak_gib" else f"{value:.4f}"


def format_difference(found: dict[str, Any]) -> str:
    """As a sentence."""
    if "problem" in found:
        return f"not compared by conversation: {found['problem']}"
    low, high = found["interval"]
    better = "better" if found["difference"] < 0 else "worse" if found["difference"] > 0 else "the same"
    luck = "significant" if found["significant"] else "not significant: it may be luck"
    count = f"{found['conversations']:,} conversations"
    if found["conversations"] < max(found["of_conversations"]):
        count += f" in common (of {found['of_conversations'][0]:,} and {found['of_conversations'][1]:,})"
    steps = (
        f"steps {found['steps'][0]} and {found['steps'][1]}"
        if len(set(found["steps"])) > 1
        else f"step {found['steps'][0]}"
    )
    return (
        f"{found['of']} − {found['against']}: validation loss {found['difference']:+.4f} [{low:+.4f}, {high:+.4f}], "
        f"p = {found['p']:.2g}: {better}, {luck} ({count}, {steps})"
    )
