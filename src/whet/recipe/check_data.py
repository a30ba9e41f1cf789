"""Checks of the data: what became of every conversation, and whether any is there twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from whet.config import Config
from whet.data.render import CONTROL_TOKENS, NOTHING_TO_LEARN, THOUGHTS_LEFT_OUT, TOOLS_LEFT_OUT
from whet.data.settle import LOST_EXCHANGE
from whet.data.turns import LOOK_ALIKE
from whet.recipe.data import Data
from whet.recipe.finding import Finding, Level

_MANY = 0.05
"""What befalls more than this part of all conversations is a fault; of fewer it is a warning."""

_NOTES: dict[str, tuple[Level, str, str]] = {
    CONTROL_TOKENS: (
        "fault",
        "the text spells a token of the template, such as an end of turn, so the model sees turns that nobody took",
        "Reword it, or remove these conversations",
    ),
    LOOK_ALIKE: (
        "fault",
        "the text holds what can be taken for a marker",
        "Mend what was meant as one, reword the rest, or remove these conversations",
    ),
    THOUGHTS_LEFT_OUT: (
        "warning",
        "the template shows the reasoning of earlier turns to nobody, so it is not learned",
        "If it should be, make a conversation of each answer",
    ),
    TOOLS_LEFT_OUT: (
        "fault",
        "the record offers tools, and the template has no place for them, so the model never sees them",
        "Use a template that knows tools (data.template), or remove them",
    ),
    LOST_EXCHANGE: (
        "warning",
        "data.too_long=split left an exchange out that is too long by itself",
        "Raise data.max_length to keep it",
    ),
}
"""What the ledger notes of conversations that are kept: how bad it is, what it means, what to do."""


def check_accounts(config: Config, accounts: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """What became of the conversations: dropped, cut, without anything to learn, without an end."""
    for account in accounts:
        counts, name = account["conversations"], _name(account)
        kept = f"{name}: {counts['kept']:,} of {counts['in']:,} conversations kept{_reasons(account)}"
        if counts["kept"] == 0:
            yield Finding("kept", "fault", f"{kept}. It contributes nothing: mend it, or take it out of data.sources")
            continue
        yield Finding("kept", "ok", kept)
        yield from _losses(account, config.data.max_length)
        yield _end_of_turn(account)
        for note, number in account["notes"].items():
            level, meaning, remedy = _NOTES.get(note, ("warning", "see the ledger", "Look at them"))
            yield Finding(note, level, _told(account, number, meaning, note, remedy))


def _losses(account: dict[str, Any], limit: int) -> Iterator[Finding]:
    reasons = dict(account["reasons"])
    for reason in ("duplicate", "filter"):  # left out because the user said so
        reasons.pop(reason, None)
    too_long, empty, cut = (
        reasons.pop("too long", 0), reasons.pop(NOTHING_TO_LEARN, 0), account["conversations"]["truncated"],
    )  # fmt: skip
    long = f"longer than data.max_length = {limit:,}"
    yield from _share(
        "too long", account, too_long, f"{long} and left out", "too long",
        "Raise it, or choose data.too_long=split or truncate",
    )  # fmt: skip
    yield from _share(
        "nothing to learn", account, empty, "left out because no token of them is learned", NOTHING_TO_LEARN,
        "Their answers are cut away by data.max_length, or marked with weight: 0 or train: false: raise it, or unmark "
        "them",
    )  # fmt: skip
    yield from _share(
        "truncation", account, cut, f"{long} and cut, so that the last answer has no end", "truncated",
        "Raise it, or choose data.too_long=split or drop",
    )  # fmt: skip
    for reason, number in reasons.items():
        yield from _share("bad lines", account, number, f"not usable ({reason}) and left out", reason, "Mend the lines")


def _share(
    check: str, account: dict[str, Any], number: int, what: str, reason: str, remedy: str
) -> Iterator[Finding]:  # fmt: skip
    """Nothing if there are none; few are worth a warning, many are a fault."""
    if number:
        level: Level = "fault" if number > _MANY * account["conversations"]["in"] else "warning"
        yield Finding(check, level, _told(account, number, what, reason, remedy))


def _told(account: dict[str, Any], number: int, what: str, reason: str, remedy: str) -> str:
    """Where, how many, what, the first places, what to do."""
    total = account["conversations"]["in"]
    places = ", ".join(account["first"].get(reason, [])[:3])
    first = f"; first {places}" if places else ""
    return f"{_name(account)}: {number:,} of {total:,} conversations ({number / total:.1%}): {what}{first}. {remedy}"


def _end_of_turn(account: dict[str, Any]) -> Finding:
    part = account["eos_supervised"] or 0.0
    text = f"{_name(account)}: the end of turn is learned in {part:.1%} of the conversations"
    if part == 1:
        return Finding("end of turn", "ok", text)
    level: Level = "warning" if part >= 1 - _MANY else "fault"
    why = (
        "Those that were cut have no end: see truncation"
        if account["conversations"]["truncated"]
        else "The template does not end its turns, or with a token that is no end to the tokenizer: see template"
    )
    return Finding("end of turn", level, f"{text}; of the others the model learns not to stop. {why}")


def _name(account: dict[str, Any]) -> str:
    return f"{account['source']} ({account['use']})"


def _reasons(account: dict[str, Any]) -> str:
    parts = [f"{number:,} {reason}" for reason, number in account["reasons"].items()]
    return f"; left out: {', '.join(parts)}" if parts else ""


def check_copies(data: Data, accounts: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Exact copies within the data, and between training and validation."""
    for account in accounts:
        number = 0 if account["reasons"].get("duplicate") else account["duplicates"]  # or they were left out
        yield from _share(
            "duplicates", account, number, "exact copies of earlier ones", "duplicate",
            "Leave them out: data.deduplicate=true",
        )  # fmt: skip
    if data.validation is None:
        return
    copies = data.overlap()
    if copies:
        text = (
            f"{len(copies):,} of {len(data.validation_documents):,} validation conversations are trained on too, first "
            f"{', '.join(copies[:3])}. Take them out of one of the two, or use data.validation.fraction"
        )
        yield Finding("overlap", "fault", text)
    else:
        yield Finding("overlap", "ok", "no validation conversation is in the training data")
