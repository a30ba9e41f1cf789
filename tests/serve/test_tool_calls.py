"""Tool calls: how a template writes them, what is a call in an answer, and what the client gets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from web_servers import running

from whet.core.errors import WhetError
from whet.data.render.renderer import Renderer
from whet.inference.engine import append_token
from whet.inference.inference_model import InferenceModel
from whet.inference.online_engine import OnlineSequence
from whet.model.config import ModelConfig
from whet.model.load.tokenizer import load_tokenizer
from whet.run.models.load_models import load_models_to_serve
from whet.serve.app import make_app, make_serving_app
from whet.serve.endpoints import ServedModel
from whet.serve.service import GenerationService, Metrics
from whet.serve.tool_calls import (
    JsonCalls,
    NamedCalls,
    PythonCalls,
    TaggedCalls,
    ToolCallFormat,
    find_tool_call_format,
    visible_length,
)

CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% for c in m.get('tool_calls') or [] %}CALL{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HERMES = CHATML.replace("CALL", "{{ '<tool_call>\n' + (c['function'] | tojson) + '\n</tool_call>' }}")
LLAMA = CHATML.replace(
    "CALL", "{{ {'name': c['function']['name'], 'parameters': c['function']['arguments']} | tojson }}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
FORMAT = JsonCalls("<tool_call>", "</tool_call>")
BARE = JsonCalls("", "")


def renderer(template: str) -> Renderer:
    tokenizer = load_tokenizer(ModelConfig(path="builtin:tiny"))
    tokenizer.chat_template = template
    return Renderer(tokenizer, "assistant")


def test_the_format_is_what_the_template_writes() -> None:
    assert find_tool_call_format(renderer(HERMES)) == FORMAT
    assert find_tool_call_format(renderer(LLAMA)) == BARE
    listed = CHATML.replace("CALL", "{{ '[TOOL_CALLS] [' + (c['function'] | tojson) + ']' }}")
    assert find_tool_call_format(renderer(listed)) == JsonCalls("[TOOL_CALLS]", "")


def calls_of(before: str, each: str, after: str) -> str:
    """A template with calls in a block; `each` has NAME and ARGUMENTS."""
    name, arguments = "' + c['function']['name'] + '", "' + (c['function']['arguments'] | tojson) + '"
    inside = each.replace("NAME", name).replace("ARGUMENTS", arguments)
    loop, end = "{% for c in m.get('tool_calls') or [] %}", "{% endfor %}"
    edge = "{%% if m.get('tool_calls') %%}{{ '%s' }}{%% endif %%}"
    return CHATML.replace(f"{loop}CALL{end}", f"{edge % before}{loop}{{{{ '{inside}' }}}}{end}{edge % after}")


MISTRAL = calls_of("", "[TOOL_CALLS]NAME[ARGS]ARGUMENTS", "")
DEEPSEEK = calls_of("<calls>", "<call>function<sep>NAME\n```json\nARGUMENTS\n```</call>\n", "</calls>")
HARMONY = CHATML.replace(
    "CALL",
    "{{ ' to=functions.' + c['function']['name'] + '<|channel|>commentary json<|message|>' + "
    "(c['function']['arguments'] | tojson) + '<|call|>' }}",
)
GEMMA = CHATML.replace(
    "CALL",
    "{{ '<|tool_call>call:' + c['function']['name'] + '{' }}{% for key, value in c['function']['arguments'].items() %}"
    "{{ key + ':' + ('<|q|>' + value + '<|q|>' if value is string else value | tojson) }}"
    "{% if not loop.last %}{{ ',' }}{% endif %}{% endfor %}{{ '}<tool_call|>' }}",
)
PYTHON = CHATML.replace(
    "{% for c in m.get('tool_calls') or [] %}CALL{% endfor %}",
    "{% if m.get('tool_calls') %}{{ '<|calls|>[' }}{% for c in m['tool_calls'] %}{{ c['function']['name'] + '(' }}"
    "{% for key, value in c['function']['arguments'].items() %}"
    "{{ key + '=' + (\"'\" + value + \"'\" if value is string else value | string) }}"
    "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ')' }}{% if not loop.last %}{{ ', ' }}{% endif %}"
    "{% endfor %}{{ ']<|end_calls|>' }}{% endif %}",
)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (MISTRAL, NamedCalls("[TOOL_CALLS]", "")),
        (DEEPSEEK, NamedCalls("<call>function<sep>", "```</call>", ("<calls>", "</calls>"))),
        (HARMONY, NamedCalls("to=functions.", "<|call|>")),
        (GEMMA, NamedCalls("<|tool_call>call:", "<tool_call|>", quote="<|q|>")),
        (PYTHON, PythonCalls("<|calls|>", "<|end_calls|>")),
    ],
    ids=["Mistral", "DeepSeek", "gpt-oss", "Gemma 4", "LFM2"],
)
def test_other_ways_to_write_a_call_are_found_by_rendering_one(template: str, form: ToolCallFormat) -> None:
    assert find_tool_call_format(renderer(template)) == form


ARGUMENTS = {"city": "Rīga", "days": 3, "exact": True}


@pytest.mark.parametrize(
    ("text", "form", "rest", "names"),
    [
        ('[TOOL_CALLS]weather[ARGS]{"city": "Rīga", "days": 3, "exact": true}', NamedCalls("[TOOL_CALLS]", ""), "", 1),
        ('[TOOL_CALLS]weather{"city": "Rīga", "days": 3, "exact": true}', NamedCalls("[TOOL_CALLS]", ""), "", 1),
        (
            'Hm.<calls><call>weather<sep>{"city": "Rīga", "days": 3, "exact": true}</call>\n<call>weather<sep>'
            '{"city": "Rīga", "days": 3, "exact": true}</call></calls>',
            NamedCalls("<call>", "</call>", ("<calls>", "</calls>")), "Hm.", 2,
        ),
        (
            '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>'
            '{"city": "Rīga", "days": 3, "exact": true}<|call|>',
            NamedCalls("to=functions.", "<|call|>"), "<|channel|>commentary", 1,
        ),
        (
            '<|tool_call>call:weather{city:<q>Rīga<q>,days:3,exact:true}<tool_call|>',
            NamedCalls("<|tool_call>call:", "<tool_call|>", quote="<q>"), "", 1,
        ),
        ('weather\n{"city": "Rīga", "days": 3, "exact": true}', NamedCalls("", ""), "", 1),
        ('I say weather {"city": 1}', NamedCalls("", ""), 'I say weather {"city": 1}', 0),
        ("<|c|>[weather(city='Rīga', days=3, exact=True)]<|e|>", PythonCalls("<|c|>", "<|e|>"), "", 1),
        ("[weather(city='Rīga', days=3, exact=True)]", PythonCalls("", ""), "", 1),
        ("[other(a=1)]", PythonCalls("", ""), "[other(a=1)]", 0),
        ("<|c|>[weather(__import__('os'))]<|e|>", PythonCalls("<|c|>", "<|e|>"),
         "<|c|>[weather(__import__('os'))]<|e|>", 0),
        ("<|c|>[weather(city=open('x'))]", PythonCalls("<|c|>", ""), "<|c|>[weather(city=open('x'))]", 0),
        ('<|python_tag|>{"name": "weather", "parameters": {"city": "Rīga", "days": 3, "exact": true}}', BARE, "", 1),
    ],
)  # fmt: skip
def test_what_is_a_call_in_other_formats(text: str, form: ToolCallFormat, rest: str, names: int) -> None:
    found, calls = form.parse(text, [WEATHER])
    assert (found.strip(), [(call.name, json.loads(call.arguments)) for call in calls]) == (
        rest, [("weather", ARGUMENTS)] * names,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (HERMES.replace("{% if tools %}", "{% if false %}"), "leaves tools out"),
        ("{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + HERMES, "no tools"),
    ],
    ids=["tools left out", "tools refused"],
)
def test_a_template_that_does_not_show_tools_is_refused(template: str, reason: str) -> None:
    with pytest.raises(WhetError, match=reason):
        find_tool_call_format(renderer(template))


@pytest.mark.parametrize("call", ["", "{{ '<call>' + c['function']['name'] + '</call>' }}"])
def test_calls_that_cannot_be_read_are_no_format(call: str) -> None:
    assert find_tool_call_format(renderer(CHATML.replace("CALL", call))) is None


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rīga", "days": 3}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "form", "rest", "names"),
    [
        (CALL, FORMAT, "", ["weather"]),
        (f"Let me see.\n{CALL}\n{CALL}", FORMAT, "Let me see.", ["weather", "weather"]),
        ('<tool_call>{"name": "weather", "arguments": "{}"}', FORMAT, "", ["weather"]),
        ('It is {"name": "weather", "arguments": {}}', FORMAT, 'It is {"name": "weather", "arguments": {}}', []),
        ('<tool_call>{"name": "weather", "arg', FORMAT, '<tool_call>{"name": "weather", "arg', []),
        ('<tool_call>{"name": 7}</tool_call>', FORMAT, '<tool_call>{"name": 7}</tool_call>', []),
        ('{"name": "weather", "parameters": {}}', BARE, "", ["weather"]),
        ('{"name": "weather", "parameters": {}}; {"name": "weather", "parameters": {}}', BARE, "", ["weather"] * 2),
        ('{"name": "Anna", "parameters": {}}', BARE, '{"name": "Anna", "parameters": {}}', []),
        ('Here: {"name": "weather", "parameters": {}}', BARE, 'Here: {"name": "weather", "parameters": {}}', []),
        ('[TOOL_CALLS] [{"name": "weather", "arguments": {}}]', JsonCalls("[TOOL_CALLS]", ""), "", ["weather"]),
    ],
)
def test_what_is_a_call(text: str, form: ToolCallFormat, rest: str, names: list[str]) -> None:
    found, calls = form.parse(text, [WEATHER])
    assert (found.strip(), [call.name for call in calls]) == (rest, names)
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


TAGGED = CHATML.replace(
    "CALL",
    "{{ '<tool_call>\n<function=' + c['function']['name'] + '>\n' }}"
    "{% for key, value in c['function']['arguments'].items() %}"
    "{{ '<parameter=' + key + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}"
    "{% endfor %}{{ '</function>\n</tool_call>' }}",
)
TAGS = TaggedCalls(
    "<tool_call>\n<function=", ">\n<parameter=", ">\n", "\n</parameter>\n<parameter=",
    "\n</parameter>\n</function>\n</tool_call>", ">\n</function>\n</tool_call>",
)  # fmt: skip


def test_calls_with_tags_are_read_as_the_template_writes_them() -> None:
    assert find_tool_call_format(renderer(TAGGED)) == TAGS
    tool = {"function": {"name": "weather", "parameters": {"properties": {"zip": {"type": "string"}}}}}
    text = (
        "Let me see.\n<tool_call><function=weather><parameter=zip>04109</parameter>\n<parameter=days>3</parameter>\n"
        "<parameter=city>\nNew <b>York</b>\n</parameter>\n</function></tool_call>"
    )
    rest, (call,) = TAGS.parse(text, [tool])
    assert (rest, call.name) == ("Let me see.\n", "weather")
    assert json.loads(call.arguments) == {"zip": "04109", "days": 3, "city": "New <b>York</b>"}
    assert TAGS.parse("<tool_call>\n<function=now>\n</function>\n</tool_call>", [])[1][0].arguments == "{}"
    for broken in ("<tool_call>\n<function=now>\n<parameter=a>\n1", "<function=now>", "<tool_call>\n<function=>"):
        assert TAGS.parse(broken, []) == (broken, [])


WORDS = (
    *"{}[]\",: \nx>", "<tool_call>", "</tool_call>", '"name"', '"weather"', CALL, "<function=", "weather",
    "<parameter=", "</parameter>", "</function>", "<calls>", "<call>", "</call>", "</calls>", "()", "a=1", "<q>",
)  # fmt: skip
PIECES = st.lists(st.sampled_from(WORDS))
FORMATS = (
    FORMAT, BARE, TAGS, NamedCalls("<call>", "</call>", ("<calls>", "</calls>")), NamedCalls("", ""),
    NamedCalls("<call>", "</call>", quote="<q>"), PythonCalls("<call>", "</call>"), PythonCalls("", ""),
)  # fmt: skip


@given(PIECES.map("".join), st.sampled_from(FORMATS))
def test_any_answer_is_parsed_and_what_was_shown_stays_true(text: str, form: ToolCallFormat) -> None:
    rest, calls = form.parse(text, [WEATHER])
    assert calls or rest == text
    shown = 0
    for end in range(len(text) + 1):
        visible = visible_length(text[:end], form)
        assert shown <= visible or not form.opening
        shown = max(shown, visible)
    if calls and form.opening:
        assert rest.startswith(text[: visible_length(text, form)].rstrip())


class ScriptedEngine:
    """Generates given tokens; all else of the server is real."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids, self.waiting, self.running = ids, list[OnlineSequence](), list[OnlineSequence]()

    def submit(self, sequence: OnlineSequence) -> None:
        self.running.append(sequence)

    def step(self) -> None:
        for row in self.running:
            append_token(row, self._ids[len(row.completion.ids)])
        self.running = [row for row in self.running if not row.done]


