"""Conversations: remembered, streamed, saved so that they can be trained on."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from calling import TOOL_TEMPLATE
from rich.console import Console

from whet.core.errors import WhetError
from whet.data.calculator import CALCULATOR_SCHEMA
from whet.data.render.renderer import Renderer
from whet.inference import terminal
from whet.inference.calculator_tool import FunctionCallCalculator, make_calculator
from whet.inference.chat import ChatModel, ChatSession, TextStream, explain_tokens, read_prompts, text_before_stop
from whet.inference.generate import Sampling
from whet.inference.terminal import TerminalChat, read_message, run_terminal_chat
from whet.model.config import ModelConfig
from whet.model.load.tokenizer import load_tokenizer

TINY = ModelConfig(path="builtin:tiny")


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(load_tokenizer(TINY), "assistant")


@pytest.fixture
def speaker(model: Any, renderer: Renderer) -> ChatModel:
    return ChatModel(model, renderer, [], Sampling(max_new_tokens=5))


def test_a_conversation_remembers_what_was_said_until_told_to_forget(speaker: ChatModel) -> None:
    session = ChatSession(speaker, system="Be brief.")
    first = session.say("Hello")
    assert (first.stopped, len(first.ids)) == ("length", 5)
    session.say("And now?")
    assert [message["role"] for message in session.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert session.messages[2]["content"] == first.text
    session.forget()
    assert session.messages == [{"role": "system", "content": "Be brief."}]
    assert session.say("Hello") == first
    session.forget("Be long.")
    assert session.messages == [{"role": "system", "content": "Be long."}]


def test_what_is_shown_while_it_comes_is_the_answer(model: Any, renderer: Renderer) -> None:
    for seed in range(5):
        sampling = Sampling(temperature=3.0, top_k=0, seed=seed, max_new_tokens=30)
        pieces: list[str] = []
        said = ChatSession(ChatModel(model, renderer, [], sampling)).say("Hello", pieces.append)
        assert "".join(pieces) == said.text
        assert len(pieces) > 20
    stop = re.findall(r"(?<=[a-z ])[a-z]{3}", said.text)[-1]
    pieces = []
    cut = ChatSession(
        ChatModel(model, renderer, [], Sampling(3.0, 0, seed, 30, stop=(stop,)))
    ).say("Hello", pieces.append)  # fmt: skip
    assert cut.stopped == "string"
    assert cut.text == "".join(pieces) == text_before_stop(said.text, [stop])


def test_half_a_character_is_held_back() -> None:
    def text(ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    stream = TextStream(text)
    assert [stream.take(byte) for byte in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    assert stream.rest("aé€") == ""


def test_ctrl_c_ends_the_answer_and_keeps_what_was_said(speaker: ChatModel) -> None:
    session = ChatSession(speaker)

    def interrupt_after(count: int) -> Callable[[str], None]:
        shown: list[str] = []

        def show(piece: str) -> None:
            shown.append(piece)
            if len(shown) == count:
                raise KeyboardInterrupt

        return show

    said = session.say("Hello", interrupt_after(3))
    assert (said.stopped, len(said.ids)) == ("interrupted", 3)
    assert session.messages[-1] == {"role": "assistant", "content": said.text}
    assert session.say("Go on").stopped == "length"


def test_a_saved_conversation_can_be_trained_on(speaker: ChatModel, tmp_path: Path, renderer: Renderer) -> None:
    from whet.data.config import DataConfig, Source
    from whet.data.prepare.build import prepare_store
    from whet.data.render.chat_tokenizer import ChatTokenizer

    session = ChatSession(speaker, system="Be brief.")
    file = tmp_path / "new" / "saved.jsonl"
    with pytest.raises(WhetError, match="nothing to save yet"):
        session.save(file)
    session.say("Hello")
    session.save(file)
    session.say("Again")
    session.save(file)
    config = DataConfig(sources=[Source(path=str(file))])
    conversation_tokenizer = ChatTokenizer(
        {"tokenizer": TINY.path, "today": None}, lambda: load_tokenizer(TINY), list, "assistant"
    )
    store = prepare_store(config, config.sources, "train", conversation_tokenizer).store
    assert len(store) == 2
    assert "Again" in renderer.tokenizer.decode(store.ids(1))
    with pytest.raises(WhetError, match="cannot be written"):
        session.save(tmp_path)


def test_a_call_of_the_calculator_is_a_turn_of_its_own(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = TOOL_TEMPLATE
    renderer = Renderer(tokenizer, "assistant")
    calculator = make_calculator(renderer)
    assert isinstance(calculator, FunctionCallCalculator)
    speaker = ChatModel(model, renderer, [2], Sampling(max_new_tokens=60), calculator)
    script = ['So <tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>', "It is 42."]
    spoken = iter([tokenizer.encode(text, add_special_tokens=False) for text in script])

    def answer(model: Any, prompts: Any, *_: Any, **__: Any) -> Any:
        from whet.inference.generate import Completion

        return [Completion(next(spoken), "end", (2,))]

    monkeypatch.setattr("whet.inference.chat.generate_completions", answer)  # a random model never calls anything
    session = ChatSession(speaker)
    assert session.say("6 times 7?").text == "It is 42."
    assert [message["role"] for message in session.messages] == ["user", "assistant", "tool", "assistant"]
    assert session.messages[1]["content"] == "So"
    assert session.messages[2]["content"] == "42"
    renderer.prompt_ids(session.messages, tools=[CALCULATOR_SCHEMA])


def test_probabilities_are_the_model_s_own(model: Any, speaker: ChatModel) -> None:
    said = ChatSession(speaker).say("Hello")
    told = explain_tokens(model, said.prompt, said.ids, speaker.piece, top=3)
    assert [each.id for each in told] == said.ids
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*said.prompt, *said.ids]])).logits[0].softmax(dim=-1)
    for place, each in enumerate(told):
        own = logits[len(said.prompt) - 1 + place]
        assert each.probability == pytest.approx(own[each.id].item(), rel=1e-4)
        assert each.rank == 1  # greedy
        assert each.likeliest[0].id == each.id
        assert [choice.id for choice in each.likeliest] == own.topk(3).indices.tolist()


def typed(*lines: str) -> Callable[[str], str]:
    waiting = iter(lines)
    return lambda mark: next(waiting)


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


def talk(table: TerminalChat, *lines: Any) -> str:
    """What is shown to a person who types these lines and leaves; an exception is raised where it stands."""
    out = io.StringIO()
    console = Console(file=out, width=100, highlight=False)
    waiting = iter([*lines, EOFError()])

    def ask(*_: Any, **__: Any) -> str:
        line = next(waiting)
        if isinstance(line, BaseException):
            raise line
        return str(line)

    console.input = ask  # type: ignore[method-assign]
    run_terminal_chat(table, console)
    return out.getvalue()


def test_commands_do_what_they_say(speaker: ChatModel, tmp_path: Path) -> None:
    table = TerminalChat(ChatSession(speaker), adapters={"none": speaker}, load=lambda name: speaker)
    file = tmp_path / "a.jsonl"
    shown = talk(
        table, "/save", "Hello", f"/save {file}", "/reset", "/system Be brief.", "Hi", KeyboardInterrupt(),
        "/against other", "Both?", "/against none", "/adapter none", "/adapter mine", "/nonsense", "/help", "/quit",
        "x",
    )  # fmt: skip
    saved = [json.loads(line) for line in file.read_text().splitlines()]
    assert [[message["role"] for message in each["messages"]] for each in saved] == [["user", "assistant"]]
    assert table.session.messages[0] == {"role": "system", "content": "Be brief."}
    assert [message["content"] for message in table.session.messages if message["role"] == "user"] == ["Both?"]
    assert table.beside is None
    for words in (
        "name a file", "cut at 5 tokens", "(beside other", "/adapter: mine; there are: none",
        "/nonsense: no such command", "stops an answer", "/quit or Ctrl-D leaves",
    ):  # fmt: skip
        assert words in shown
    assert terminal._HELP.splitlines()[0] in shown


def test_an_interrupted_answer_does_not_end_the_session(speaker: ChatModel, monkeypatch: pytest.MonkeyPatch) -> None:
    table = TerminalChat(ChatSession(speaker))
    real, calls = speaker.answer, list[int]()

    def answer(prompt: list[int], show: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt  # outside of the model's own work
        return real(prompt, show)

    monkeypatch.setattr(speaker, "answer", answer)
    shown = talk(table, "Hello", "Again")
    assert "(stopped)" in shown
    assert [message["content"] for message in table.session.messages if message["role"] == "user"] == ["Again"]


def test_prompts_come_from_lines_and_from_json(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text('Hi\n\n{"not": "json"}\n')
    assert [each[-1]["content"] for each in read_prompts(text)] == ["Hi", '{"not": "json"}']
    talk = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    lines.write_text("\n".join(map(json.dumps, ["Hi", {"prompt": "Ho"}, {"messages": talk}])))
    assert read_prompts(lines) == [
        [{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Ho"}], talk[:2],
    ]  # fmt: skip
    talk[1]["content"] = [{"type": "text", "text": "Q"}]
    lines.write_text(json.dumps({"messages": talk}))
    assert read_prompts(lines)[0][-1] == {"role": "user", "content": "Q"}  # a template would print the list
    for bad, words in (("{", ":1: no JSON"), ("3", "neither a text"), ('{"messages": []}', "nothing is left")):
        lines.write_text(bad)
        with pytest.raises(WhetError, match=words):
            read_prompts(lines)
    text.write_text("\n")
    with pytest.raises(WhetError, match="no prompt in this file"):
        read_prompts(text)
    with pytest.raises(WhetError, match="cannot be read"):
        read_prompts(tmp_path / "none.txt")
