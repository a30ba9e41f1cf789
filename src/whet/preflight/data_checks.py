"""Checks of `whet check` on the data: ledger, duplicates, token ids and masks, the chat template, number of steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from whet.config import Config
from whet.core.errors import BadRecordError
from whet.data.config import Source
from whet.data.conversation import ParsedRecord
from whet.data.prepare.store import Store
from whet.data.prepare.tokenize import EXCHANGE_TOO_LONG
from whet.data.read.sources import SourceReader
from whet.data.render.chat_tokenizer import ChatTokenizer, MarkedTextTokenizer
from whet.data.render.layout_finder import NO_SUPERVISED_TOKENS
from whet.data.render.marked_text import MARKER_LOOK_ALIKE
from whet.data.render.renderer import (
    CONTEXT_DIFFERS,
    CONTROL_TOKENS_IN_TEXT,
    PREFILL_MISSING,
    PROMPT_DIFFERS,
    REASONING_DROPPED,
    TOOLS_DROPPED,
)
from whet.data.render.template_text import PROBE, PROBE_TOOL
from whet.preflight.conflicting_answers import describe_conflicts, find_conflicting_answers
from whet.preflight.near_copies import find_near_copies
from whet.preflight.store_comparison import StoreComparison, compare_with_sources, find_corrupted
from whet.run.data import RunData, describe_step, make_plan

Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    level: Level
    text: str
    modules: list[dict[str, Any]] | None = None
    """Of `adapter`: what it reaches, by class of module."""

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


# The ledger: what became of every conversation

_FAULT_SHARE = 0.05
"""A problem of more than this share of a source's conversations is a fault, of fewer a warning."""

_NOTE_FINDINGS: dict[str, tuple[Level, str, str]] = {
    CONTROL_TOKENS_IN_TEXT: (
        "fault",
        "the text contains a control token of the template, such as an end of turn, so the model sees false turns",
        "Reword it, or remove these conversations",
    ),
    MARKER_LOOK_ALIKE: (
        "fault",
        "the text contains something that looks like a marker",
        "Fix misspelt markers, reword the rest, or remove these conversations",
    ),
    REASONING_DROPPED: (
        "warning",
        "the template drops the reasoning of earlier turns, so it is not trained on",
        "To train on it, make each answer a conversation of its own",
    ),
    TOOLS_DROPPED: (
        "fault",
        "the record has tools, but the template does not render them, so the model never sees them",
        "Use a template with tools (data.template), or remove them",
    ),
    PREFILL_MISSING: (
        "warning",
        "the generation prompt ends with a reasoning tag such as <think> that the answer does not begin with, so "
        "chats do not use the prompt of training",
        "Add the reasoning, or use a template whose prompt has no such tag (data.template)",
    ),
    PROMPT_DIFFERS: (
        "warning",
        "the generation prompt has different whitespace before the answer than the conversation, or other tokens for "
        "it, so chats do not use the prompt of training",
        "Write the same whitespace in a copy of the template (data.template=COPY.jinja), remove it from the start of "
        "answers, and add the reasoning that the prompt opens",
    ),
    CONTEXT_DIFFERS: (
        "warning",
        "before the last message, the generation prompt has other text than the conversation, such as a system prompt "
        "or tools, so chats do not use the prompt of training",
        "Write the same in both in a copy of the template (data.template=COPY.jinja). If it differs before earlier "
        "answers only, learn the last one (data.train_on=last)",
    ),
    EXCHANGE_TOO_LONG: (
        "warning",
        "data.too_long=split dropped an exchange that is too long by itself",
        "Raise data.max_length to keep it",
    ),
}
"""Notes of the ledger about kept conversations: level, meaning, remedy."""


