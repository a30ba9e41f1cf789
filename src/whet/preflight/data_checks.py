"""Checks of the data: what was kept, duplicates, token ids and masks, the chat template, the number of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from whet.config import Config
from whet.core.errors import BadRecordError
from whet.data.config import Source
from whet.data.conversation import Conversation, Message, Origin
from whet.data.prepare.store import Store
from whet.data.prepare.tokenize import EXCHANGE_TOO_LONG
from whet.data.prepare.verify_store import compare_with_sources, find_corrupted
from whet.data.render.chat_tokenizer import ChatTokenizer, MarkedTextTokenizer
from whet.data.render.marked_text import MARKER_LOOK_ALIKE
from whet.data.render.renderer import CONTROL_TOKENS_IN_TEXT, NO_SUPERVISED_TOKENS, REASONING_DROPPED, TOOLS_DROPPED
from whet.run.data import RunData, make_plan

# What `whet check` says about one thing that it looked at.

Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    check: str
    level: Level
    text: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


# Checks of the data: what became of every conversation, and whether any is there twice.

_FAULT_SHARE = 0.05
"""What befalls more than this part of all conversations is a fault; of fewer it is a warning."""

_NOTE_FINDINGS: dict[str, tuple[Level, str, str]] = {
    CONTROL_TOKENS_IN_TEXT: (
        "fault",
        "the text spells a token of the template, such as an end of turn, so the model sees turns that nobody took",
        "Reword it, or remove these conversations",
    ),
    MARKER_LOOK_ALIKE: (
        "fault",
        "the text holds what can be taken for a marker",
        "Mend what was meant as one, reword the rest, or remove these conversations",
    ),
    REASONING_DROPPED: (
        "warning",
        "the template shows the reasoning of earlier turns to nobody, so it is not learned",
        "If it should be, make a conversation of each answer",
    ),
    TOOLS_DROPPED: (
        "fault",
        "the record offers tools, and the template has no place for them, so the model never sees them",
        "Use a template that knows tools (data.template), or remove them",
    ),
    EXCHANGE_TOO_LONG: (
        "warning",
        "data.too_long=split left an exchange out that is too long by itself",
        "Raise data.max_length to keep it",
    ),
}
"""What the ledger notes of conversations that are kept: how bad it is, what it means, what to do."""


def check_ledger(config: Config, accounts: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """What became of the conversations: dropped, cut, without anything to learn, without an end."""
    for account in accounts:
        counts, name = account["conversations"], _source_name(account)
        kept = f"{name}: {counts['kept']:,} of {counts['in']:,} conversations kept{_drop_reasons(account)}"
        if counts["kept"] == 0:
            yield Finding("kept", "fault", f"{kept}. It contributes nothing: mend it, or take it out of data.sources")
            continue
        yield Finding("kept", "ok", kept)
        yield from _dropped_findings(account, config.data.max_length)
        yield _end_of_turn_finding(account)
        for note, number in account["notes"].items():
            level, meaning, remedy = _NOTE_FINDINGS.get(note, ("warning", "see the ledger", "Look at them"))
            yield Finding(note, level, _describe_count(account, number, meaning, note, remedy))


def _dropped_findings(account: dict[str, Any], limit: int) -> Iterator[Finding]:
    reasons = dict(account["reasons"])
    for reason in ("duplicate", "filter"):  # left out because the user said so
        reasons.pop(reason, None)
    too_long, empty, cut = (
        reasons.pop("too long", 0), reasons.pop(NO_SUPERVISED_TOKENS, 0), account["conversations"]["truncated"],
    )  # fmt: skip
    long = f"longer than data.max_length = {limit:,}"
    yield from _share_finding(
        "too long", account, too_long, f"{long} and left out", "too long",
        "Raise it, or choose data.too_long=split or truncate",
    )  # fmt: skip
    yield from _share_finding(
        "nothing to learn", account, empty, "left out because no token of them is learned", NO_SUPERVISED_TOKENS,
        "Their answers are cut away by data.max_length, or marked with weight: 0 or train: false: raise it, or unmark "
        "them",
    )  # fmt: skip
    yield from _share_finding(
        "truncation", account, cut, f"{long} and cut, so that the last answer has no end", "truncated",
        "Raise it, or choose data.too_long=split or drop",
    )  # fmt: skip
    for reason, number in reasons.items():
        yield from _share_finding(
            "bad lines", account, number, f"not usable ({reason}) and left out", reason, "Mend the lines"
        )


def _share_finding(
    check: str, account: dict[str, Any], number: int, what: str, reason: str, remedy: str
) -> Iterator[Finding]:  # fmt: skip
    """Nothing if there are none; few are worth a warning, many are a fault."""
    if number:
        level: Level = "fault" if number > _FAULT_SHARE * account["conversations"]["in"] else "warning"
        yield Finding(check, level, _describe_count(account, number, what, reason, remedy))


def _describe_count(account: dict[str, Any], number: int, what: str, reason: str, remedy: str) -> str:
    """Where, how many, what, the first places, what to do."""
    total = account["conversations"]["in"]
    places = ", ".join(account["first"].get(reason, [])[:3])
    first = f"; first {places}" if places else ""
    return f"{_source_name(account)}: {number:,} of {total:,} conversations ({number / total:.1%}): {what}{first}. {remedy}"


def _end_of_turn_finding(account: dict[str, Any]) -> Finding:
    part = account["eos_supervised"] or 0.0
    text = f"{_source_name(account)}: the end of turn is learned in {part:.1%} of the conversations"
    if part == 1:
        return Finding("end of turn", "ok", text)
    level: Level = "warning" if part >= 1 - _FAULT_SHARE else "fault"
    why = (
        "Those that were cut have no end: see truncation"
        if account["conversations"]["truncated"]
        else "The template does not end its turns, or with a token that is no end to the tokenizer: see template"
    )
    return Finding("end of turn", level, f"{text}; of the others the model learns not to stop. {why}")


def _source_name(account: dict[str, Any]) -> str:
    return f"{account['source']} ({account['use']})"


def _drop_reasons(account: dict[str, Any]) -> str:
    parts = [f"{number:,} {reason}" for reason, number in account["reasons"].items()]
    return f"; left out: {', '.join(parts)}" if parts else ""


def check_duplicates(data: RunData, accounts: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Exact copies within the data, and between training and validation."""
    for account in accounts:
        number = 0 if account["reasons"].get("duplicate") else account["duplicates"]  # or they were left out
        yield from _share_finding(
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


# Checks of the tokens: are they what was written, what transformers gives, and what the template should make?

_PROBE_CONVERSATION = Conversation(
    (Message("user", "How are you today?"), Message("assistant", "Very well, thank you.")), Origin("probe", 1)
)
_SAMPLED = 1000


def check_store(config: Config, data: RunData) -> Iterator[Finding]:
    """The ids trained on are those that transformers gives for the whole conversation, with the same mask."""
    held = config.data.validation
    yield from _check_one_store("training", data.train.store, config.data.sources, config, data)
    if data.validation is not None and held is not None and held.sources is not None:
        yield from _check_one_store("validation", data.validation, held.sources, config, data)


def _check_one_store(
    use: str, store: Store, sources: Sequence[Source], config: Config, data: RunData
) -> Iterator[Finding]:
    looked, damaged = find_corrupted(store)
    if damaged:
        text = (
            f"{use}: {len(damaged):,} of {looked:,} conversations are not as they were prepared, first "
            f"{', '.join(damaged[:3])}: somebody wrote into tokens.bin or loss.bin, or the disk is failing. Delete the "
            f"folder {store.folder}, and it will be made again"
        )
        yield Finding("store", "fault", text)
    else:
        yield Finding("store", "ok", f"{use}: {looked:,} conversations are on disk as they were prepared")
    found = compare_with_sources(store, sources, data.conversation_tokenizer.make_renderer(cached=False), config.data)
    remedy = (
        f"The data or the tokenizer's library changed since they were prepared. Delete the folder {store.folder}, and "
        "it will be made again; if that does not help, please report it"
    )
    for check, places, what in (
        ("ids", found.ids_differ, "have other ids than transformers gives for them"),
        ("mask", found.loss_differs, "have another loss mask when they are rendered again"),
    ):
        if places:
            text = f"{use}: {len(places):,} of {found.compared:,} conversations {what}, first {', '.join(places[:3])}."
            yield Finding(check, "fault", f"{text} {remedy}")
    if found.compared and not found.ids_differ and not found.loss_differs:
        text = f"{use}: {found.compared:,} conversations, rendered again, have the ids that transformers gives"
        yield Finding("ids", "ok", f"{text}, and the same mask")
    elif not found.compared and found.ready:
        yield Finding("ids", "ok", f"{use}: the data came as tokens; there is no text to compare them with")
    elif not found.compared:
        text = f"{use}: no conversation was found to be rendered again and compared. All are split, or the files moved"
        yield Finding("ids", "warning", text)


def check_template(
    conversation_tokenizer: ChatTokenizer | MarkedTextTokenizer, data: RunData | None
) -> Iterator[Finding]:
    """Traps of chat templates. Where the data could be prepared, what a template cannot do was not needed."""
    if not isinstance(conversation_tokenizer, ChatTokenizer):
        return
    if conversation_tokenizer.identity["today"]:
        text = f"it inserts the date: all conversations say {conversation_tokenizer.identity['today']}, and prompts will say another"
        yield Finding("template", "warning", text)
    if data is not None:
        yield from _double_bos_findings(data)
    rendering = conversation_tokenizer.make_renderer(cached=False)
    probe, end = rendering.render_items([_PROBE_CONVERSATION])[0], rendering.end_of_turn()
    remedy = "Use the template that belongs to the model, or mend it: data.template=FILE.jinja"
    if isinstance(probe, BadRecordError):
        text = f"a plain question and answer cannot be learned with it: {probe}. {remedy}"
        yield Finding("template", "fault" if data is None else "warning", text)
    elif end is None or not probe.supervises_end:
        ends = f" with {' or '.join(rendering.stop_markers)}" if rendering.stop_markers else ""
        yield Finding("template", "warning", f"it does not end an answer{ends}. {remedy}")
    else:
        token = conversation_tokenizer.tokenizer.convert_ids_to_tokens(end)
        yield Finding("template", "ok", f"an answer ends with {token}, which is learned")


def _double_bos_findings(data: RunData) -> Iterator[Finding]:
    store, tokenizer = data.train.store, data.tokenizer
    some = np.unique(np.linspace(0, len(store) - 1, _SAMPLED).astype(np.int64))
    twice = [i for i in some if (store.ids(i)[:2] == tokenizer.bos_token_id).sum() == 2]
    if twice and tokenizer.bos_token_id is not None:
        text = (
            f"{len(twice):,} of {len(some):,} conversations begin with {tokenizer.bos_token} twice, first "
            f"{store.origin(int(twice[0]))}: the template writes it, and so does the text or the template "
            "again. Remove one of the two"
        )
        yield Finding("template", "fault", text)


# Does packing change the recipe?

_FEW_STEPS = 50


def check_step_count(config: Config, data: RunData) -> Iterator[Finding]:
    """Packing makes steps fewer where a batch is counted in rows; a recipe made for unpacked ones then trains less."""
    plan = make_plan(config, data)
    batch = config.train.batch
    if batch.conversations is not None or config.data.packing == "none":
        yield Finding("steps", "ok", f"{len(plan):,} optimizer steps; packing does not change their number")
        return
    rows = batch.rows or (batch.tokens or 0) // config.row_length
    if config.train.steps is not None:
        each = len(plan.documents) / len(plan)
        text = f"{len(plan):,} optimizer steps, as train.steps says; packed, each has about {each:.0f} conversations"
        yield Finding("steps", "ok", f"{text} in {rows} rows")
        return
    unpacked = -(-len(plan.documents) // rows)
    text = f"{len(plan):,} optimizer steps; unpacked, with {rows} conversations a step, it would be {unpacked:,}"
    if len(plan) < _FEW_STEPS and unpacked >= 2 * len(plan):
        remedy = "Count batches in train.batch.conversations, make them smaller, or train longer"
        yield Finding("steps", "warning", f"{text}. Packing makes the steps few. {remedy}")
    else:
        yield Finding("steps", "ok", text)
