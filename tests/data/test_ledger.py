"""The ledger adds up."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.data.conversation import Origin
from whet.data.prepare.ledger import Account, ledger_line, with_use

FATES = st.sampled_from(["keep", "cut", "bad role", "too long", "cut and dropped"])


def settle(account: Account, layout_or_reason: str, line: int) -> None:
    account.read += 1
    if layout_or_reason.startswith("cut"):
        account.truncate(Origin("a", line))
    if layout_or_reason in ("keep", "cut"):
        account.keep(tokens=10, supervised=4, ended=layout_or_reason == "keep")
        account.kept += 1
    else:
        account.drop(
            "nothing to learn" if layout_or_reason == "cut and dropped" else layout_or_reason, Origin("a", line)
        )


@given(st.lists(FATES, max_size=30))
def test_every_conversation_is_kept_or_dropped_with_a_reason(fates: list[str]) -> None:
    account = Account()
    for number, layout_or_reason in enumerate(fates, 1):
        settle(account, layout_or_reason, number)
    entry = account.as_dict("a", "train")
    kept = [layout_or_reason for layout_or_reason in fates if layout_or_reason in ("keep", "cut")]
    assert entry["conversations"] == {
        "in": len(fates),
        "kept": len(kept),
        "dropped": len(fates) - len(kept),
        "truncated": sum(layout_or_reason.startswith("cut") for layout_or_reason in fates),
        "split": 0,
    }
    assert sum(entry["reasons"].values()) == entry["conversations"]["dropped"]
    assert (entry["tokens"], entry["supervised_tokens"]) == (10 * len(kept), 4 * len(kept))
    assert entry["eos_supervised"] == (kept.count("keep") / len(kept) if kept else None)


def test_the_first_five_of_each_reason_are_named() -> None:
    account = Account(read=13)
    for line in range(1, 8):
        account.drop("bad role", Origin("a", line))
    for line in range(8, 14):
        account.drop("too long", Origin("a", line))
    account.truncate(Origin("a", 99))
    assert account.as_dict("a", "train")["first"] == {
        "bad role": [f"a:{line}" for line in range(1, 6)],
        "too long": [f"a:{line}" for line in range(8, 13)],
        "truncated": ["a:99"],
    }
    assert account.as_dict("a", "train")["reasons"] == {"bad role": 7, "too long": 6}


@pytest.mark.parametrize("read", [0, 2])
def test_a_lost_or_extra_conversation_is_an_error(read: int) -> None:
    account = Account(read=read)
    account.kept += 1
    with pytest.raises(AssertionError, match="lost"):
        account.as_dict("a", "train")


def test_entries_have_source_and_use() -> None:
    entry = Account().as_dict("a.jsonl", "validation")
    assert (entry["source"], entry["use"]) == ("a.jsonl", "validation")


@given(st.lists(st.lists(FATES, max_size=12), max_size=4))
def test_the_parts_of_a_source_add_up_to_the_whole(parts: list[list[str]]) -> None:
    whole, joined, line = Account(), Account(), 0
    for fates in parts:
        part = Account()
        for layout_or_reason in fates:
            line += 1
            settle(part, layout_or_reason, line)
            settle(whole, layout_or_reason, line)
            for account in (part, whole):
                account.note("odd", Origin("a", line))
                account.duplicates += 1
        joined.add(Account.restore(json.loads(json.dumps(part.state()))))  # as it is after a stay in a chunk's file
    assert joined == whole


@given(
    file=st.text(st.characters(), min_size=1),
    detail=st.text(st.characters(), max_size=600),
    renamed=st.booleans(),
)
def test_a_line_of_the_ledger_is_one_line_of_json_whatever_it_quotes(file: str, detail: str, renamed: bool) -> None:
    line = ledger_line(3, Origin(file, 7), "dropped", "broken JSON", detail)
    names = {(3, file): "today.jsonl", (2, file): "other.jsonl"} if renamed else {}
    in_run = with_use(line, "validation", names)
    assert line.count(b"\n") == in_run.count(b"\n") == 1
    entry = {
        "source": 3, "file": file, "line": 7, "outcome": "dropped", "reason": "broken JSON", "detail": detail[:500],
    }  # fmt: skip
    assert json.loads(line) == entry
    assert json.loads(in_run) == {"use": "validation", **entry, "file": "today.jsonl" if renamed else file}
