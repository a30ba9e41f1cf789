"""The `gsm8k` format: a question, and an answer with sums such as <<48/2=24>> and a last line #### 24."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from whet.data.calculator import SCHEMA, Step, with_calls
from whet.data.conversation import BadRecordError, Conversation, Message, Origin
from whet.data.formats.pick import readings
from whet.data.formats.values import filled, need_field, need_object, short

FIELDS = {"question": ("question",), "answer": ("answer",)}
_EXAMPLE = '{"question": "…", "answer": "… <<48/2=24>>24 …\\n#### 24"}'
_SUM = re.compile(r"<<(.*?)>>", re.DOTALL)
_RESULT = "####"


def recognise(record: Any, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """The names under which a record holds such an answer; none if it is of another format."""
    found = readings(record, FIELDS, ("question", "answer"), fields)
    return [names for names in found if _has_result(record[names["answer"]])]


def parse(record: Any, names: Mapping[str, str], origin: Origin) -> Conversation:
    """The sums removed: the answer in plain text."""
    question, answer = _parts(record, names)
    return Conversation((Message("user", question), Message("assistant", _SUM.sub("", answer))), origin)


def parse_calls(record: Any, names: Mapping[str, str], origin: Origin) -> Conversation:
    """Each sum a call of the calculator, whose result is given to the assistant."""
    question, answer = _parts(record, names)
    if "<<" not in answer:
        return Conversation((Message("user", question), Message("assistant", answer)), origin, (SCHEMA,))
    steps, place = [], 0
    for found in _SUM.finditer(answer):
        expression, equals, result = found.group(1).rpartition("=")
        if not equals or not expression.strip() or not result.strip():
            raise BadRecordError("bad sum", f"{short(found.group())} is no sum such as <<48/2=24>>")
        steps.append(Step(answer[place : found.start()], expression, result))
        place = found.end()
    return Conversation((Message("user", question), *with_calls(steps, answer[place:])), origin, (SCHEMA,))


def _parts(record: Any, names: Mapping[str, str]) -> tuple[str, str]:
    record = need_object(record, _EXAMPLE)
    question = filled(need_field(record, names["question"]), f"'{names['question']}'")
    answer = filled(need_field(record, names["answer"]), f"'{names['answer']}'")
    if not _has_result(answer):
        raise BadRecordError("no result", f"'{names['answer']}' does not end with a line such as #### 24")
    return question, answer


def _has_result(answer: Any) -> bool:
    if not isinstance(answer, str):
        return False
    last = answer.rstrip().rpartition("\n")[2]
    return last.startswith(_RESULT) and len(last) > len(_RESULT)
