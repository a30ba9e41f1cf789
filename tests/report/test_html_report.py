"""The report: self-contained, complete, and with all text escaped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from whet.core.errors import WhetError
from whet.report.html_report import element
from whet.report.run_reports import write_report

MakeRun = Callable[..., Path]
VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """Elements, attributes and visible text of a page; asserts that elements are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self.text += data + " "

    @property
    def labels(self) -> list[str]:
        """The charts' text for screen readers."""
        return [value for _, name, value in self.attributes if name == "aria-label"]


def report(folder: Path) -> Page:
    path = write_report(folder)
    assert path == folder / "report.html"
    return Page(path.read_text())


def text_of(page: Page) -> str:
    return " ".join(page.text.split())


def test_a_finished_run(make_run: MakeRun) -> None:
    text = text_of(report(make_run()))
    assert "builtin:tiny (lora, rank 8) was trained for 3 steps, 24 of 258 conversations seen" in text
    assert "the orders score went from 0% to 75%." in text
    for expected in (
        "0% → 75%",
        "3,000 tokens",
        "900 supervised tokens",
        "6.0 s training time",
        "500 tokens per second",
    ):
        assert expected in text
    assert "Every conversation is accounted for" in text
    assert "2 × too long in builtin:orders, first at data.jsonl:17" in text
    assert "merged ✓ verified 1e-05 100% –" in text
    assert "model: {path: " in text


def test_is_offline(make_run: MakeRun) -> None:
    folder = make_run()
    page = report(folder)
    html = (folder / "report.html").read_text()
    assert not re.search(r"(https?:)?//\w", html.replace("// Shows", ""))
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", html)
    assert [value for _, name, value in page.attributes if name in ("src", "href", "srcset")] == ["data:,"]


def test_attributes_are_escaped() -> None:
    assert element("p", "<", title='"<') == '<p title="&quot;&lt;">&lt;</p>'


HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(1)">"&</pre></script>'


def test_everything_is_escaped(make_run: MakeRun) -> None:
    def page(text: str) -> Page:
        sample = {"task": text, "prompt": text, "expected": text, "answer": text}
        source = {"source": text, "use": text, "conversations": {"in": 1, "kept": 0, "dropped": 1}}
        return report(
            make_run(
                config=f"run: {{name: {json.dumps(text)}}}\nmodel: {{path: {json.dumps(text)}}}\n",
                status={"state": text, "host": text},
                ledger={"sources": [source | {"reasons": {text: 1}, "first": {text: [text]}}]},
                plan={"device": text, "packing": text, "batch": {text: text}},
                metrics=[{"step": 0, f"task/{text}": 0.0}, {"step": 1, "loss": 1.0}, {"step": 1, f"task/{text}": 1.0}],
                samples=[sample | {"step": 0, "right": False}, sample | {"step": 1, "right": True}],
                certificate={"kind": text, "verified": text},
            )
        )

    hostile, harmless = page(HOSTILE), page("harmless")
    assert hostile.tags == harmless.tags
    assert {name for _, name, _ in hostile.attributes} == {name for _, name, _ in harmless.attributes}
    # All of it can still be read; the two in the config are quoted there.
    assert hostile.text.count(HOSTILE) == harmless.text.count("harmless") - 2


def test_missing_files_give_dashes_and_no_numbers(make_run: MakeRun) -> None:
    nothing = dict.fromkeys(("status", "ledger", "plan", "metrics", "samples", "certificate"))
    text = text_of(report(make_run(**nothing)))
    for dash in (
        "– steps",
        "– training time",
        "– tokens",
        "– supervised tokens",
        "– tokens per second",
        "not measured",
    ):
        assert dash in text
    assert "has not been trained yet" in text
    assert not re.search(r"\b0\b(?!\.)", text.split("Resolved")[0]), "a zero in place of a missing value"


def test_the_effect_by_kind_of_weight_and_in_exports(make_run: MakeRun) -> None:
    effect = {"weights": 2, "exported": 2, "lost_to_rounding": 0.123}
    text = text_of(report(make_run(certificate={"verified": True, "effect": effect})))
    row = "model.layers.*.mlp.experts.down_proj 2 all all 0.01 to 0.02 1 of 8"
    assert f"experts without a token {row}" in re.sub(r"\s+", " ", text)
    assert "2 of 2 12.3%" in re.sub(r"\s+", " ", text)
    unmoved = {"modules": [{"module": "a.weight", "moved": False, "gradient": False, "change": 0.0}]}
    text = text_of(report(make_run(effect=unmoved)))
    assert "moved ‖ΔW‖ ÷ ‖W‖ a.weight 1 0 of 1 0 of 1 0 to 0" in re.sub(r"\s+", " ", text)
    assert "Effect" not in text_of(report(make_run(effect=None)))


@pytest.mark.parametrize("missing", ["status", "ledger", "plan", "metrics", "samples", "certificate"])
def test_any_one_file_may_be_missing(make_run: MakeRun, missing: str) -> None:
    assert "Plan and machine" in report(make_run(**{missing: None})).text


def test_a_truncated_last_line_is_ignored(make_run: MakeRun) -> None:
    folder = make_run()
    before = text_of(report(folder))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert text_of(report(folder)).split("Written")[0] == before.split("Written")[0]


