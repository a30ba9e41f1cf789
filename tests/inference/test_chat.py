"""Chat sessions: history, streaming, tool calls, saving, and the terminal."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tool_template import TOOL_TEMPLATE

from whet.core.console import SafeConsole
from whet.core.errors import WhetError
from whet.data.config import Source
from whet.data.conversation import CALCULATOR_SCHEMA, Message
from whet.data.read.sources import read_source
from whet.data.render.renderer import Rendered, Renderer
from whet.inference import terminal
from whet.inference.calculator_tool import FunctionCallCalculator, make_calculator
from whet.inference.chat import ChatModels, ChatSession, read_prompts
from whet.inference.config import TaskConfig
from whet.inference.engine import Completion
from whet.inference.inference_model import InferenceModel, TextStream, text_before_stop
from whet.inference.sampling import Sampling
from whet.inference.tasks.load_tasks import load_file_task
from whet.inference.tasks.scoring import example_prompts
from whet.inference.terminal import TerminalChat, read_message
from whet.model.config import ModelConfig
from whet.model.load.tokenizer import load_tokenizer

TINY = ModelConfig(path="builtin:tiny")


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(load_tokenizer(TINY), "assistant")


@pytest.fixture
def chat_model(model: Any, renderer: Renderer) -> InferenceModel:
    return InferenceModel(model, renderer, [], sampling=Sampling(max_new_tokens=5))


def test_a_session_keeps_its_messages_until_reset(chat_model: InferenceModel) -> None:
    session = ChatSession(chat_model, system="Be brief.")
    first = session.send("Hello")
    assert (first.finish_reason, len(first.ids)) == ("length", 5)
    session.send("And now?")
    assert [message.role for message in session.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert session.messages[2].content == first.text
    session.reset()
    assert session.messages == [Message("system", "Be brief.")]
    assert session.send("Hello") == first
    session.reset("Be long.")
    assert session.messages == [Message("system", "Be long.")]


def test_a_long_reply_is_streamed_without_decoding_all_of_it_again(renderer: Renderer) -> None:
    text = "Rīga 東京 🙂🙂 naïve\n" * 60
    ids = renderer.tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > 600
    lengths: list[int] = []

    def decode(some: Sequence[int]) -> str:
        lengths.append(len(some))
        return renderer.decode_answer(some)

    for stop in ((), ("never " * 4,)):
        stream = TextStream(decode, stop)
        shown = [stream.push(token) for token in ids]
        assert "".join(shown) + stream.flush(renderer.decode_answer(ids)) == renderer.decode_answer(ids)
        assert max(lengths) < (100 if not stop else 500)
        assert sum(map(bool, shown)) > 100


def test_streamed_text_is_the_reply(model: Any, renderer: Renderer) -> None:
    for seed in range(5):
        sampling = Sampling(temperature=3.0, top_k=0, seed=seed, max_new_tokens=30)
        pieces: list[str] = []
        reply = ChatSession(InferenceModel(model, renderer, [], sampling=sampling)).send("Hello", pieces.append)
        assert "".join(pieces) == reply.text
        assert len(pieces) > 20
    stop = re.findall(r"(?<=[a-z ])[a-z]{3}", reply.text)[-1]
    pieces = []
    stopped = InferenceModel(model, renderer, [], sampling=Sampling(3.0, 0, seed, 30, stop=(stop,)))
    cut = ChatSession(stopped).send("Hello", pieces.append)
    assert cut.finish_reason == "string"
    assert cut.text == "".join(pieces) == text_before_stop(reply.text, [stop])


def test_an_incomplete_character_is_held_back() -> None:
    def text(ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    stream = TextStream(text)
    assert [stream.push(byte) for byte in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    assert stream.flush("aé€") == ""


def test_ctrl_c_ends_the_reply_and_keeps_its_text(chat_model: InferenceModel) -> None:
    session = ChatSession(chat_model)

    def interrupt_after(count: int) -> Callable[[str], None]:
        shown: list[str] = []

        def show(piece: str) -> None:
            shown.append(piece)
            if len(shown) == count:
                raise KeyboardInterrupt

        return show

    reply = session.send("Hello", interrupt_after(3))
    assert (reply.finish_reason, len(reply.ids)) == ("interrupted", 3)
    assert session.messages[-1] == Message("assistant", reply.text)
    assert session.send("Go on").finish_reason == "length"


def test_a_saved_conversation_can_be_trained_on(chat_model: InferenceModel, tmp_path: Path, renderer: Renderer) -> None:
    from whet.data.config import DataConfig, Source
    from whet.data.prepare.build import prepare_store
    from whet.data.render.chat_tokenizer import ChatTokenizer

    session = ChatSession(chat_model, system="Be brief.")
    file = tmp_path / "new" / "saved.jsonl"
    with pytest.raises(WhetError, match="nothing to save yet"):
        session.save(file)
    session.send("Hello")
    session.save(file)
    session.send("Again")
    session.save(file)
    config = DataConfig(sources=[Source(path=str(file))])
    conversation_tokenizer = ChatTokenizer(
        {"tokenizer": TINY.path, "today": None}, lambda: load_tokenizer(TINY), list, "assistant"
    )
    store = prepare_store(config, config.sources, "train", conversation_tokenizer).store
    assert len(store) == 2
    assert "Again" in renderer.tokenizer.decode(store.ids(1))
    with pytest.raises(WhetError, match="cannot write"):
        session.save(tmp_path)


def test_a_calculator_call_adds_an_assistant_and_a_tool_message(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = TOOL_TEMPLATE
    renderer = Renderer(tokenizer, "assistant")
    calculator = make_calculator(renderer)
    assert isinstance(calculator, FunctionCallCalculator)
    chat_model = InferenceModel(model, renderer, [2], sampling=Sampling(max_new_tokens=60), tool=calculator)
    script = ['So <tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>', "It is 42."]
    completions = iter([Completion(tokenizer.encode(text, add_special_tokens=False), "end", (2,)) for text in script])
    # a random model never calls a tool
    monkeypatch.setattr("whet.inference.inference_model.generate", lambda *_, **__: [next(completions)])
    session = ChatSession(chat_model)
    assert session.send("6 times 7?").text == "It is 42."
    assert [message.role for message in session.messages] == ["user", "assistant", "tool", "assistant"]
    assert session.messages[1].content == "So"
    assert session.messages[2].content == "42"
    renderer.prompt_ids(session.messages, tools=[CALCULATOR_SCHEMA])


def test_probabilities_are_the_model_s_own(model: Any, chat_model: InferenceModel) -> None:
    reply = ChatSession(chat_model).send("Hello")
    explained = chat_model.explain(reply, top=3)
    assert [each.id for each in explained] == reply.ids
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*reply.prompt, *reply.ids]])).logits[0].softmax(dim=-1)
    for position, each in enumerate(explained):
        own = logits[len(reply.prompt) - 1 + position]
        assert each.probability == pytest.approx(own[each.id].item(), rel=1e-4)
        assert each.rank == 1  # greedy
        assert each.likeliest[0].id == each.id
        assert [choice.id for choice in each.likeliest] == own.topk(3).indices.tolist()


def typed(*lines: str) -> Callable[[str], str]:
    waiting = iter(lines)
    return lambda prompt: next(waiting)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["Hello"], "Hello"),
        (["a \\", "b\\", "c"], "a \nb\nc"),
        (['"""', "x", "", "y", '"""'], "x\n\ny"),
        (['"""one line"""'], "one line"),
        (['"""begins', 'ends"""'], "begins\nends"),
    ],
)
def test_messages_may_have_several_lines(lines: list[str], message: str) -> None:
    assert read_message(typed(*lines)) == message


def type_lines(models: ChatModels, *lines: Any) -> tuple[TerminalChat, str]:
    """The chat after a user typed these lines and quit, and its output; an exception is raised in place of a line."""
    out = io.StringIO()
    console = SafeConsole(file=out, width=100, soft_wrap=False)
    waiting = iter([*lines, EOFError()])

    def read_line(*_: Any, **__: Any) -> str:
        line = next(waiting)
        if isinstance(line, BaseException):
            raise line
        return str(line)

    console.input = read_line  # type: ignore[method-assign]
    chat = TerminalChat(models, console=console)
    chat.run()
    return chat, out.getvalue()


def test_slash_commands(chat_model: InferenceModel, tmp_path: Path) -> None:
    models = ChatModels(chat_model, adapters={"none": chat_model}, load=lambda name: chat_model)
    file = tmp_path / "a.jsonl"
    chat, shown = type_lines(
        models, "/save", "Hello", f"/save {file}", "/reset", "/system Be brief.", "Hi", KeyboardInterrupt(),
        "/against other", "Both?", "/against none", "/adapter none", "/adapter mine", "/nonsense", "/help", "/quit",
        "x",
    )  # fmt: skip
    saved = [json.loads(line) for line in file.read_text().splitlines()]
    assert [[message["role"] for message in each["messages"]] for each in saved] == [["user", "assistant"]]
    assert chat.session.messages[0] == Message("system", "Be brief.")
    assert [message.content for message in chat.session.messages if message.role == "user"] == ["Both?"]
    assert chat.against is None
    for words in (
        "/save: a file is missing", "truncated after 5 tokens", "(comparing with other",
        "/adapter: no adapter mine; available: none", "/nonsense: unknown command", "stop a reply",
        "/quit or Ctrl-D quits",
    ):  # fmt: skip
        assert words in shown
    assert terminal._HELP.splitlines()[0] in shown


def test_a_message_that_is_not_utf_8_does_not_end_the_session(chat_model: InferenceModel) -> None:
    chat, shown = type_lines(ChatModels(chat_model), "caf\udce9", "Hello")  # how Python reads the byte E9
    assert "the user message contains a lone surrogate" in " ".join(shown.split())
    assert [message.content for message in chat.session.messages if message.role == "user"] == ["Hello"]


def test_an_interrupted_reply_does_not_end_the_session(
    chat_model: InferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = InferenceModel.reply, list[int]()

    def reply(model: InferenceModel, prompt: list[int], show: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt  # outside of generation
        return real(model, prompt, show)

    monkeypatch.setattr(InferenceModel, "reply", reply)
    chat, shown = type_lines(ChatModels(chat_model), "Hello", "Again")
    assert "(stopped)" in shown
    assert [message.content for message in chat.session.messages if message.role == "user"] == ["Again"]


def test_prompts_are_read_from_text_and_json_lines(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text('Hi\n\n{"not": "json"}\n')
    assert [each.messages[-1].content for each in read_prompts(text)] == ["Hi", '{"not": "json"}']
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
    ]
    lines.write_text("\n".join(map(json.dumps, ["Hi", {"prompt": "Ho"}, {"messages": turns}])))
    assert [each.messages for each in read_prompts(lines)] == [
        (Message("user", "Hi"),), (Message("user", "Ho"),), (Message("system", "S"), Message("user", "Q")),
    ]  # fmt: skip
    turns[1]["content"] = [{"type": "text", "text": "Q"}]
    lines.write_text(json.dumps({"messages": turns}))
    assert read_prompts(lines)[0].messages[-1] == Message("user", "Q")  # a template would print the list
    for bad, words in (("{", ":1: invalid JSON"), ("3", "expected a string"), ('{"messages": []}', "no user message"),
                       ('"\\ud800"', ":1: the prompt contains a lone surrogate")):  # fmt: skip
        lines.write_text(bad)
        with pytest.raises(WhetError, match=words):
            read_prompts(lines)
    text.write_text("\n")
    with pytest.raises(WhetError, match="no prompt in this file"):
        read_prompts(text)
    with pytest.raises(WhetError, match="cannot be read"):
        read_prompts(tmp_path / "none.txt")


def test_what_is_beside_the_messages_is_read_as_in_training(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    question = {"role": "user", "content": "Q"}
    records = [
        {"messages": [question], "system": "S", "tools": [CALCULATOR_SCHEMA]},
        {"prompt": "Q", "system_prompt": "S"},
    ]
    file.write_text("\n".join(map(json.dumps, records)))
    first, second = read_prompts(file)
    assert first.messages == second.messages == (Message("system", "S"), Message("user", "Q"))
    assert (first.tools, second.tools) == ((CALCULATOR_SCHEMA,), ())


@pytest.mark.parametrize("joined", ["+", "~"], ids=["concatenated", "printed"])
@pytest.mark.parametrize("written", ['{"expression":"6*7"}', {"expression": "6*7"}], ids=["text", "object"])
def test_a_history_of_tool_calls_has_the_ids_of_training(model: Any, tmp_path: Path, joined: str, written: Any) -> None:
    """Also where the template concatenates or prints the arguments, which must then be text as it was written."""
    tokenizer = load_tokenizer(TINY)
    called = f"c['function']['name'] + ': ' {joined} c['function']['arguments']"
    tokenizer.chat_template = TOOL_TEMPLATE.replace("(c['function'] | tojson)", f"({called})")
    renderer = Renderer(tokenizer, "assistant")
    call = {"type": "function", "function": {"name": "calculator", "arguments": written}}
    turns = [
        {"role": "user", "content": "6 times 7?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42"}, {"role": "assistant", "content": "It is 42."},
    ]  # fmt: skip
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": turns, "tools": [CALCULATOR_SCHEMA]}))
    [conversation] = read_source(Source(path=str(file)))
    [trained] = renderer.render_items([conversation])  # type: ignore[list-item]
    assert isinstance(trained, Rendered)
    text = tokenizer.decode(trained.ids)
    assert ('{"expression":"6*7"}' if isinstance(written, str) else '{"expression": "6*7"}') in text
    answer = int(np.flatnonzero(np.diff(trained.loss.astype(int)) == 1)[-1]) + 1
    expected = trained.ids[:answer].tolist()

    chat_model = InferenceModel(model, renderer, [2])
    [prompt] = read_prompts(file)
    assert chat_model.prompt_ids(prompt.messages, prompt.tools) == expected
    task = load_file_task(TaskConfig(path=str(file)), 10, "strict")
    assert example_prompts(chat_model, task, task.examples(1)) == [expected]
