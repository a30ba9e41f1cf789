"""Marked text and conversations as turns between markers.

    <<<|user|>>>Hi<<<|user|>>><<<|assistant|>>>Yes<<<|assistant|>>>
    ╰ opens    ╯  ╰ closes   ╯

The same marker opens and closes a turn, as in the SFT data on LUMI. Text outside of turns is kept, never learned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from whet.data.config import Markers
from whet.data.conversation import BadRecordError, Conversation, Marked, Message

LOOK_ALIKE = "marker look-alike"
"""The ledger's reason for text that could be taken for a marker: kept, counted."""
_NEVER = re.compile("(?!)")


@dataclass(frozen=True, slots=True)
class Turn:
    """What stands between two markers; without a role, what stands outside of turns."""

    role: str | None
    text: str
    learn: bool = True
    """False: not learned whatever train_on says."""


def markers_by_role(markers: Markers) -> dict[str, str]:
    """The text of each marker."""
    named = {"user": markers.user, "assistant": markers.assistant, "system": markers.system}
    return {role: marker.text for role, marker in named.items() if marker is not None}


def parse_turns(item: Marked | Conversation, markers: Markers) -> list[Turn]:
    """The turns of a record; a BadRecordError says why it has none."""
    turns = _of_text(item.text, markers) if isinstance(item, Marked) else _of_messages(item, markers)
    for turn in turns:
        try:
            turn.text.encode()
        except UnicodeEncodeError:
            raise BadRecordError("bad text", "the text holds a lone surrogate, which is not valid Unicode") from None
    return turns


def conversation_of(item: Marked, markers: Markers) -> Conversation | None:
    """Marked text as messages, which are written the same way; None if text stands outside of its turns."""
    turns = _of_text(item.text, markers)
    if any(turn.role is None for turn in turns):
        return None
    return Conversation(tuple(Message(str(turn.role), turn.text) for turn in turns), item.origin)


def _of_text(text: str, markers: Markers) -> list[Turn]:
    texts = markers_by_role(markers)
    roles = {text: role for role, text in texts.items()}
    pattern = "|".join(re.escape(text) for text in sorted(roles, key=len, reverse=True))
    before, *rest = re.split(f"({pattern})", text)
    if not rest:
        raise BadRecordError(
            "no marker", f"no marker in the text; a turn stands between two of {' or '.join(texts.values())}"
        )
    turns, opened = [Turn(None, before)], None
    for marker, span in zip(rest[::2], rest[1::2], strict=True):
        role = roles[marker]
        if opened is None:
            opened = role
            turns.append(Turn(role, span))
        elif opened == role:
            opened = None
            turns.append(Turn(None, span))
        else:
            raise BadRecordError("unclosed turn", f"{marker} comes before {texts[opened]} has closed its turn")
    if opened is not None:
        raise BadRecordError("unclosed turn", f"the last {texts[opened]} opens a turn that nothing closes")
    return [turn for turn in turns if turn.role is not None or turn.text.strip()]


def _of_messages(conversation: Conversation, markers: Markers) -> list[Turn]:
    if conversation.tools:
        raise BadRecordError("tools", "the record offers tools, which have no form between markers; remove them")
    texts = markers_by_role(markers)
    turns: list[Turn] = []
    system: list[str] = []  # waits for the user's turn that it goes before
    for number, message in enumerate(conversation.messages, 1):
        role = _role(message, number, texts)
        if role == "system" and "system" not in texts:
            system.append(message.content)
            continue
        if system and role != "user":
            raise BadRecordError(
                "system without user",
                f"message {number}: a system message is written into the user's turn after it, and this is another. "
                "Give it a marker of its own: data.markers.system",
            )
        turns.append(Turn(role, "\n\n".join([*system, message.content]), message.learn is not False))
        system = []
    if system:
        raise BadRecordError("system without user", "a system message at the end has no user's turn to go into")
    return turns


def _role(message: Message, number: int, texts: dict[str, str]) -> str:
    role = "system" if message.role == "developer" else message.role
    if role not in ("system", "user", "assistant") or message.calls:
        raise BadRecordError("tools", f"message {number}: tool calls and results have no form between markers")
    if message.reasoning:
        raise BadRecordError("reasoning", f"message {number}: reasoning has no form between markers; remove it")
    if role == "assistant" and not message.content.strip():
        raise BadRecordError("empty turn", f"message {number} (role 'assistant') has no text to learn")
    for text in texts.values():
        if text in message.content:
            raise BadRecordError(
                "marker in a message", f"message {number} holds {text}, which would open or close a turn; reword it"
            )
    return role


def look_alikes(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds what a reader could take for one of `texts`: other case, spaces within, more or fewer signs around.

    From <<<|user|>>> it makes a pattern that finds <|user|>, <<|User |>> and <user>, and not the word alone.
    """
    patterns = [_loosened(text) for text in texts if any(char.isalnum() for char in text)]
    return re.compile("|".join(patterns), re.IGNORECASE) if patterns else _NEVER


def _loosened(text: str) -> str:
    runs = [run for run in re.split(r"(\w+)|\s+", text) if run]
    words = [
        re.escape(run) if re.fullmatch(r"\w+", run) else rf"(?:[{re.escape(''.join(sorted(set(run))))}]\s*)+"
        for run in runs
    ]
    return r"\s*".join(words)