def check_ledger(config: Config, accounts: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Conversations that were dropped, truncated, without supervised tokens, or without an end of turn."""
    for account in accounts:
        counts, name = account["conversations"], _source_name(account)
        kept = f"{name}: {counts['kept']:,} of {counts['in']:,} conversations kept{_drop_reasons(account)}"
        if counts["kept"] == 0:
            yield Finding("kept", "fault", f"{kept}. Fix the source, or remove it from data.sources")
            continue
        yield Finding("kept", "ok", kept)
        yield from _dropped_findings(account, config.data.max_length)
        yield _end_of_turn_finding(account)
        for note, number in account["notes"].items():
            level, meaning, remedy = _NOTE_FINDINGS.get(
                note, ("warning", "see the ledger", "Look at these conversations")
            )
            yield Finding(note, level, _describe_count(account, number, meaning, note, remedy))


def _dropped_findings(account: dict[str, Any], limit: int) -> Iterator[Finding]:
    reasons = dict(account["reasons"])
    for reason in ("duplicate", "filter"):  # dropped because the configuration says so
        reasons.pop(reason, None)
    too_long, empty, cut = (
        reasons.pop("too long", 0), reasons.pop(NO_SUPERVISED_TOKENS, 0), account["conversations"]["truncated"],
    )  # fmt: skip
    long = f"longer than data.max_length = {limit:,}"
    yield from _share_finding(
        "too long", account, too_long, f"{long} and dropped", "too long",
        "Raise it, or set data.too_long=split or truncate",
    )  # fmt: skip
    yield from _share_finding(
        "nothing to learn", account, empty, "dropped because they have no supervised token", NO_SUPERVISED_TOKENS,
        "Their answers are truncated by data.max_length, or have weight: 0 or train: false. Raise it, or remove these "
        "marks",
    )  # fmt: skip
    yield from _share_finding(
        "truncation", account, cut, f"{long} and truncated, so that the last answer has no end", "truncated",
        "Raise it, or set data.too_long=split or drop",
    )  # fmt: skip
    yield from _bad_line_findings(account, reasons)


def _bad_line_findings(account: dict[str, Any], reasons: dict[str, int]) -> Iterator[Finding]:
    """One fault and one warning at most: each reason is judged by itself, and those of a level are one finding."""
    total = account["conversations"]["in"]
    levels: dict[Level, dict[str, int]] = {"fault": {}, "warning": {}}
    for reason, number in reasons.items():
        levels["fault" if number > _FAULT_SHARE * total else "warning"][reason] = number
    for level, some in levels.items():
        if some:
            number = sum(some.values())
            shown = 3 if len(some) == 1 else 1
            first = ", ".join(f"{', '.join(account['first'][reason][:shown])} ({reason})" for reason in some)
            share = f"{number:,} of {total:,} conversations ({number / total:.1%})"
            remedy = "Fix them" if level == "fault" else "Fix them if you need them; training goes on without"
            which = "the first of each kind:" if len(some) > 1 else "first"
            text = f"{_source_name(account)}: {share} invalid and dropped; {which} {first}. {remedy}"
            yield Finding("bad lines", level, text)


def _share_finding(
    check: str, account: dict[str, Any], number: int, what: str, reason: str, remedy: str
) -> Iterator[Finding]:  # fmt: skip
    """Nothing for 0; a warning up to the fault share, a fault above."""
    if number:
        level: Level = "fault" if number > _FAULT_SHARE * account["conversations"]["in"] else "warning"
        yield Finding(check, level, _describe_count(account, number, what, reason, remedy))


def _describe_count(account: dict[str, Any], number: int, what: str, reason: str, remedy: str) -> str:
    """Source, number and share, what is wrong, the first places, remedy."""
    total = account["conversations"]["in"]
    places = ", ".join(account["first"].get(reason, [])[:3])
    first = f"; first {places}" if places else ""
    share = f"{number:,} of {total:,} conversations ({number / total:.1%})"
    return f"{_source_name(account)}: {share}: {what}{first}. {remedy}"


def _end_of_turn_finding(account: dict[str, Any]) -> Finding:
    part = account["eos_supervised"] or 0.0
    text = f"{_source_name(account)}: the end of turn is supervised in {part:.1%} of the conversations"
    if part == 1:
        return Finding("end of turn", "ok", text)
    level: Level = "warning" if part >= 1 - _FAULT_SHARE else "fault"
    why = (
        "Truncated conversations have no end: see truncation"
        if account["conversations"]["truncated"]
        else "The template does not end its turns, or not with an end-of-turn token of the tokenizer: see template"
    )
    return Finding("end of turn", level, f"{text}; from the others the model learns not to stop. {why}")


def _source_name(account: dict[str, Any]) -> str:
    return f"{account['source']} ({account['use']})"


def _drop_reasons(account: dict[str, Any]) -> str:
    parts = [f"{number:,} {reason}" for reason, number in account["reasons"].items()]
    return f"; dropped: {', '.join(parts)}" if parts else ""


def check_duplicates(data: RunData, accounts: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Exact duplicates within the data, and between training and validation."""
    for account in accounts:
        number = 0 if account["reasons"].get("duplicate") else account["duplicates"]  # or they were dropped
        yield from _share_finding(
            "duplicates", account, number, "exact duplicates of earlier ones", "duplicate",
            "Drop them with data.deduplicate=true",
        )  # fmt: skip
    if data.validation is None:
        return
    copies = data.overlap()
    if copies:
        text = (
            f"{len(copies):,} of {len(data.validation_documents):,} validation conversations are in the training data "
            f"too, first {', '.join(copies[:3])}. Remove them from one of the two, or use data.validation.fraction"
        )
        yield Finding("overlap", "fault", text)
    else:
        yield Finding("overlap", "ok", "no validation conversation is in the training data")


_MAX_COMPARED = 100_000
"""Conversations of a source that are compared with others."""


def check_answers(config: Config, data: RunData) -> Iterator[Finding]:
    """Nearly the same question with different answers."""
    groups = find_conflicting_answers(_parse_first(config.data.sources))
    if groups:
        yield Finding("answers", "warning", describe_conflicts(groups, len(data.train.store)))


def check_near_copies(config: Config, data: RunData) -> Iterator[Finding]:
    """Validation conversations that differ from training ones in what validation does not measure."""
    if data.validation is None or config.data.validation is None:
        return
    places = {data.validation.origin(int(number)) for number in data.validation_documents}
    sources, held = config.data.sources, config.data.validation.sources
    items = ((each, held is None and each.origin in places) for each in _parse_first(sources))
    held_items = ((each, each.origin in places) for each in _parse_first(held or ()))
    exact = {*data.overlap()}
    found = [pair for pair in find_near_copies(itertools.chain(items, held_items)) if str(pair[0]) not in exact]
    if found:
        text = (
            f"{len(found):,} of {len(data.validation_documents):,} validation conversations are in the training data "
            f"but for whitespace, the system message or weights, such as {' and '.join(map(str, found[0]))}. Remove "
            "them from one of the two, so that validation does not measure memorization"
        )
        yield Finding("near copies", "warning", text)


def _parse_first(sources: Sequence[Source]) -> Iterator[ParsedRecord]:
    """The first records of each source."""
    for source in sources:
        reader = SourceReader(source)
        yield from map(reader.parse, itertools.islice(reader.records(), _MAX_COMPARED))


# The store and the template

_SAMPLED = 1000


def check_store(config: Config, data: RunData) -> Iterator[Finding]:
    """The stored ids are those of `apply_chat_template` for the whole conversation, with the same loss mask."""
    held = config.data.validation
    yield from _check_one_store("training", data.train.store, config.data.sources, config, data)
    if data.validation is not None and held is not None and held.sources is not None:
        yield from _check_one_store("validation", data.validation, held.sources, config, data)


def _check_one_store(
    use: str, store: Store, sources: Sequence[Source], config: Config, data: RunData
) -> Iterator[Finding]:
    total, corrupted = find_corrupted(store)
    if corrupted:
        text = (
            f"{use}: {len(corrupted):,} of {total:,} conversations do not match their hashes, first "
            f"{', '.join(corrupted[:3])}: tokens.bin or loss.bin was modified, or the disk is failing. Delete the "
            f"folder {store.folder} to prepare it again"
        )
        yield Finding("store", "fault", text)
    else:
        yield Finding("store", "ok", f"{use}: {total:,} conversations match their hashes")
    found = compare_with_sources(store, sources, data.conversation_tokenizer.make_renderer(cached=False), config.data)
    for text in found.blank:
        yield Finding("empty lines", "ok", text)
    remedy = (
        f"The data or the tokenizer library has changed since it was prepared. Delete the folder {store.folder} to "
        "prepare it again; if that does not help, please report it"
    )
    for check, places, what in (
        ("ids", found.ids_differ, "have ids that differ from those of transformers"),
        ("mask", found.mask_differs, "have a different loss mask when rendered again"),
    ):
        if places:
            text = f"{use}: {len(places):,} of {found.compared:,} conversations {what}, first {', '.join(places[:3])}."
            yield Finding(check, "fault", f"{text} {remedy}")
    if found.compared and not found.ids_differ and not found.mask_differs:
        text = f"{use}: {found.compared:,} conversations, rendered again, have the ids that transformers gives"
        yield Finding("ids", "ok", f"{text}, and the same mask")
    elif not found.compared and found.pretokenized:
        yield Finding("ids", "ok", f"{use}: the data are token ids; there is no text to compare with")
    elif not found.compared:
        text = f"{use}: no conversation could be rendered again for comparison: all are split, or the files have moved"
        yield Finding("ids", "warning", text)
    yield from _straddling_findings(use, found)


_OTHER_ENGINES = (
    "whet supervises the token that holds the start of the answer and ends its own prompts before it. Other engines "
    "(vLLM, transformers with apply_chat_template, lm-eval) encode the prompt by itself, so there the model continues "
    "tokens that it was not trained on. Let the template write the whitespace before the answer, not at the end of the "
    "generation prompt: data.template=FILE.jinja"
)
_NO_PROMPT = (
    "The token is supervised if it holds text of the answer, but no prompt ends before it, so the model cannot begin "
    "an answer like this one. End the generation prompt with a special token or a line break "
    "(data.template=FILE.jinja), "
    "and remove whitespace from the start of answers"
)


def _straddling_findings(use: str, found: StoreComparison) -> Iterator[Finding]:
    for is_in_prompts, meaning in ((True, _OTHER_ENGINES), (False, _NO_PROMPT)):
        places = [(origin, tokens) for origin, tokens in found.straddling if tokens.is_in_prompts == is_in_prompts]
        if not places:
            continue
        origin, tokens = places[0]
        alone, with_answer = (" + ".join(map(repr, texts)) for texts in (tokens.alone, tokens.with_answer))
        text = (
            f"{use}: {len(places):,} of {found.answers:,} answers share a token with their prompt, first {origin}: the "
            f"end of the prompt {tokens.prompt!r} is encoded as {alone} by itself and as {with_answer} with the answer"
        )
        yield Finding("straddling tokens", "warning", f"{text}. {meaning}")


def check_template(
    conversation_tokenizer: ChatTokenizer | MarkedTextTokenizer, data: RunData | None
) -> Iterator[Finding]:
    """Traps of chat templates. If the data could be prepared, a conversation that the template cannot render is only a
    warning."""
    if not isinstance(conversation_tokenizer, ChatTokenizer):
        return
    if conversation_tokenizer.identity["today"]:
        today = conversation_tokenizer.identity["today"]
        text = f"it inserts the date: all conversations have {today}, and later prompts will have a different date"
        yield Finding("template", "warning", text)
    if data is not None:
        yield from _double_bos_findings(data)
    rendering = conversation_tokenizer.make_renderer(cached=False)
    if not rendering.text.exists:
        text = "the tokenizer has none: plain text needs none, conversations do (data.template=chatml)"
        yield Finding("template", "fault" if data is None else "ok", text)
        return
    probe, end = rendering.render_items([PROBE])[0], rendering.end_of_turn()
    remedy = "Use the model's own template, or fix it: data.template=FILE.jinja"
    if isinstance(probe, BadRecordError) and end is not None:
        yield Finding("template", "warning", f"it requires tools, in chat and eval too; without any, {probe}")
        probe = rendering.render_items([replace(PROBE, tools=(PROBE_TOOL,))])[0]
    if header := rendering.layouts.supervised_header():
        text = (
            f"it has no generation prompt, so the model learns to write {header!r}, and its answers begin with that. "
            f"Append {{%- if add_generation_prompt %}}{{{{ {header!r} }}}}{{% endif %}} to a copy of the template, and "
            "use that: data.template=COPY.jinja"
        )
        yield Finding("template", "warning", text)
    if isinstance(probe, BadRecordError):
        text = f"it cannot render a plain question and answer for training: {probe}"
        text += "" if "data.template" in str(probe) else f". {remedy}"
        yield Finding("template", "fault" if data is None else "warning", text)
    elif end is None or not probe.supervises_end:
        ends = f" with {' or '.join(rendering.stop_markers)}" if rendering.stop_markers else ""
        yield Finding("template", "warning", f"it does not end an answer{ends}. {remedy}")
    else:
        token = conversation_tokenizer.tokenizer.convert_ids_to_tokens(end)
        yield Finding("template", "ok", f"an answer ends with {token}, which is supervised")
    if default := rendering.default_system().strip():
        text = f"where a conversation has no system message, the template writes {default[:200]!r}"
        yield Finding("system", "ok", f"{text}. To change it: data.system")


def _double_bos_findings(data: RunData) -> Iterator[Finding]:
    store, tokenizer = data.train.store, data.tokenizer
    some = np.unique(np.linspace(0, len(store) - 1, _SAMPLED).astype(np.int64))
    twice = [i for i in some if (store.ids(i)[:2] == tokenizer.bos_token_id).sum() == 2]
    if twice and tokenizer.bos_token_id is not None:
        text = (
            f"{len(twice):,} of {len(some):,} conversations begin with {tokenizer.bos_token} twice, first "
            f"{store.origin(int(twice[0]))}: the template writes it twice, or the text contains it too. Remove one of "
            "the two"
        )
        yield Finding("template", "fault", text)


_FEW_STEPS = 50


def check_step_count(config: Config, data: RunData) -> Iterator[Finding]:
    """With batches counted in rows or tokens, packing reduces the number of steps: a recipe tuned without trains
    less."""
    plan = make_plan(config, data)
    steps = f"{len(plan):,} optimizer steps, each of {describe_step(config, plan)}"
    batch = config.train.batch
    if batch.conversations is not None or config.data.packing == "none":
        yield Finding("steps", "ok", steps)
        return
    rows = config.rows_per_step or 1
    if config.train.steps is not None:
        each = len(plan.documents) / len(plan)
        yield Finding("steps", "ok", f"{steps} (train.steps), in about {each:.0f} conversations")
        return
    unpacked = -(-len(plan.documents) // rows)
    text = f"{steps}; unpacked, with {rows} conversations a step, it would be {unpacked:,}"
    if len(plan) < _FEW_STEPS and unpacked >= 2 * len(plan):
        remedy = "Count batches in train.batch.conversations, make them smaller, or train longer"
        yield Finding("steps", "warning", f"{text}. Packing leaves few steps. {remedy}")
    else:
        yield Finding("steps", "ok", text)
