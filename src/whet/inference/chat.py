"""Chat sessions, prompt files, and the replies of one or two models as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.core.console import progress
from whet.core.errors import BadRecordError, WhetError
from whet.data.calculator import CALCULATOR_SCHEMA
from whet.data.read.messages import parse_message_list
from whet.inference.calculator_tool import FunctionCallCalculator, calculate, parse_calculator_call
from whet.inference.inference_model import FINISH_INTERRUPTED, InferenceModel, MessageDict, Reply

_MAX_TOOL_CALLS = 16
"""Tool calls in one reply; a model that never stops calling is cut off here."""


class ChatSession:
    """A conversation with a model: the messages so far, and how to continue them."""

    def __init__(self, model: InferenceModel, system: str | None = None) -> None:
        self.model = model
        self.system = system
        self.messages = system_messages(system)

    def send(self, text: str, show: Callable[[str], None] | None = None) -> Reply:
        """The model's reply to a user message; `show` receives its text as it is generated.

        A reply that was interrupted before its first token is discarded together with the user message.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        for number in range(_MAX_TOOL_CALLS):
            reply = self.model.reply(self.model.prompt_ids(messages), show)
            uses_calls = isinstance(self.model.tool, FunctionCallCalculator)
            expression = parse_calculator_call(reply.text) if uses_calls else None
            if expression is None or reply.finish_reason != "end":
                break
            messages += _tool_call_messages(number, expression, reply.text)
            if show is not None:
                show(f"\n{messages[-1]['content']}\n")
        if reply.text or reply.finish_reason != FINISH_INTERRUPTED:
            self.messages = [*messages, {"role": "assistant", "content": reply.text}]
        return reply

    def reset(self, system: str | None = None) -> None:
        """Start a new conversation, with another system message if one is given."""
        self.system = self.system if system is None else system
        self.messages = system_messages(self.system)

    def save(self, path: Path) -> None:
        """Append the conversation to a JSONL file that whet can train on."""
        if not any(message["role"] == "assistant" for message in self.messages):
            raise WhetError("there is nothing to save yet: send a message first")
        record: dict[str, Any] = {"messages": self.messages}
        if any("tool_calls" in message for message in self.messages):
            record["tools"] = [CALCULATOR_SCHEMA]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            raise WhetError(f"{path}: cannot write ({error.strerror}). Give another file") from None


def system_messages(system: str | None) -> list[MessageDict]:
    return [{"role": "system", "content": system}] if system else []


def _tool_call_messages(number: int, expression: str, text: str) -> list[MessageDict]:
    """The assistant's message with a calculator call, and the tool's message with its result."""
    call = {"name": "calculator", "arguments": {"expression": expression}}
    call_id = f"call{number + 1:05}"
    content = text[: text.find("{")].removesuffix("\n").removesuffix("<tool_call>").rstrip()
    return [
        {"role": "assistant", "content": content,
         "tool_calls": [{"id": call_id, "type": "function", "function": call}]},
        {"role": "tool", "content": calculate(expression) or "error: not a sum", "tool_call_id": call_id,
         "name": "calculator"},
    ]  # fmt: skip


# One model, or two that reply to the same messages. The records are what `whet chat --json` prints.


@dataclass(frozen=True, slots=True)
class ChatModels:
    """The models of a `whet chat`."""

    model: InferenceModel
    against: InferenceModel | None = None
    adapters: dict[str, InferenceModel] = field(default_factory=dict)
    """What /adapter can switch to, by name."""
    load: Callable[[str], InferenceModel] | None = None
    """Loads another model for /against."""
    system: str | None = None

    @property
    def all(self) -> list[InferenceModel]:
        return [model for model in (self.model, self.against) if model is not None]


def answer_conversations(
    models: ChatModels, conversations: Sequence[Sequence[MessageDict]], explain: bool = False
) -> list[dict[str, Any]]:
    """A record for each of several independent conversations, with the replies of all models."""
    opening = system_messages(models.system)
    complete = [list(each) if each[0]["role"] == "system" else [*opening, *each] for each in conversations]
    return _merge_records(models, [_reply_to_all(model, complete) for model in models.all], explain)


