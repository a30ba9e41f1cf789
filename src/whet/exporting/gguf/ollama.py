"""A Modelfile for Ollama, which does not run Jinja templates: the chat template in its own language.

Ollama looks a GGUF's template up in a list of known ones; for any other, it would send messages without a format.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from whet.core.errors import BadRecordError, WhetError
from whet.data.conversation import Message
from whet.data.render.renderer import Renderer
from whet.exporting.spec import GenerationSettings

_SYSTEM, _USER, _ANSWER, _NEXT = "Qsystemz", "Quserz", "Qanswerz", "Qnextz"
"""Contents that occur in no template."""


@dataclass(frozen=True, slots=True)
class TurnTexts:
    """What a chat template writes around the content of each role."""

    start: str
    """Before the first turn of a conversation without a system message."""
    system: tuple[str, str] | None
    """(before, after); None if the template takes no system message."""
    user: tuple[str, str]
    assistant: tuple[str, str]
    prompt: str
    """At the end, where the answer begins."""

    def compose(self, messages: list[Message]) -> str:
        """The prompt of a conversation, as the Ollama template makes it."""
        has_system = messages[0].role == "system" and self.system is not None
        text = "" if has_system else self.start
        around = {"user": self.user, "assistant": self.assistant, "system": self.system or ("", "")}
        for message in messages:
            before, after = around[message.role]
            text += before + message.content + after
        return text + self.prompt


def write_modelfile(folder: Path, file: str, settings: GenerationSettings) -> None:
    """FOLDER/Modelfile for `ollama create NAME -f FOLDER/Modelfile`."""
    lines = [f"FROM ./{file}"]
    turns = find_turn_texts(settings)
    if turns is None:
        lines.append("# The chat template has no equivalent here; Ollama takes what it makes of the one in the file.")
    else:
        lines.append(f'TEMPLATE """{ollama_template(turns)}"""')
    stops = [settings.tokenizer.convert_ids_to_tokens(number) for number in settings.stop_ids]
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops if isinstance(stop, str)]
    (folder / "Modelfile").write_text("\n".join(lines) + "\n", encoding="utf-8")


def ollama_template(turns: TurnTexts) -> str:
    """The Go template of these turns."""

    def text(constant: str) -> str:
        return f"{{{{ {json.dumps(constant)} }}}}" if constant else ""

    def turn(around: tuple[str, str], content: str) -> str:
        return f"{text(around[0])}{{{{ {content} }}}}{text(around[1])}"

    system = ""
    if turns.system is not None:
        system = f"{{{{ if .System }}}}{turn(turns.system, '.System')}{{{{ else }}}}{text(turns.start)}{{{{ end }}}}"
    body = (
        f'{{{{ range .Messages }}}}{{{{ if eq .Role "user" }}}}{turn(turns.user, ".Content")}'
        f'{{{{ else if eq .Role "assistant" }}}}{turn(turns.assistant, ".Content")}{{{{ end }}}}{{{{ end }}}}'
    )
    return f"{system or text(turns.start)}{body}{text(turns.prompt)}"


def find_turn_texts(settings: GenerationSettings) -> TurnTexts | None:
    """None if the template is more than a text before and after each turn."""
    tokenizer = settings.tokenizer
    if tokenizer.chat_template is None:
        return None
    renderer = Renderer(tokenizer, "assistant")
    system, user, answer = Message("system", _SYSTEM), Message("user", _USER), Message("assistant", _ANSWER)
    then = Message("user", _NEXT)

    def render(*messages: Message, prompt: bool = True) -> str:
        text = renderer.text.apply(list(messages), prompt=prompt)
        begins = tokenizer("a", add_special_tokens=True)["input_ids"][:1] == [tokenizer.bos_token_id]
        return text.removeprefix(tokenizer.bos_token) if begins and tokenizer.bos_token else text

    try:
        whole = render(user, answer, then)
        first, after_user = _cut(render(user, prompt=False), _USER)
        user_to_answer, answer_to_next = _between(whole, _USER, _ANSWER), _between(whole, _ANSWER, _NEXT)
        after_answer = _cut(render(user, answer, prompt=False), _ANSWER)[1]
        before_user = answer_to_next.removeprefix(after_answer)
        prompt = _cut(render(user), _USER)[1].removeprefix(after_user)
        turns = TurnTexts(
            first.removesuffix(before_user), None, (before_user, after_user),
            (user_to_answer.removeprefix(after_user), after_answer), prompt,
        )  # fmt: skip
        shapes = [[user], [user, answer, then]]
        if any(turns.compose(shape) != render(*shape) for shape in shapes):
            return None
    except (BadRecordError, WhetError, ValueError):
        return None
    try:
        before_system, rest = _cut(render(system, user), _SYSTEM)
        after_system = rest.partition(_USER)[0].removesuffix(before_user)
        with_system = TurnTexts(turns.start, (before_system, after_system), turns.user, turns.assistant, turns.prompt)
        shapes = [[system, user], [system, user, answer, then]]
        return with_system if all(with_system.compose(shape) == render(*shape) for shape in shapes) else None
    except (BadRecordError, WhetError, ValueError):  # the template refuses system messages
        return turns


def _cut(text: str, content: str) -> tuple[str, str]:
    """What comes before and after a content."""
    before, found, after = text.partition(content)
    if not found:
        raise ValueError(f"{content} is not in the text")
    return before, after


def _between(text: str, one: str, other: str) -> str:
    return _cut(_cut(text, one)[1], other)[0]
