"""Chat sessions, prompt files, and the replies of one or two models as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from whet.core.console import progress
from whet.core.errors import BadRecordError, WhetError
from whet.data.conversation import CALCULATOR_SCHEMA, Conversation, Message, Origin, ToolCall
from whet.data.read.records.messages import RECORD_FIELDS, add_system_prompt, parse_message_list
from whet.data.read.records.record_fields import find_optional, require_text
from whet.data.read.records.tools import parse_tools
from whet.data.render.template_text import Tools
from whet.inference.calculator_tool import FunctionCallCalculator, InlineCalculator, calculate, parse_calculator_call
from whet.inference.inference_model import FINISH_INTERRUPTED, InferenceModel, Reply

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
        return self.answer([*self.messages, Message("user", text)], show=show)

    def answer(
        self, messages: Sequence[Message], tools: Tools = (), show: Callable[[str], None] | None = None
    ) -> Reply:
        """The model's reply to these messages, which become those of the session."""
        messages = [*messages]
        for number in range(_MAX_TOOL_CALLS):
            reply = self.model.reply(self.model.prompt_ids(messages, tools), show)
            uses_calls = isinstance(self.model.tool, FunctionCallCalculator)
            expression = parse_calculator_call(reply.text) if uses_calls else None
            if expression is None or reply.finish_reason != "end":
                break
            messages += _tool_call_messages(number, expression, reply.text)
            if show is not None:
                show(f"\n{messages[-1].content}\n")
        if reply.text or reply.finish_reason != FINISH_INTERRUPTED:
            self.messages = [*messages, *self._as_messages(reply.text, messages)]
        return reply

    def _as_messages(self, text: str, before: Sequence[Message]) -> Sequence[Message]:
        """A reply as messages; inline calculations become calls where the chat template writes these inline."""
        if isinstance(self.model.tool, InlineCalculator) and self.model.renderer.text.calls_inline:
            return self.model.tool.split_reply(text, sum(len(message.tool_calls) for message in before))
        return [Message("assistant", text)]

    def reset(self, system: str | None = None) -> None:
        """Start a new conversation, with another system message if one is given."""
        self.system = self.system if system is None else system
        self.messages = system_messages(self.system)

    def save(self, path: Path) -> None:
        """Append the conversation to a JSONL file that whet can train on."""
        if not any(message.role == "assistant" for message in self.messages):
            raise WhetError("there is nothing to save yet: send a message first")
        record: dict[str, Any] = {"messages": [message.as_dict() for message in self.messages]}
        if any(message.tool_calls for message in self.messages):
            record["tools"] = [CALCULATOR_SCHEMA]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            raise WhetError(f"{path}: cannot write ({error.strerror}). Give another file") from None


def system_messages(system: str | None) -> list[Message]:
    return [Message("system", system)] if system else []


def _tool_call_messages(number: int, expression: str, text: str) -> list[Message]:
    """The assistant's message with a calculator call, and the tool's message with its result."""
    call = ToolCall("calculator", {"expression": expression}, f"call{number + 1:05}")
    content = text[: text.find("{")].removesuffix("\n").removesuffix("<tool_call>").rstrip()
    return [
        Message("assistant", content, tool_calls=(call,)),
        Message("tool", calculate(expression) or "error: not a sum", tool_call_id=call.id, name="calculator"),
    ]


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
    models: ChatModels, conversations: Sequence[Conversation], explain: bool = False
) -> list[dict[str, Any]]:
    """A record for each of several independent conversations, with the replies of all models."""
    opening = system_messages(models.system)
    complete = [
        each if each.messages[0].role == "system" else replace(each, messages=(*opening, *each.messages))
        for each in conversations
    ]
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


def _reply_to_all(model: InferenceModel, conversations: Sequence[Conversation]) -> list[Reply]:
    with progress(f"generating with {model.name}", len(conversations)) as bar:
        if not isinstance(model.tool, FunctionCallCalculator):
            return model.reply_batch(
                [model.prompt_ids(each.messages, each.tools) for each in conversations], bar.advance
            )
        replies = []
        for each in conversations:  # function calls add messages, so each conversation needs a session
            replies.append(ChatSession(model).answer(each.messages, each.tools))
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


def read_prompts(path: Path) -> list[Conversation]:
    """One conversation per line, up to where the model's reply begins; blank lines are skipped.

    In a `.jsonl` file a line is a string, {"prompt": "…"} or {"messages": […]}, with `system` and `tools` beside it as
    in training. Trailing assistant messages are removed, so that training files work too. In other files a line is a
    prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise WhetError(f"--prompts: {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise WhetError(f"--prompts: {path}: not a text file in UTF-8") from None
    is_json = path.suffix in (".jsonl", ".ndjson")
    places = ((Origin(f"--prompts: {path}", number), line) for number, line in enumerate(lines, 1) if line.strip())
    prompts = [
        _prompt_from_json(line, place) if is_json else Conversation((Message("user", line),), place)
        for place, line in places
    ]
    if not prompts:
        raise WhetError(f"--prompts: {path}: no prompt in this file. Write one per line")
    return prompts


def _prompt_from_json(line: str, place: Origin) -> Conversation:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WhetError(f"{place}: invalid JSON ({error}). Rename a file of plain text lines to .txt") from None
    record = value if isinstance(value, dict) else {}
    turns = record.get("messages")
    if isinstance(record.get("prompt"), str):
        turns = [{"role": "user", "content": record["prompt"]}]
    try:  # as training reads them: content in parts becomes one string
        if isinstance(value, str):
            return Conversation((Message("user", require_text(value, "the prompt")),), place)
        if not isinstance(turns, list) or not all(isinstance(each, dict) and "role" in each for each in turns):
            raise WhetError(f'{place}: expected a string, or an object with "prompt" (a string) or "messages" (a list)')
        messages = list(parse_message_list(turns))
        name, tools = find_optional(record, "tools", RECORD_FIELDS["tools"], {})
        while messages and messages[-1].role == "assistant":
            messages.pop()
        if not messages:
            raise WhetError(f"{place}: no user message: all messages are the assistant's")
        return Conversation(tuple(add_system_prompt(messages, record, {})), place, parse_tools(tools, name))
    except (BadRecordError, RecursionError) as error:
        raise WhetError(f"{place}: {error}") from None