def answer_message(
    models: ChatModels, text: str, explain: bool = False, show: Callable[[InferenceModel, str], None] | None = None
) -> dict[str, Any]:
    """The record of one user message; `show` receives text as it is generated."""
    replies = []
    for model in models.all:
        show_text = None if show is None else (lambda text, model=model: show(model, text))
        replies.append([ChatSession(model, models.system).send(text, show_text)])
    return {"prompt": text, **_merge_records(models, replies, explain)[0]}


def generate_unconditional(models: ChatModels, explain: bool = False) -> dict[str, Any]:
    """The record of a text that starts from the BOS token, without prompt or chat template."""
    replies = [[model.reply(_bos_prompt(model))] for model in models.all]
    return {"prompt": None, **_merge_records(models, replies, explain)[0]}


def _bos_prompt(model: InferenceModel) -> list[int]:
    tokenizer = model.renderer.tokenizer
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is None:
        raise WhetError(
            f"--unconditional: the tokenizer of {model.name} has neither a BOS nor an EOS token to start with"
        )
    return [first]


def _reply_to_all(model: InferenceModel, conversations: Sequence[list[MessageDict]]) -> list[Reply]:
    with progress(f"generating with {model.name}", len(conversations)) as bar:
        if not isinstance(model.tool, FunctionCallCalculator):
            return model.reply_batch([model.prompt_ids(each) for each in conversations], bar.advance)
        replies = []
        for messages in conversations:  # function calls add messages, so each conversation needs a session
            session = ChatSession(model)
            session.messages = messages[:-1]
            replies.append(session.send(messages[-1]["content"]))
            bar.advance()
        return replies


def _merge_records(models: ChatModels, replies: Sequence[Sequence[Reply]], explain: bool) -> list[dict[str, Any]]:
    """One record per conversation: the first model's reply, and the second model's under `against`."""
    records = [
        [_reply_record(model, reply, explain) for reply in its_replies]
        for model, its_replies in zip(models.all, replies, strict=True)
    ]
    if len(records) == 1:
        return records[0]
    return [first | {"against": second} for first, second in zip(*records, strict=True)]


def _reply_record(model: InferenceModel, reply: Reply, explain: bool) -> dict[str, Any]:
    record: dict[str, Any] = {
        "model": model.name, "answer": reply.text, "stopped": reply.finish_reason, "tokens": len(reply.ids),
    }  # fmt: skip
    if explain:
        record["explain"] = [token.as_dict() for token in model.explain(reply)]
    return record


# --prompts FILE


def read_prompts(path: Path) -> list[list[MessageDict]]:
    """One conversation per line, up to where the model's reply begins; blank lines are skipped.

    In a `.jsonl` file a line is a string, {"prompt": "…"} or {"messages": […]}. Trailing assistant messages are
    removed, so that training files work too. In other files a line is a prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise WhetError(f"--prompts: {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise WhetError(f"--prompts: {path}: not a text file in UTF-8") from None
    is_json = path.suffix in (".jsonl", ".ndjson")
    prompts: list[list[MessageDict]] = [
        _prompt_from_json(line, f"--prompts: {path}:{number}") if is_json else [{"role": "user", "content": line}]
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise WhetError(f"--prompts: {path}: no prompt in this file. Write one per line")
    return prompts


def _prompt_from_json(line: str, place: str) -> list[MessageDict]:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WhetError(f"{place}: invalid JSON ({error}). Rename a file of plain text lines to .txt") from None
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        value = value["prompt"]
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
        raise WhetError(f'{place}: expected a string, or an object with "prompt" (a string) or "messages" (a list)')
    try:  # as training reads them: content in parts becomes one string
        messages = [message.as_dict() for message in parse_message_list(messages)]
    except (BadRecordError, RecursionError) as error:
        raise WhetError(f"{place}: {error}") from None
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise WhetError(f"{place}: no user message: all messages are the assistant's")
    return messages
