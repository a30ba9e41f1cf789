"""Shapes of a source's records that no format reads: each is named from a sample, with a remedy."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from whet.core.errors import BadRecordError
from whet.data.conversation import Conversation, Origin
from whet.data.read.records.formats import FORMATS, begins_chat, is_list_of_records, is_record
from whet.data.read.records.messages import MESSAGES_EXAMPLE, TEXT_KEYS, is_turn_list
from whet.data.read.records.nested_records import (
    TURN_LISTS,
    append_answer,
    last_speaker,
    name_messages_inside,
    name_split_record,
    name_turns_with_text,
    unwrap,
)
from whet.data.read.records.question_formats import ANSWER_WORDS, CHOICE_COLUMN, lettered_choices
from whet.data.read.records.question_shapes import find_context, find_names, name_addition
from whet.data.read.records.record_fields import closest_key, decode_list
from whet.data.read.records.sharegpt import SHAREGPT_CALLS, SHAREGPT_ROLES

Record = Mapping[str, Any]

_REJECTED_WORDS, _CHOSEN_WORDS = {"rejected", "dispreferred"}, ("chosen", "preferred", "accepted")
_NOT_PREFERRED = re.compile(r"(?:non|not|un)[_\W]?preferred")
SPEAKER_NAME = re.compile(r"role|from|speaker|author|sender|character|user_?name|name", re.IGNORECASE)
_ROLE_KEYS = ("role", "from", "speaker", "author", "sender")
_SPEAKERS = {"user", "human", "prompter", "assistant", "gpt", "bot", "system", "tool", "chatgpt", "model"}
_CONVERSATION_KEY = re.compile(r"(?:conversation|conv|dialog(?:ue)?|chat|thread|session|ticket)_?id", re.IGNORECASE)
LABELS = ("label", "labels", "summary", "code", "sentiment", "intent", "emotion")
_VERDICTS = ("accept", "reject", "ignore")
_BETTER = re.compile(
    r"(?:correct(?:ed)?|edited|revised|improved|rewritten|ideal|gold(?:en)?|ground_?truth|expected|reference)"
    r"_(?:answer|response|completion|output|solution|reply|text)|correction|expected|gold|ground_?truth"
)
_REPLY_KEY = re.compile(r"(?:in_)?(?:reply|response)_to(?:_\w+)?", re.IGNORECASE)
ID_NAME = re.compile(r"(?:.*[_ ])?(?:id|uuid|idx|index|nr|key|url)\.?", re.IGNORECASE)
_ANSWER_LISTS = ("completions", "responses", "answers", "generations", "outputs", "candidates", "replies")
_PAIR = re.compile(
    r"(response|answer|completion|output|generation|conversation|chat|summary|human_ref)[_ ]?([012abjk])", re.I
)
_PROMPTS, _COMPLETIONS = (FORMATS["prompt-completion"].required[field] for field in ("prompt", "completion"))


def name_preference(sample: Sequence[Any]) -> str | None:
    """What preference data (chosen and rejected answers) are, and how to train on the chosen ones."""
    records = [record for record in sample if isinstance(record, dict)]
    rejected = next((key for record in records for key in _find_answers(record, _REJECTED_WORDS)), None)
    if rejected is None:
        return None
    found = [key for word in _CHOSEN_WORDS for record in records for key in _find_answers(record, {word})]
    others = (key for key in (*_COMPLETIONS, *FORMATS["messages"].required["messages"]) if key in records[0])
    chosen = next(iter(found), None) or next(others, "CHOSEN")
    return _describe_preference(records, chosen, rejected)


def _find_answers(record: Record, words: set[str]) -> list[str]:
    """The keys made of one of these words whose values are answers, the plain word first, then the longest answer."""
    keys = [
        key
        for key, value in record.items()
        if isinstance(value, (str, list, dict))
        and value
        and not words.isdisjoint(re.split(r"[_\W]+", _NOT_PREFERRED.sub("dispreferred", str(key).lower())))
    ]
    return sorted(keys, key=lambda key: (key not in words, -len(str(record[key]))))


def name_competing_answers(sample: Sequence[Any]) -> str | None:
    """Two fields that may each be the answer, of which only one has a known name: a verdict of Prodigy, or an answer
    beside its correction."""
    records = [record for record in sample if isinstance(record, dict)]
    for record in records:
        if record.get("answer") in _VERDICTS and not {"_input_hash", "_task_hash"}.isdisjoint(record):
            return (
                "annotations of Prodigy, whose 'answer' is a verdict. Set where: answer == 'accept' and format: "
                "prompt-completion with fields: {prompt: NAME, completion: NAME}"
            )
        prompt, answer = find_names(record)
        if prompt is None or answer is None:
            continue
        for key, value in record.items():
            is_better = key not in (prompt, answer) and _BETTER.fullmatch(re.sub(r"[\W_]+", "_", str(key).lower()))
            if is_better and isinstance(value, str) and value.strip() and value != record[answer]:
                remedies = (f"to train on {each!r}, {_suggest_answer(records, each)}" for each in (answer, key))
                return f"{answer!r} and {key!r} may each be the answer: {'; '.join(remedies)}"
    return None


def name_unanswered(sample: Sequence[Any], turns: str) -> str | None:
    """Messages that all end with a question, whose answers are beside them: two to compare, or one."""
    records = [record for record in sample if isinstance(record, dict) and isinstance(record.get(turns), list)]
    if not records or any(last_speaker(record[turns]) not in ("user", "human") for record in records):
        return None
    if preference := name_preference(records):
        return preference
    answer = next((key for key in _COMPLETIONS if all(record.get(key) for record in records)), None)
    fields = {"prompt": turns, "completion": str(answer)}
    if answer is None or not all(_is_question_and_answer(record, "prompt-completion", fields) for record in records):
        command = append_answer(records[0], turns)
        return command and f"{turns!r} ends with a question, and its answer is elsewhere. Append it: {command}"
    return (
        f"{turns!r} ends with a question, and {answer!r} is its answer. Set format: prompt-completion and "
        f"fields: {{prompt: {turns}, completion: {answer}}}"
    )


def name_shape(sample: Sequence[Any], recognised: bool) -> str | None:
    """The name of a known shape that no format reads, with a remedy; only what `text` would misread if `recognised`."""
    if sample and all(isinstance(record, list) and record for record in sample):
        return _name_lists(sample)
    records = [record for record in sample if isinstance(record, dict)]
    for record in records:
        beside = name_turns_with_text(record) if isinstance(record.get("text"), str) else None
        if name := (_name_single_message(record) or beside or _name_text_and_answer(record)) or (
            None if recognised else _name_structure(record, records) or _name_columns(record, records)
        ):
            return name
    return None


def _name_lists(sample: Sequence[Any]) -> str | None:
    """Records that are lists: of records, or of a question and its answer."""
    if all(isinstance(each, dict) and is_record(each) for record in sample for each in record):
        return "lists of records. Write each record on a line: jq -c 'flatten[]' FILE > NEW.jsonl"
    if all(len(record) == 2 and all(isinstance(text, str) for text in record) for record in sample):
        each = 'if .[0] | type == "array" then .[] else . end'
        return (
            "pairs of texts. Name the question and the answer: "
            f"jq -c '{each} | {{prompt: .[0], completion: .[1]}}' FILE > NEW.jsonl"
        )
    return None


def name_json_text(record: Any, name: str) -> str | None:
    """A document that is a record itself, written twice as JSON."""
    text = record.get(name) if isinstance(record, dict) else record
    if not isinstance(text, str) or text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        inner = json.loads(text)
    except ValueError:
        return None
    if not any(form.recognise(inner, {}) for key, form in FORMATS.items() if key != "marked"):
        return None
    command = unwrap(name) if isinstance(record, dict) else "jq -c '(arrays[], strings)' FILE > NEW.jsonl"
    command = command.replace("' FILE", " | fromjson' FILE")
    return f"the texts are records of JSON, written as strings. Unwrap them: {command}"


def is_known_shape(sample: Sequence[Any]) -> bool:
    """Whether the records are of a shape that is no question and answer, whatever the names of its fields."""
    records = [record for record in sample if isinstance(record, dict)]
    named = (_name_single_message(record) or _name_structure(record, records) for record in records)
    return name_preference(records) is not None or name_competing_answers(records) is not None or any(named)


def _name_single_message(record: Record) -> str | None:
    is_part = record.get("type") == "message" or any(
        _CONVERSATION_KEY.fullmatch(str(key)) or _REPLY_KEY.fullmatch(str(key)) for key in record
    )
    is_part = is_part and find_names(record)[1] is None
    speakers = {key: record.get(key) for key in (*_ROLE_KEYS, *(("user", "username", "author_id") if is_part else ()))}
    role = next((key for key, who in speakers.items() if (who and is_part) or str(who).lower() in _SPEAKERS), None)
    text = next((key for key in TEXT_KEYS if isinstance(record.get(key), (str, list))), None)
    if role is None or text is None:
        return None
    tree = " of a tree of replies, as in OASST" if "parent_id" in record else ""
    documents = "; to train on every word of each, set format: text" if text == "text" else ""
    return (
        f"each record is one message ({role!r} and {text!r}){tree}. whet reads a conversation per record: join its "
        'messages, in order, as {"messages": [{"role": "user", "content": "…"}, …]} (docs/data.md has scripts)'
        f"{documents}"
    )


def _name_text_and_answer(record: Record) -> str | None:
    """Texts with a label, a summary or an answer: `text` would train on their words and drop it."""
    labels = next((key for key in LABELS if isinstance(record.get(key), list) and record[key]), None)
    if labels is not None and isinstance(record.get("text"), str):
        return (
            f"texts with a list ({labels!r}). To train on it as the answer, write it as text: "
            '{"prompt": "…", "completion": "…"}; to train on every word of the texts, set format: text'
        )
    others = [key for key, value in record.items() if key != "text" and isinstance(value, (str, int)) and value != ""]
    no_flags = [key for key in others if not isinstance(record[key], bool)]  # `bot` may be one
    answer = closest_key((*LABELS, *_COMPLETIONS), others, cutoff=1.0)
    answer = answer or closest_key((), no_flags, ANSWER_WORDS.split())
    if answer is None or not isinstance(record.get("text"), str):
        return None
    words = "" if isinstance(record[answer], str) else ", with words in place of its numbers"
    return (
        f"texts with {answer!r}. To train on {answer!r} as the answer{words}, set format: prompt-completion and "
        f"fields: {{prompt: text, completion: {answer}}}; to train on every word of the texts, set format: text"
    )


def _name_structure(record: Record, records: Sequence[Record]) -> str | None:
    """What the record is, if its structure shows that no format reads it; the first that fits, in this order."""
    keys = record.keys()
    if shape := _name_export(record):
        return f"{shape}. docs/data.md has a line that writes them as messages"
    if calls := next((key for key in _ANSWER_LISTS if _holds_calls(record.get(key))), None):
        return f"calls of tools as text ({calls!r}), as in xLAM. docs/data.md has a line that writes them as messages"
    pairs = [found for key in keys if (found := _PAIR.fullmatch(str(key)))]
    if len(pairs) > 1 and pairs[0][1] == pairs[1][1]:
        return _describe_preference(records, pairs[0][0], pairs[1][0])
    if nested := name_messages_inside(record):
        return nested
    if inside := _name_values(record):
        return inside
    if "input_ids" in keys:
        return (
            "tokenized records ('input_ids'). whet tokenizes by itself: give the text, or a .bin file (format: tokens)"
        )
    choices = lettered_choices(record) if None not in find_names(record) else []
    if choices := choices or [str(key) for key in keys if CHOICE_COLUMN.fullmatch(str(key))]:
        return (
            f"multiple choice with a column per choice ({', '.join(choices[:6])}). Name the columns question, A, B, C, "
            '… and answer, or write a list: {"question": "…", "choices": ["…", "…"], "answer": 1}'
        )
    if split := name_split_record(record):
        return split
    if several := next((key for key in _ANSWER_LISTS if isinstance(record.get(key), (list, dict))), None):
        return (
            f"several answers to a question ({several!r}). Write a record for each answer that is to be learned: "
            '{"prompt": "…", "completion": "…"}'
        )
    return None


def _name_values(record: Record) -> str | None:
    """A form of conversations that a value of the record has: segments, trees, turns or records of its own."""
    for key, value in record.items():
        if isinstance(value, list) and value and all(_is_segment(each) for each in value):
            return (
                f"texts with a mask of their own ({key!r}), as in Axolotl's input_output. whet makes the mask from the "
                f"chat template: write {MESSAGES_EXAMPLE}, with weight: 0 for answers that are not to be learned"
            )
        if isinstance(value, dict) and "replies" in value:
            return (
                f"a tree of replies inside {key!r}, as in OASST. whet reads a conversation per record: write each path "
                'from the root to a leaf as {"messages": […]}'
            )
    if (fields := find_turns(record)) is not None:
        named = ", ".join(f"{field}: {name}" for field, name in fields.items())
        return f"messages with other names. Set format: sharegpt and fields: {{{named}}}, or let `whet init` write it"
    for key, value in record.items():
        if isinstance(value, dict) and (inside := find_records_inside(value)):
            place = f"{key}.{inside}"
            return f"the records are inside {place}. Write each on a line: jq -c '.{place}[]' FILE > NEW.jsonl"
    if inside := find_records_inside(record):
        shared = any(isinstance(value, str) and " " in value.strip() for value in record.values())
        each = f"del(.{inside}) + .{inside}[]" if shared else f".{inside}[]"
        return (
            f"the records are inside {inside!r}, several to a line. Write each into one: "
            f"jq -c '{each}' FILE > NEW.jsonl"
        )
    for key in TURN_LISTS:
        turns = record.get(key)
        if isinstance(turns, list) and turns and isinstance(turns[0], (str, dict)):
            shape = "texts without speakers" if isinstance(turns[0], str) else f"objects with {', '.join(turns[0])}"
            names = (
                "" if isinstance(turns[0], str) else f", or set fields: {{messages: {key}, role: NAME, content: NAME}}"
            )
            return f"{key!r} is a list of {shape[:80]}, not of messages. Write it as {MESSAGES_EXAMPLE}{names}"
    return None


def _holds_calls(value: Any) -> bool:
    """Whether this is the JSON of a list of tool calls."""
    if not isinstance(value, str) or '"arguments"' not in value:
        return False
    try:
        calls = decode_list(value, "")
    except BadRecordError:
        return False
    return isinstance(calls, list) and all(isinstance(call, dict) and "name" in call for call in calls)


def _is_segment(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("label"), bool) and isinstance(value.get("text"), str)


def _has_texts(value: Record) -> bool:
    """Whether it may be a question and an answer, or the languages of a translation."""
    return len(value) > 1 and all(isinstance(text, str) and text for text in value.values())


def find_turns(record: Record) -> dict[str, str] | None:
    """Fields as in sharegpt of a record with a list of messages under other names."""
    for key, turns in record.items():
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            continue
        for role, text in itertools.product((*_ROLE_KEYS, "type"), TEXT_KEYS):  # "type" in LangChain's
            if (role, text) in (("role", "content"), ("from", "value")):
                continue
            if turns and all(
                str(turn.get(role)) in SHAREGPT_ROLES and isinstance(turn.get(text), str) for turn in turns
            ):
                return {"conversations": key, "from": role, "value": text}
    return None


def _name_columns(record: Record, records: Sequence[Record]) -> str | None:
    only = sum(1 for key in record if not ID_NAME.fullmatch(str(key))) == 1
    inside = [
        key
        for key, value in record.items()
        if isinstance(value, dict)
        and (is_record(value) or (only and (_has_texts(value) or FORMATS["text"].recognise(value, {}))))
    ]
    if len(inside) > 1:
        keys = ", ".join(map(repr, inside[:2]))
        return f"the records are inside {keys}, …. Write each on a line: jq -c '.[]' FILE > NEW.jsonl"
    if inside:
        return f"the record is inside {inside[0]!r}. Write what is inside as the record: {unwrap(inside[0])}"
    if (addition := name_addition(records)) is not None:
        return addition
    if chat := next((key for key, value in record.items() if begins_chat(value)), None):
        if FORMATS["transcript"].recognise(record, {"text": chat}):
            return f"{chat!r} holds whole chats. Set format: transcript and fields: {{text: {chat}}}"
        return f"{chat!r} holds whole chats as text. Write them as messages: {MESSAGES_EXAMPLE}"
    prompt, completion = find_names(record)
    if prompt and completion and isinstance(record[prompt], dict):
        keys = ", ".join(map(repr, record[prompt]))[:80]
        return f"{prompt!r} is an object with {keys}, neither text nor messages. Write its text in its place"
    if prompt and not completion:
        return f"a question ({prompt!r}) without a known answer. Set fields: {{prompt: {prompt}, completion: NAME}}"
    return None


def _name_export(record: Record) -> str | None:
    mapping, contents = record.get("mapping"), record.get("contents")
    if isinstance(mapping, dict) and any(isinstance(node, dict) and "children" in node for node in mapping.values()):
        return "chats as ChatGPT exports them, with every version of an answer ('mapping')"
    if is_turn_list(record.get("paragraphs"), "qas"):
        return "questions inside paragraphs, as in SQuAD"
    turns = record["messages"] if isinstance(record.get("messages"), list) else []
    if any(isinstance(each, dict) and _is_langchain(each) for each in (record, *turns)):
        return "messages of LangChain"
    if is_turn_list(contents, "parts"):
        return "chats in the form of Google's Gemini ('contents' with 'parts')"
    return None


def _is_langchain(message: Record) -> bool:
    """What messages_to_dict and dumps write."""
    inner = message.get("data", message.get("kwargs"))
    return ("lc" in message or message.keys() == {"type", "data"}) and isinstance(inner, dict) and "content" in inner


def name_people(sample: Sequence[Any], turns: str, speaker: str) -> str | None:
    """Chats between people, as messengers export them, in which nobody has a role."""
    found: dict[str, None] = {}
    for record in sample:
        for turn in record[turns] if isinstance(record, dict) and isinstance(record.get(turns), list) else ():
            if isinstance(turn, dict) and isinstance(turn.get(speaker), str):
                found[turn[speaker]] = None
    if not found or any(name.strip().lower() in (*SHAREGPT_ROLES, *SHAREGPT_CALLS, *_SPEAKERS) for name in found):
        return None
    names = ", ".join(map(repr, list(found)[:4]))
    return (
        f"the speakers are {names}, not roles such as human and gpt. Write gpt for the one that the model should speak "
        "for, and human for the others"
    )


def find_records_inside(record: Record) -> str | None:
    """The key of a list of records in an object that is none itself, nor a message."""
    for key, value in record.items() if "role" not in record else ():
        if key in (*FORMATS["messages"].required["messages"], *_ANSWER_LISTS) or not is_list_of_records(value):
            continue
        if find_turns({key: value}):
            continue
        if any(form.recognise(value[0], {}) for form in FORMATS.values()):
            return key
    return None


def _describe_preference(records: Sequence[Record], one: str, other: str) -> str:
    return (
        f"preference data ({one!r} and {other!r}). whet trains on answers, not on comparisons; to train on {one!r}, "
        f"{_suggest_answer(records, one)}"
    )


def _suggest_answer(records: Sequence[Record], answer: str) -> str:
    """What to do so that every sampled record with `answer` is a question and that answer."""
    records = [record for record in records if record.get(answer)]
    texts = [{**record, "completion": ""} for record in records if isinstance(record[answer], str)]
    if (context := find_context(texts)) is not None:
        named = ", ".join(f"{field}: {name}" for field, name in {**context, "output": answer}.items())
        return f"set format: alpaca and fields: {{{named}}}"
    for form, fields in _candidates(records[0], answer) if records else ():
        if all(_is_question_and_answer(record, form, fields) for record in records):
            named = ", ".join(f"{field}: {name}" for field, name in fields.items())
            return f"set format: {form} and fields: {{{named}}}"
    for key, value in records[0].items() if records else ():
        if isinstance(value, dict) and is_turn_list(value.get("messages"), "role"):
            both = f"{{messages: (.{key}.messages + .{answer}), tools: .{key}.tools}}"
            return f"write it behind its question: jq -c '(arrays[], objects) | {both}' FILE > NEW.jsonl"
    return f"set fields: {{prompt: NAME, completion: {answer}}}"


def _candidates(record: Record, answer: str) -> Iterator[tuple[str, dict[str, str]]]:
    yield "messages", {"messages": answer}
    yield "sharegpt", {"conversations": answer}
    yield "transcript", {"text": answer}
    if "instruction" in record:
        yield "alpaca", {"instruction": "instruction", "output": answer}
    for prompt in (*_PROMPTS, *TURN_LISTS):
        if prompt in record:
            yield "prompt-completion", {"prompt": prompt, "completion": answer}


def _is_question_and_answer(record: Record, form: str, fields: Mapping[str, str]) -> bool:
    try:
        parsed = FORMATS[form].parse(record, FORMATS[form].resolve_names(fields), Origin("", 0))
    except BadRecordError:
        return False
    roles = [message.role for message in parsed.messages] if isinstance(parsed, Conversation) else []
    return [role for role in roles if role != "system"][:1] == ["user"] and roles[-1] == "assistant"