def test_the_client_gets_calls_whole_and_streamed(tiny: InferenceModel) -> None:
    model = replace(tiny, renderer=renderer(HERMES))
    tokenizer = model.renderer.tokenizer
    ids = [*tokenizer.encode(f"Let me see. {CALL}", add_special_tokens=False), model.stop_ids[0]]
    metrics = Metrics()
    service = GenerationService(ScriptedEngine(ids), 8, metrics)
    options: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER]}
    with (
        running(make_app([ServedModel("m", model)], service, metrics, None)) as url,
        OpenAI(base_url=f"{url}v1", api_key="any", max_retries=0) as client,
    ):
        whole = client.chat.completions.create(**options)
        (call,) = whole.choices[0].message.tool_calls
        assert (whole.choices[0].finish_reason, whole.choices[0].message.content) == ("tool_calls", "Let me see.")
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rīga", "days": 3})
        chunks = list(client.chat.completions.create(**options, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas).strip() == "Let me see."
        (streamed,) = [each for delta in deltas for each in delta.tool_calls or ()]
        assert (streamed.index, streamed.function.model_dump()) == (0, call.function.model_dump())
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        # the result goes back as a message
        after = [
            *options["messages"],
            whole.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
        assert client.chat.completions.create(**{**options, "messages": after}).choices[0].message.tool_calls
        plain = client.chat.completions.create(**options, tool_choice="none").choices[0]
        assert (plain.finish_reason, plain.message.tool_calls) == ("stop", None)
        assert "<tool_call>" in plain.message.content


def test_a_call_that_cannot_be_read_is_text_and_the_log_says_so(
    tiny: InferenceModel, capfd: pytest.CaptureFixture[str]
) -> None:
    model = replace(tiny, renderer=renderer(CHATML.replace("CALL", "{{ '<' + c['function']['name'] + '>' }}")))
    ids = [*model.renderer.tokenizer.encode("<weather>", add_special_tokens=False), model.stop_ids[0]]
    metrics = Metrics()
    service = GenerationService(ScriptedEngine(ids), 8, metrics)
    options: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER]}
    with (
        running(make_app([ServedModel("m", model)], service, metrics, None)) as url,
        OpenAI(base_url=f"{url}v1", api_key="any", max_retries=0) as client,
    ):
        for _ in range(2):
            answer = client.chat.completions.create(**options).choices[0]
            assert (answer.finish_reason, answer.message.content, answer.message.tool_calls) == (
                "stop", "<weather>", None,
            )  # fmt: skip
    assert capfd.readouterr().err.count("m: its chat template writes tool calls in a way that whet cannot read") == 1


