"""A run with any bytes in any of its files: the report is written and names the damaged file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from examples import examples
from whet.report.run_reports import write_report, write_reports
from whet.report.run_view import RunView
from whet.report.terminal_report import before_after_table, draw_loss_curve, result_json, score_line, summarize_run

MakeRun = Callable[..., Path]
FILES = (
    "status.json",
    "ledger.json",
    "plan.json",
    "metrics.jsonl",
    "samples.jsonl",
    "effect.json",
    "exports/merged/certificate.json",
)


def show_everything(folder: Path) -> RunView:
    """Everything that commands show of a run."""
    run = RunView.read(folder)
    write_report(folder)
    assert write_report(folder, "md").read_text().startswith("# ")
    write_reports([folder, folder], str(folder / "both.html"))
    summarize_run(run)
    json.dumps(result_json(run))
    draw_loss_curve(run.losses)
    console = Console(file=(folder / "shown").open("w", encoding="utf-8"), width=80)
    console.print(before_after_table(run), score_line(run))
    console.file.close()
    return run


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [b"", b"\0" * 99 + b"\n", b"\xff\xfe\n", b"[1]\n", b"{\n", b"[" * 99_999 + b"\n"])
def test_a_damaged_file_is_named_on_the_page(make_run: MakeRun, name: str, content: bytes) -> None:
    folder = make_run()
    (folder / name).write_bytes(content)
    run = show_everything(folder)
    if content or name.endswith(".json"):
        assert [text.split(":")[0] for text in run.damage] == [Path(name).name]
        assert f'<span class="bad">{Path(name).name}: ' in (folder / "report.html").read_text()
        assert f"**{Path(name).name.replace('_', '')}: " in (folder / "report.md").read_text().replace("\\", "")
    else:
        assert run.damage == ()  # an empty file of lines is that of a run that has just started


def test_a_file_that_a_resumed_run_kept_is_named(make_run: MakeRun) -> None:
    folder = make_run()
    assert show_everything(folder).damage == ()
    (folder / "damaged-metrics.jsonl").touch()
    assert show_everything(folder).damage == ("damaged-metrics.jsonl: kept by a resumed run that found damage",)


def test_bit_flips(make_run: MakeRun) -> None:
    folder, draw = make_run(), random.Random(0)
    for name in FILES:
        content = (folder / name).read_bytes()
        for _ in range(6):
            bit = draw.randrange(8 * len(content))
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            (folder / name).write_bytes(flipped)
            show_everything(folder)
        (folder / name).write_bytes(content)


numbers = st.sampled_from([0, -1, 3, 10**400, 2**63, -(2**70), 1e308, -1e308, 1e-320, 1.5])
values = st.recursive(
    st.none() | st.booleans() | numbers | st.sampled_from(["", "x", "\ud800", "\x1b[31m", "<script>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["in", "step", "x", "\udc00"]), inner),
    max_leaves=5,
)


def mutated(record: Any, draw: Callable[..., Any]) -> Any:
    """The record with one value, somewhere, replaced by another of any type."""
    if isinstance(record, dict) and record and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(record)))
        return {**record, key: mutated(record[key], draw)}
    if isinstance(record, list) and record and draw(st.integers(0, 3)):
        at = draw(st.integers(0, len(record) - 1))
        return [*record[:at], mutated(record[at], draw), *record[at + 1 :]]
    return draw(values)


@given(st.data())
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_of_any_type_anywhere(make_run: MakeRun, data: st.DataObject) -> None:
    folder = make_run()
    events = [{"step": 1, "reason": "r", "action": "skip", "conversations": [{"source": "a", "line": 1}], "layer": "l"}]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    name = data.draw(st.sampled_from((*FILES, "events.jsonl")))
    lines = (folder / name).read_text()
    records = [json.loads(line) for line in lines.splitlines()] if name.endswith("l") else [json.loads(lines)]
    changed = mutated(records, data.draw)
    written = changed if isinstance(changed, list) and changed else [changed]
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in written))
    show_everything(folder)