def test_faults_are_listed(make_run: MakeRun) -> None:
    run = make_run()
    assert "Faults" not in text_of(report(run))
    event = {
        "step": 2, "kind": "nonfinite", "action": "skip", "reason": "the loss is not finite", "layer": "model.embed",
        "conversations": [{"source": "my.jsonl", "line": 18}], "all": False,
    }  # fmt: skip
    (run / "events.jsonl").write_text(json.dumps(event) + "\n" + json.dumps(event | {"all": True}) + "\n")
    text = text_of(report(run))
    for expected in (
        "Faults",
        "the loss is not finite",
        "skipped",
        "my.jsonl:18 (first non-finite layer: model.embed)",
    ):
        assert expected in text, expected
    assert "the weights: every conversation" in text


def test_a_single_step(make_run: MakeRun) -> None:
    page = report(make_run(metrics=[{"step": 1, "loss": 2.5, "step_s": 1.0}]))
    assert "training: 2.5 at step 1, 2.5 at step 1" in page.labels[0]


def test_an_unbalanced_ledger_is_reported(make_run: MakeRun) -> None:
    source = {"source": "s", "use": "train", "conversations": {"in": 10, "kept": 7, "dropped": 2}}
    assert "1 conversations are not accounted for" in text_of(report(make_run(ledger={"sources": [source]})))
    del source["conversations"]["dropped"]  # type: ignore[attr-defined]
    assert "it is unknown whether" in text_of(report(make_run(ledger={"sources": [source]})))


def test_truncated_conversations_are_listed(make_run: MakeRun) -> None:
    counts = {"in": 5, "kept": 5, "dropped": 0, "truncated": 2}
    source = {"source": "s", "use": "train", "conversations": counts, "first": {"truncated": ["d.jsonl:4"]}}
    assert "2 × truncated in s, first at d.jsonl:4" in text_of(report(make_run(ledger={"sources": [source]})))


def test_duplicates_splits_and_notes_are_listed(make_run: MakeRun) -> None:
    counts = {"in": 9, "kept": 9, "dropped": 0, "truncated": 0, "split": 3}
    source = {
        "source": "s", "use": "train", "conversations": counts, "duplicates": 4, "notes": {"control tokens": 5},
        "first": {"duplicate": ["d.jsonl:7"], "control tokens": ["d.jsonl:8"]},
    }  # fmt: skip
    page = text_of(report(make_run(ledger={"sources": [source]})))
    assert "3 × split in s" in page
    assert "4 × duplicate in s, first at d.jsonl:7" in page
    assert "5 × control tokens in s, first at d.jsonl:8" in page


@pytest.mark.parametrize("verified", [False, None, "not yet"])
def test_an_export_that_failed_its_comparison_is_not_verified(make_run: MakeRun, verified: object) -> None:
    assert "✗ not verified" in report(make_run(certificate={"verified": verified})).text


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("running", "had completed 3 of 9 steps, 24 of 258 conversations seen at its last heartbeat"),
        ("stopped", "was stopped after 3 of 9"),
        ("failed", "failed after 3 of 9"),
    ],
)
def test_an_unfinished_run(make_run: MakeRun, state: str, text: str) -> None:
    page = report(make_run(status={"state": state, "step": 3, "steps": 9, "heartbeat": 1100.0}))
    assert text in text_of(page)
    assert "3 of 9 steps 6.0 s" in text_of(page)
    assert "orders score (step 3)" in text_of(page)


def test_a_folder_without_a_run_is_an_error_and_stays_empty(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match="not a run"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_validation_before_and_after_and_by_source(make_run: MakeRun) -> None:
    lines = [
        {"step": 0, "val_loss": 3.1, "val_bpb": 2.5, "val_accuracy": 0.25, "val_loss/a": 3.0, "val_tokens/a": 9},
        {"step": 3, "val_loss": 1.1, "val_bpb": 0.5, "val_accuracy": 0.75, "val_loss/a": 1.0, "val_tokens/a": 9},
    ]
    text = text_of(report(make_run(metrics=lines)))
    for expected in ("loss 3.1 1.1", "bits per byte 2.5 0.5", "token accuracy 25% 75%", "loss on a 3 1"):
        assert expected in text
    assert "val_tokens" not in text
    assert "eval.rows" not in text
    assert "On 10% of the held-out" in text_of(
        report(make_run(metrics=[{"step": 3, "val_loss": 1.0, "val_part": 0.1}]))
    )
    assert "bits per byte" not in text_of(report(make_run(metrics=[{"step": 3, "task/orders": 0.5}])))


def test_answers_are_shown_as_they_are_and_settings_without_secrets(make_run: MakeRun) -> None:
    token = "hf_abcdefghijklmnopqrstuvwxyz"
    lines = [
        {"step": step, "task": "t", "prompt": "p", "expected": token, "answer": f"{token} \x1b[2J\u202e", "right": True}
        for step in (0, 3)
    ]
    folder = make_run(samples=lines)
    with (folder / "config.yaml").open("a") as file:
        file.write(f"note: {token}\n")
    page = write_report(folder).read_text()
    assert f"{token} \\x1b[2J\\u202e" in page
    assert "note: hf_***" in page
    assert "\x1b" not in page
    assert "\u202e" not in page
