"""Reports in Markdown, and of several runs."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.core.errors import UsageError, WhetError
from whet.report.markdown_report import _code, _fence, _text
from whet.report.run_reports import write_report, write_reports

MakeRun = Callable[..., Path]
OTHER = "run: {name: chairs, seed: 7}\nmodel: {path: 'builtin:tiny'}\ntrain: {steps: 9}\n"


def test_a_run_in_markdown(make_run: MakeRun) -> None:
    folder = make_run()
    path = write_report(folder, "md")
    assert path == folder / "report.md"
    text = path.read_text()
    for expected in (
        "# orders",
        "24 of 258 conversations seen",
        "| orders score | 0% → 75% |",
        "## Before and after",
        "| merged | ✓ verified | 1e-05 |",
        "- 2 × **too long** in builtin:orders, first at `data.jsonl:17`",
        "<details><summary>Resolved configuration</summary>",
    ):
        assert expected in text, expected
    assert re.search("[⠁-⣿]", text), "a curve"


HOSTILE = "</details><script>alert(1)</script> [x](javascript:y) ![z](http://e/x.png) `` ``` | **b** \x1b[2J\u202e"


def test_nothing_in_a_name_or_an_answer_is_markup(make_run: MakeRun) -> None:
    texts = {"task": "orders", "prompt": HOSTILE, "answer": HOSTILE, "expected": "```\n# no heading"}
    lines = [{"step": step, "right": True, **texts} for step in (0, 3)]
    config = f"run: {{name: {json.dumps(HOSTILE)}}}\nmodel: {{path: {json.dumps(HOSTILE)}}}\n"
    text = write_report(make_run(config=config, samples=lines), "md").read_text()
    assert "\x1b" not in text
    assert "\u202e" not in text
    outside, fence = [], ""
    for line in text.splitlines():
        opening = re.match("(`{3,})", line)
        if fence:
            fence = "" if line == fence else fence
        elif opening:
            fence = opening[1]
        else:
            outside.append(line)
    assert fence == "", "every block is closed"
    plain = "\n".join(outside)
    assert "<script" not in plain
    assert not re.search(r"(?<!\\)\]\(", plain)
    assert "# no heading" not in plain


@given(st.text())
def test_any_text_stays_on_its_line_and_any_block_ends_with_its_fence(text: str) -> None:
    assert "\n" not in _text(text)
    assert "<" not in _text(text)
    assert "|" not in _code(text)
    assert "\n" not in _code(text)
    first, *content, last = _fence(text).split("\n")
    assert first == f"{last}text"
    assert all(not line.strip().startswith(last) for line in content)


def test_several_runs_in_one_report(make_run: MakeRun) -> None:
    one, other = make_run(), make_run(config=OTHER)
    html = write_reports([one, other]).read_text()
    assert (one.parent / "report.html").exists()
    for expected in ("<h1>2 runs</h1>", "train.steps", "orders: Data", "chairs: Data", 'class="key second"'):
        assert expected in html, expected
    text = write_reports([one, other], "md").read_text()
    assert "| train.steps | 3 | 9 |" in text
    assert "| orders | finished | 3 | 1 | 3.1 → 1.1 | 0% → 75% |" in text
    same = write_reports([one, one], "md").read_text()
    assert str(one.name) in same, "runs of one name are told apart by their folders"
    assert "Settings that differ" not in same


def test_where_a_report_goes(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    assert write_report(run, str(tmp_path / "x.md")).read_text().startswith("# orders")
    assert "<html" in write_report(run, str(tmp_path / "x.html")).read_text()
    with pytest.raises(UsageError, match=r"--to pdf: give html, md"):
        write_report(run, "pdf")
    (folder := tmp_path / "page.html").mkdir()
    with pytest.raises(WhetError, match=r"page\.html: it is a folder"):
        write_report(run, str(folder))
    with pytest.raises(WhetError, match=r"--to /proc/x\.md: cannot be written: No such file or directory"):
        write_report(run, "/proc/x.md")
    with pytest.raises(WhetError, match="no such folder"):
        write_report(run, str(tmp_path / "none" / "x.md"))


def test_prompts_over_time_and_held_out_answers(make_run: MakeRun) -> None:
    asked = [
        {"step": step, "task": "eval.prompts", "prompt": "Hello?", "expected": "", "answer": f"a{step}", "right": None}
        for step in (0, 1, 2, 3)
    ]
    held = [
        {"step": step, "task": "data.validation", "prompt": "<|user|>2 chairs", "expected": "{}", "answer": f"h{step}"}
        for step in (0, 3)
    ]
    run = make_run(samples=asked + held)
    html, text = write_report(run).read_text(), write_report(run, "md").read_text()
    for page in (html, text):
        assert "Prompts over time" in page
        assert all(f"a{step}" in page for step in range(4))
        assert all(answer in page for answer in ("h0", "h3"))
    assert "1 of 1 held-out samples" in text


def test_seen_conversations_are_counted_once(make_run: MakeRun) -> None:
    """Three epochs over two of the conversations: six visits, two conversations."""
    run = make_run()
    records = [struct.pack("<IIIf", step, number, 5, 1.0) for step in (1, 2, 3) for number in (7, 9)]
    (run / "losses.bin").write_bytes(b"".join(records) + b"\0" * 5)
    assert "2 of 258 conversations seen" in write_report(run, "md").read_text()
