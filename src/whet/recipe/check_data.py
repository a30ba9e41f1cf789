"""Checks of the prepared data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from whet.config import Config
from whet.data.language import ChatLanguage
from whet.data.verify import verify
from whet.recipe.data import Data
from whet.recipe.plan import make_plan

Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    check: str
    level: Level
    text: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_MANY = 0.05
"""What befalls more than this part of all conversations is a fault; of fewer it is a warning."""

_FEW_STEPS = 50


def check_accounts(data: Data) -> Iterator[Finding]:
    """What became of the conversations: dropped, cut, without anything to learn, without an end."""
    for account in data.ledger()["sources"]:
        counts, name = account["conversations"], f"{account['source']} ({account['use']})"
        kept = f"{name}: {counts['kept']:,} of {counts['in']:,} conversations kept{_reasons(account)}"
        if counts["kept"] == 0:
            yield Finding("kept", "fault", kept)
            continue
        yield Finding("kept", "ok", kept)
        reasons = dict(account["reasons"])
        for reason in ("duplicate", "filter"):  # left out because the user said so
            reasons.pop(reason, None)
        too_long, empty = reasons.pop("too long", 0), reasons.pop("nothing to learn", 0)
        for check, number, text in (
            ("too long", too_long, "dropped as too long; raise data.max_length, or data.too_long=truncate or split"),
            ("nothing to learn", empty, "dropped: nothing is left to learn, cut away or marked so"),
            ("truncation", counts["truncated"], "cut to data.max_length, so that their answers have no end"),
            ("bad lines", sum(reasons.values()), f"cannot be used ({', '.join(reasons)})"),
        ):
            yield from _share(check, number, counts["in"], f"{name}: {number:,} {text}")
        yield _eos(name, account)
        yield from _notes(name, account)


def _share(check: str, number: int, total: int, text: str) -> Iterator[Finding]:
    """Nothing if there are none; few are worth a warning, many are a fault."""
    if number:
        yield Finding(check, "fault" if number > _MANY * total else "warning", f"{text} ({number / total:.1%})")


def _eos(name: str, account: dict[str, Any]) -> Finding:
    part = account["eos_supervised"] or 0.0
    text = f"{name}: the end of turn is learned in {part:.1%} of all conversations"
    if part == 1:
        return Finding("end of turn", "ok", text)
    level: Level = "warning" if part >= 1 - _MANY else "fault"
    return Finding("end of turn", level, f"{text}; without it the model never stops")


def _notes(name: str, account: dict[str, Any]) -> Iterator[Finding]:
    """What is known of conversations that were kept; text that writes control tokens is a fault at any number."""
    for note, number in account["notes"].items():
        first = ", ".join(account["first"].get(note, [])[:3])
        level: Level = "fault" if note.startswith(("control tokens", "marker")) else "warning"
        yield Finding(note, level, f"{name}: {number:,} conversations, first {first}")


def _reasons(account: dict[str, Any]) -> str:
    parts = [
        f"{number:,} {reason} ({', '.join(account['first'].get(reason, [])[:2])})"
        for reason, number in account["reasons"].items()
    ]
    return f"; dropped: {', '.join(parts)}" if parts else ""


def check_copies(data: Data) -> Iterator[Finding]:
    """Exact copies within the data, and between training and validation."""
    for account in data.ledger()["sources"]:
        number = 0 if account["reasons"].get("duplicate") else account["duplicates"]  # or they were left out
        first = ", ".join(account["first"].get("duplicate", [])[:3])
        text = f"{account['source']}: {number:,} are exact copies of earlier ones, first {first}; data.deduplicate=true"
        yield from _share("duplicates", number, account["conversations"]["in"], text)
    if data.validation is None:
        return
    copies = data.overlap()
    if copies:
        text = f"{len(copies):,} validation conversations are trained on too, first {', '.join(copies[:3])}"
        yield Finding("overlap", "fault", text)
    else:
        yield Finding("overlap", "ok", "no validation conversation is in the training data")


def check_ids(config: Config, data: Data) -> Iterator[Finding]:
    """The ids trained on are those that transformers gives for the whole conversation, with the same mask."""
    rendering = data.language.rendering(cached=False)
    found = verify(data.train.store, config.data.sources, rendering, config.data)
    if found.ids_differ:
        yield _differs("ids", found.ids_differ, found.compared, "differ from what transformers gives", data)
    elif found.loss_differs:
        yield _differs("mask", found.loss_differs, found.compared, "have another mask when made again", data)
    else:
        yield Finding("ids", "ok", f"{found.compared} conversations, rendered again, have the same ids and masks")


def _differs(check: str, places: list[str], compared: int, how: str, data: Data) -> Finding:
    store = data.train.store.folder
    text = f"{len(places)} of {compared} conversations {how}, first {places[0]}. {store} is damaged: delete it"
    return Finding(check, "fault", text)


def check_template(data: Data) -> Iterator[Finding]:
    """Traps of chat templates."""
    if not isinstance(data.language, ChatLanguage):
        return
    store, tokenizer = data.train.store, data.tokenizer
    if data.language.identity["today"]:
        yield Finding(
            "template", "warning", f"it inserts the date: all conversations say {data.language.identity['today']}"
        )
    bos = tokenizer.bos_token_id
    ids = store.ids(0)
    if bos is not None and len(ids) > 1 and ids[0] == bos == ids[1]:
        twice = f"conversations begin with {tokenizer.bos_token} twice: the template and the text both have it"
        yield Finding("template", "fault", twice)
    rendering = data.language.rendering(cached=False)
    end = rendering.end_of_turn()
    if end is None:
        yield Finding("template", "warning", "no exact end of turn is known for a plain question and answer")
    else:
        yield Finding("template", "ok", f"an answer ends with {tokenizer.convert_ids_to_tokens(end)}, which is learned")


def check_steps(config: Config, data: Data) -> Iterator[Finding]:
    """Packing makes steps fewer where a batch is counted in rows; a recipe made for unpacked ones then trains less."""
    plan = make_plan(config, data)
    batch = config.train.batch
    if batch.conversations is not None or config.data.packing == "none":
        yield Finding("steps", "ok", f"{len(plan):,} optimizer steps; packing does not change their number")
        return
    rows = batch.rows or (batch.tokens or 0) // config.row_length
    unpacked = -(-len(plan.documents) // rows)
    text = f"{len(plan):,} optimizer steps; unpacked, with {rows} conversations a step, it would be {unpacked:,}"
    if len(plan) < _FEW_STEPS and unpacked >= 2 * len(plan):
        remedy = "Count batches in train.batch.conversations, make them smaller, or train longer"
        yield Finding("steps", "warning", f"{text}. Packing makes the steps few. {remedy}")
    else:
        yield Finding("steps", "ok", text)
