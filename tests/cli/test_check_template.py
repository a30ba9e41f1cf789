"""`whet check` on chat templates with traps. Each test shows first that the data passes with a good template."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import pytest

TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
GOOD = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT


@pytest.fixture
def good(check: Any, write: Any, template: Any) -> Any:
    """Forty conversations that pass with a plain template; gives their file."""
    file = write()
    check(template(GOOD)).passed()
    return file


def test_no_end_of_turn(check: Any, template: Any, good: Any) -> None:
    found = check(template(GOOD.replace("<|im_end|>", "")))
    found.fault("template", "no end-of-turn token after message 2", "data.template=COPY.jinja")
    found.fault("bad lines", f"{good}:1: ", "could not learn to stop")
    found.fault("data", "40 no end of turn")


def test_an_unsupervised_end_of_turn_is_a_fault(check: Any, template: Any, good: Any) -> None:
    check(template(GOOD), "data.train_on=all").passed()
    found = check(template(GOOD.replace("<|im_end|>", "")), "data.train_on=all")
    found.fault("end of turn", str(good), "supervised in 0.0%", "learns not to stop", "see template")
    assert "does not end an answer with <|im_end|>" in found.texts("template", "warning")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("m['content']", "m['content'][:5]"), "drops text of message 1 (role 'user')"),
        (("m['content']", "m['content']|upper"), "changes the text of a message"),
        (("m['content']", "m['content'] + m['content']"), "repeats the text of a message"),
    ],
    ids=["drops", "rewrites", "repeats"],
)
def test_content_is_dropped_or_rewritten(
    check: Any, template: Any, good: Any, change: tuple[str, str], words: str
) -> None:
    found = check(template(GOOD.replace(*change)))
    found.fault("template", words)
    found.fault("bad lines", f"{good}:1: ", words)


def test_a_message_without_a_place_in_the_template(check: Any, write: Any, talk: Any, template: Any, good: Any) -> None:
    system = {"messages": [{"role": "system", "content": "Be brief."}, *talk(99)["messages"]]}
    write(system)
    check(template(GOOD)).passed()
    without = GOOD.replace(TURN, "{% if m['role'] != 'system' %}" + TURN + "{% endif %}")
    found = check(template(without))
    found.fault("bad lines", f"{good}:1: ", "drops text of message 1 (role 'system')")
    found.texts("template", "ok")  # the other conversations have no system message


def test_the_generation_prompt_differs_from_the_answer(check: Any, template: Any, good: Any) -> None:
    found = check(template(GOOD.replace("<|im_start|>assistant", "<|im_start|>bot")))
    found.fault("template", "starts message 2 differently from its generation prompt")
    found.fault("bad lines", f"{good}:1: ", "generation prompt")


def test_the_generation_prompt_goes_on_beyond_the_answer(check: Any, template: Any, good: Any) -> None:
    found = check(template(GOOD.replace("assistant\n' }}", "assistant\nAnswer: ' }}")))
    found.fault("template", "which has 'Answer: ' where the message has 'Very well, thank you.'")
    found.fault("bad lines", f"{good}:1: ", "differently from its generation prompt")


def test_no_generation_prompt(check: Any, write: Any, template: Any) -> None:
    write()
    found = check(template(GOOD.removesuffix(PROMPT)))
    found.warning("template", "no generation prompt", "learns to write '<|im_start|>assistant\\n'")
    line = re.findall(r"Append (.*) to a copy of the template", found.texts("template", "warning"))[0]
    check(template(GOOD.removesuffix(PROMPT) + line)).passed()


def test_a_generation_prompt_that_is_always_there(check: Any, write: Any, template: Any) -> None:
    write()
    found = check(template(GOOD.removesuffix(PROMPT) + "{{ '<|im_start|>assistant\n' }}"))
    found.passed()
    assert "ends with <|im_end|>" in found.texts("template", "ok")


def test_no_end_after_the_last_answer(check: Any, write: Any, template: Any) -> None:
    file = write()
    text = GOOD.replace(
        "+ '<|im_end|>\n' }}", "}}{% if not loop.last or add_generation_prompt %}<|im_end|>\n{% endif %}"
    )
    found = check(template(text))
    found.fault("bad lines", f"{file}:1: ", "no end-of-turn token after message 2")
    line = re.findall(r"Append (.*?) to a copy of the template", found.texts("template", "fault"))[0]
    check(template(text + line)).passed()


def test_the_prompt_opens_reasoning_that_answers_have_not(check: Any, write: Any, template: Any) -> None:
    file = write()
    found = check(template(GOOD.replace("assistant\n' }}", "assistant\n<think>\n' }}")))
    found.warning("reasoning tag only in the prompt", "40 of 40 conversations", f"first {file}:1", "Add the reasoning")


def test_the_prompt_has_other_whitespace_than_the_conversation(check: Any, write: Any, template: Any) -> None:
    file = write()
    found = check(template(GOOD.replace("'<|im_start|>assistant\n' }}", "'\n<|im_start|>assistant\n' }}")))
    found.warning("other whitespace in the prompt", "40 of 40 conversations", f"first {file}:1", "data.template=COPY")


def test_a_template_that_requires_tools(check: Any, write: Any, talk: Any, template: Any) -> None:
    tool = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
    (write(talk(0)).parent / "data.jsonl").write_text(
        "".join(json.dumps({**talk(i), "tools": [tool]}) + "\n" for i in range(40))
    )
    found = check(template("{{ '<|im_start|>system\n' + tools[0].function.name + '<|im_end|>\n' }}" + GOOD))
    found.warning("template", "requires tools, in chat and eval too")
    assert "ends with <|im_end|>" in found.texts("template", "ok")


def test_the_template_begins_twice(check: Any, template: Any, good: Any) -> None:
    found = check(template("{{ bos_token }}" + GOOD))
    found.fault("template", "40 of 40 conversations begin with <|im_start|> twice", f"first {good}:1", "Remove")


def test_template_and_text_both_begin(check: Any, write: Any, talk: Any, template: Any) -> None:
    setting = template(
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + m['content'] + '\n' }}{% else %}"
        "{{ 'Answer: ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Answer: ' }}{% endif %}"
    )
    file = write()
    check(setting).passed()
    write(talk(99), talk(0, question="<|im_start|>Who are you?"))
    found = check(setting)
    found.fault("template", "1 of 42 conversations begin with <|im_start|> twice", f"first {file}:2")
    found.fault("control tokens in the text", f"first {file}:2")


def test_reasoning_of_earlier_turns_is_left_out(check: Any, write: Any, talk: Any, template: Any) -> None:
    think = "{{ '<think>' + m['reasoning_content'] + '</think>' }}"
    think = "{% if m.get('reasoning_content') and loop.last %}" + think + "{% endif %}"
    text = "{{ '<|im_start|>' + m['role'] + '\n' }}" + think + "{{ m['content'] + '<|im_end|>\n' }}"
    setting = template("{% for m in messages %}" + text + "{% endfor %}" + PROMPT)
    first, second = (talk(i, reasoning_content=f"Twice {i}.")["messages"] for i in (98, 99))
    file = write({"messages": second})
    check(setting).passed()
    write({"messages": second}, {"messages": [*first, *second]})
    found = check(setting)
    found.warning("reasoning left out by the template", "1 of 42 conversations", f"first {file}:2", "not trained on")


def test_the_template_inserts_the_date(check: Any, template: Any, good: Any) -> None:
    dated = "{{ '<|im_start|>system\n' + strftime_now('%Y-%m-%d') + '<|im_end|>\n' }}" + GOOD
    check(template(dated)).warning("template", "inserts the date", datetime.date.today().isoformat())


@pytest.mark.parametrize("text", ["{% for m in messages %}", "{{ nothing.here.at_all }}", ""], ids=str)
def test_a_template_that_is_broken(check: Any, template: Any, good: Any, text: str) -> None:
    found = check(template(text))
    assert found.code == 1
    assert "template" in "".join(each["text"] for each in found.checks if each["level"] == "fault")
    found.texts("leak", "ok")  # the model is checked anyway


def test_a_generation_prompt_that_ends_in_a_space(check: Any, write: Any, template: Any) -> None:
    answers = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "three"}]
    file = write({"messages": answers})
    spaced = template(
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    found = check(spaced)
    assert found.code == 0
    words = found.texts("straddling tokens", "warning")
    assert f"of 41 answers share a token with their prompt, first {file}:1" in words
    assert "assistant: ' is encoded as ' ' by itself and as ' three' with the answer" in words
    assert "Other engines (vLLM, " in words
