"""Records that whet cannot train on, although their format is known: images, bad answers, weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from whet.core.errors import BadRecordError
from whet.data.conversation import Conversation, ParsedRecord
from whet.data.read.messages import MEDIA_KEYS, RECORD_FIELDS
from whet.data.read.record_fields import EMPTY_VALUES, find_optional, shorten

_UNSUPPORTED_KEYS = MEDIA_KEYS | {"chat_template_kwargs"}
_CHECKED_KEYS = _UNSUPPORTED_KEYS | {"weight", "train", *RECORD_FIELDS["label"]}
_NEGATIVE_LABELS = (False, -1, "false", "0", "-1", "undesirable", "bad", "rejected", "dispreferred")  # False equals 0
_MEDIA_TAG = re.compile(
    r"<\|?(?:image|img|video|audio)(?:_?\d+|_pad)?\|?>|<\|(?:vision|audio)_(?:start|bos)\|>|<start_of_image>",
    re.IGNORECASE,
)
_MEDIA_MARK = re.compile(
    rf"\A\s*{_MEDIA_TAG.pattern}|^(?:\w+[ -]?\d*: ?)?(?:{_MEDIA_TAG.pattern}[ ,]*)+$", re.IGNORECASE | re.MULTILINE
)
"""LLaVA's `<image>` at the start of a turn, or alone on a line; inside a sentence it is a word like any other."""
_DATA_URI = re.compile(r"\s*data:(?:image|video|audio)/[\w.+-]+;base64,", re.IGNORECASE)


def reject_unsupported(record: Any, parsed: ParsedRecord, names: Mapping[str, str]) -> None:
    """Raise a BadRecordError if the record has what whet cannot train on, such as images."""
    if isinstance(record, dict) and ("label" in names or not _CHECKED_KEYS.isdisjoint(record)):
        _reject_keys(record, parsed, names)
    if isinstance(parsed, Conversation):
        for number, message in enumerate(parsed.messages, 1):
            if message.role != "user":
                continue
            has_tag = "<" in message.content and _MEDIA_TAG.search(message.content)
            mark = (has_tag and _MEDIA_MARK.search(message.content)) or _DATA_URI.match(message.content)
            if mark:
                raise BadRecordError(
                    "image mark",
                    f"message {number} has the mark {mark.group().strip()}, but whet trains on text only; remove the "
                    "record, or reword it",
                )


def _reject_keys(record: Mapping[str, Any], parsed: ParsedRecord, names: Mapping[str, str]) -> None:
    for key in sorted(_UNSUPPORTED_KEYS & record.keys()):
        if record[key] not in EMPTY_VALUES and key not in names.values():
            why = "trains on text only" if key in MEDIA_KEYS else "gives chat templates no options"
            raise BadRecordError("unsupported key", f"the record has '{key}', but whet {why}; remove it")
    if not isinstance(parsed, Conversation):
        return
    if record.get("weight") not in (None, 1) or record.get("train") not in (None, True):
        raise BadRecordError(
            "bad weight",
            "weight and train do not apply to a whole record. Set them for its messages, or weight for the source",
        )
    name, label = find_optional(record, "label", RECORD_FIELDS["label"], names)
    if any(name == used for field, used in names.items() if field != "label"):
        return
    if (label.lower() if isinstance(label, str) else label) in _NEGATIVE_LABELS:
        raise BadRecordError(
            "negative label",
            f"'{name}' is {shorten(label)}, which marks a bad answer (KTO). Keep the good ones with where: "
            f'{name} != {label!r}; if it means something else, ignore it with fields: {{label: ""}}',
        )