# A model that calls tools


CITIES = ("Riga", "Oslo", "Bern", "Rome")


@pytest.mark.slow
@pytest.mark.parametrize("template", [HERMES, MISTRAL, TAGGED, PYTHON], ids=["JSON", "named", "tags", "Python"])
def test_a_model_that_was_trained_to_call_a_tool_calls_it(
    template: str, tmp_path: Path, whet: Any, recipe: str
) -> None:
    """The whole way: training with the template, the engine's tokens, the client. The faster one is
    `test_the_client_gets_calls_whole_and_streamed`."""
    (tmp_path / "template.jinja").write_text(template)
    tool = {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}}}},
    }  # fmt: skip

    def asking(city: str) -> dict[str, Any]:
        return {"role": "user", "content": f"Weather in {city}?"}

    lines = []
    for city in CITIES:
        function = {"name": "weather", "arguments": json.dumps({"city": city, "days": 3})}
        call = {"id": "call00001", "type": "function", "function": function}
        turns = [
            asking(city),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00001", "content": f"rain in {city}"},
            {"role": "assistant", "content": f"It rains in {city}."},
        ]
        lines.append(json.dumps({"messages": turns, "tools": [tool]}))
    (tmp_path / "calls.jsonl").write_text("\n".join(lines) + "\n")
    run = tmp_path / "run"
    ended = whet(
        "train", recipe, f"run.dir={run}", f"data.template={tmp_path / 'template.jinja'}", "data.max_length=512",
        f"data.sources=[{{path: {tmp_path / 'calls.jsonl'}}}]", "data.validation=null", "train.steps=150",
        "train.optimizer.lr=1e-2", "checkpoint.every=150",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    loaded = load_models_to_serve([str(run)])
    with (
        running(make_serving_app(loaded, 8)) as url,
        OpenAI(base_url=f"{url}v1", api_key="any", max_retries=0) as client,
    ):
        for city in CITIES:
            options: dict[str, Any] = {
                "model": "run", "messages": [asking(city)], "tools": [tool], "temperature": 0, "max_tokens": 200,
            }  # fmt: skip
            answer = client.chat.completions.create(**options).choices[0]
            assert answer.finish_reason == "tool_calls", answer
            (call,) = answer.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": city, "days": 3})
            assert not answer.message.content
            chunks = list(client.chat.completions.create(**options, stream=True))
            (streamed,) = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
            assert streamed.function.model_dump() == call.function.model_dump()
            assert not "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            result = {"role": "tool", "tool_call_id": call.id, "content": f"rain in {city}"}
            turns = [asking(city), answer.message.model_dump(exclude_none=True), result]
            after = client.chat.completions.create(**{**options, "messages": turns}).choices[0]
            assert (after.finish_reason, after.message.content) == ("stop", f"It rains in {city}.")
