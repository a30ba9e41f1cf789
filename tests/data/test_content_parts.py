"""Content as several text parts: a template that reads parts gets them, others get one text."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from whet.core.errors import BadRecordError
from whet.data.conversation import Origin
from whet.data.read.records.messages import parse_messages
from whet.data.render.renderer import Rendered, Renderer

from .render_helpers import supervised_text, tokenizer_with
from .template_families import CHATML_TEMPLATE

NAMES = {"messages": "messages", "role": "role", "content": "content", "tools": "tools"}
RECORD = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "See this: "}, {"type": "text", "text": "a b"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes."}, {"type": "text", "text": " No."}]},
    ]
}
CONTENT = "m['content']"
LOOP = "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}PART{% endfor %}{% endif %}"


def reading(part: str) -> PreTrainedTokenizerFast:
    """ChatML that writes each part of a content like this."""
    before, after = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}", "{{ '<|im_end|>' + '\n' }}"
    _, _, prompt = CHATML_TEMPLATE.partition("{% endfor %}")
    return tokenizer_with(before + LOOP.replace("PART", part) + after + "{% endfor %}" + prompt)


def render(tokenizer: PreTrainedTokenizerFast) -> tuple[Renderer, Rendered]:
    renderer = Renderer(tokenizer, "assistant")
    conversation = parse_messages(RECORD, NAMES, Origin("here", 1))
    [first, second] = renderer.render_items([conversation, conversation])
    assert not isinstance(first, BadRecordError)
    assert isinstance(second, Rendered)
    assert first.loss.tolist() == second.loss.tolist()
    supervised = first.loss.tolist().index(1)
    assert renderer.prompt_ids(conversation.messages[:1]) == first.ids[:supervised].tolist()
    return renderer, first


@pytest.mark.parametrize(
    ("part", "question", "answer"),
    [
        ("{{ c.text }}{% if not loop.last %}{{ '\n' }}{% endif %}", "See this: \na b", "Yes.\n No."),  # Granite 4
        ("{{ c.text | trim }}", "See this:a b", "Yes.No."),  # Gemma 3
        ("{{ c['text'] }}", "See this: a b", "Yes. No."),
    ],
)
def test_a_template_that_reads_parts_writes_them_its_own_way(part: str, question: str, answer: str) -> None:
    tokenizer = reading(part)
    _, rendered = render(tokenizer)
    assert rendered.ids.tolist() == tokenizer.apply_chat_template(RECORD["messages"], return_dict=False)
    assert question in tokenizer.decode(rendered.ids)
    assert supervised_text(tokenizer, rendered) == f"{answer}<|im_end|>"


@pytest.mark.parametrize(
    "content",
    [
        CONTENT,
        f"{CONTENT} | trim",  # prints a list as Python does
        f"{CONTENT} | string",
        f"({CONTENT} if {CONTENT} is string else {CONTENT} | tojson)",
        f"({CONTENT} if {CONTENT} is string else {CONTENT}[0].text)",
        f"({CONTENT} if {CONTENT} is string else '')",
    ],
)
def test_a_template_that_does_not_read_parts_gets_one_text(content: str) -> None:
    tokenizer = tokenizer_with(CHATML_TEMPLATE.replace(CONTENT, f"({content})"))
    _, rendered = render(tokenizer)
    assert "See this: a b" in tokenizer.decode(rendered.ids)
    assert supervised_text(tokenizer, rendered) == "Yes. No.<|im_end|>"


def test_a_template_that_takes_parts_only_gets_each() -> None:
    parts = "{% for c in m.content %}{{ c.text }}|{% endfor %}"
    tokenizer = tokenizer_with(CHATML_TEMPLATE.replace(f" + {CONTENT} + ", f" }}}}{parts}{{{{ "))
    _, rendered = render(tokenizer)
    assert supervised_text(tokenizer, rendered) == "Yes.| No.|<|im_end|>"
