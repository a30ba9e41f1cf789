"""Columns of a question and its answer, and what else belongs to the question."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from whet.data.read.records.question_formats import (
    ALPACA_OPTIONAL,
    ANSWER_WORDS,
    CONTEXT_WORDS,
    MORE_THAN_A_PROMPT,
    PROMPT_COMPLETION_FIELDS,
    QUESTION_WORDS,
    find_addition,
    is_name,
    list_choices,
)
from whet.data.read.records.record_fields import EMPTY_VALUES, closest_key

_PROMPTS, _COMPLETIONS = PROMPT_COMPLETION_FIELDS["prompt"], PROMPT_COMPLETION_FIELDS["completion"]


def find_names(record: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The columns with the question and with the answer."""
    prompt = closest_key(_PROMPTS, record, QUESTION_WORDS.split(), cutoff=1.0)
    return prompt, closest_key(_COMPLETIONS, [key for key in record if key != prompt], ANSWER_WORDS.split(), cutoff=1.0)


def find_context(sample: Sequence[Any]) -> dict[str, str] | None:
    """Fields as in Alpaca of records with a question, an answer and what the question needs: a context or earlier
    turns; None if they have nothing of that."""
    for record in sample:
        if not isinstance(record, dict):
            continue
        prompt, completion = find_names(record)
        others = (key for key in record if key not in (prompt, completion))
        texts = [key for key in others if isinstance(record[key], str) and record[key]]
        context = closest_key(MORE_THAN_A_PROMPT, texts, CONTEXT_WORDS.split(), cutoff=1.0)
        is_alpaca = str(context).lower().startswith("instruction") and str(prompt).lower() == "input"
        if prompt and completion and context and not is_alpaca:
            return {"instruction": prompt, "input": context, "output": completion}
        if prompt and completion and record.get("history"):
            return {"instruction": prompt, "output": completion}
    return None


def name_alpaca_addition(sample: Sequence[Any], names: Mapping[str, str]) -> str | None:
    """What records with an instruction have beside it that belongs to the question and is not read."""
    read = {name for field, known in ALPACA_OPTIONAL.items() for name in (names.get(field), *known)}
    for record in (each for each in sample if isinstance(each, dict)):
        asked = [_join_lines(record[key]) for key in (names["instruction"], *read) if isinstance(record.get(key), str)]
        for key in (*_PROMPTS, *MORE_THAN_A_PROMPT):
            added = record.get(key)
            if key in (*names.values(), *read) or not isinstance(added, (str, list)) or added in EMPTY_VALUES:
                continue
            plain = _join_lines(added) if isinstance(added, str) else ""
            if isinstance(added, str) and (
                is_name(added) or any(plain in text or text in plain for text in asked if text)
            ):
                continue  # an id or a file, or the prompt that was made of the others
            whole = f"an instruction, an answer and {key!r}, which belongs to the question"
            alone = isinstance(added, str) and not any(record.get(name) for name in ALPACA_OPTIONAL["input"])
            fields = f"{{instruction: {names['instruction']}, input: {key}, output: {names['output']}}}"
            remedy = f"Set fields: {fields}" if alone else "Write it into the input"
            return f"{whole}. {remedy}; to train without it, set format: alpaca"
    return None


def name_choices_from_one(sample: Sequence[Any], names: Mapping[str, str]) -> str | None:
    """Answers that are numbers of choices counted from 1: read from 0, most would be the choice after theirs."""
    found: list[tuple[int, int]] = []
    for record in filter(lambda each: isinstance(each, dict), map(list_choices, sample)):
        answer, choices = record.get(names["answer"]), record.get(names["choices"])
        if isinstance(answer, int) and not isinstance(answer, bool) and isinstance(choices, list):
            found.append((answer, len(choices)))
    last = next((answer for answer, count in found if answer == count), None)
    if last is None or any(answer < 1 for answer, _ in found):
        return None
    key = json.dumps(names["answer"], ensure_ascii=False)
    return (
        f"{names['answer']!r} counts the choices from 1, as {last} of {last} shows; whet counts from 0. Write it so: "
        f"jq -c '(arrays[], objects) | .[{key}] -= 1' FILE > NEW.jsonl"
    )


def _join_lines(text: str) -> str:
    return " ".join(text.split())


def name_addition(sample: Sequence[Any], names: Mapping[str, str] | None = None) -> str | None:
    """What adds to the question of some records, and how to read it. `names`: the fields of the question and the answer
    if they are known."""
    for record in sample:
        if not isinstance(record, dict):
            continue
        prompt, completion = (names["prompt"], names["completion"]) if names else find_names(record)
        if not (prompt and completion) or (names and find_addition(record, (prompt, completion)) is None):
            continue
        fields = find_context([record])
        added = fields.get("input", "history") if fields else find_addition(record, (prompt, completion))
        if added is None:
            continue
        whole = f"a question, an answer and {added!r}, which belongs to the question"
        if fields is not None:
            named = ", ".join(f"{field}: {name}" for field, name in fields.items())
            form = "" if "input" in fields else "format: alpaca and "
            return f"{whole}. Set {form}fields: {{{named}}}, or let `whet init` write it"
        if names or isinstance(record[added], list):
            return (
                f"{whole}. Write it into the question; to train without it, set format: prompt-completion and fields: "
                f"{{prompt: {prompt}, completion: {completion}}}"
            )
    return None
