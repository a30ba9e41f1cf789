"""Faults that were met once: each had a run that looked healthy or an error that explained nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from whet.core.errors import BadRecordError, WhetError
from whet.data.conversation import Conversation, Origin
from whet.data.prepare.store import Store
from whet.data.render.renderer import Rendered, Renderer
from whet.data.render.template_text import PROBE_TOOL

from .conftest import write_store
from .render_helpers import (
    conversation_of,
    expected_loss,
    render,
    smollm2,
    supervised_text,
    tokenizer_with,
    transformers_ids,
)
from .template_families import CHATML, CHATML_TEMPLATE, DATED, GEMMA, LLAMA2, MISTRAL, small_tokenizer, tokenizer_of
from .test_prepare import GOOD, account, go

TURNS = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]


def test_templates_with_a_date_work() -> None:
    tokenizer = tokenizer_of(DATED)
    rendered = render(tokenizer, TURNS)
    assert rendered.ids.tolist() == transformers_ids(tokenizer, TURNS)
    assert rendered.loss.tolist() == expected_loss(tokenizer, DATED.pieces(TURNS))


def test_a_date_is_fixed() -> None:
    renderer = Renderer(tokenizer_of(DATED), "assistant", today="2001-02-03")
    assert "Today: 03 Feb 2001" in renderer.layout(conversation_of(*TURNS)).text


def test_a_header_that_matches_the_prompt_only_in_part_is_not_supervised() -> None:
    """The last user turn gets a reminder; the prompt of an earlier answer has it, the whole conversation has not."""
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ '[INST] ' + m['content'] + (' Be brief.' if loop.revindex <= 2 else '') + ' [/INST]' }}"
        "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer = small_tokenizer(template, ("[INST]", "[/INST]", "</s>"), eos="</s>")
    with pytest.raises(BadRecordError) as refused:
        render(tokenizer, TURNS)
    assert refused.value.reason == "no common header"


def test_a_header_is_not_supervised_when_texts_are_quotes_only() -> None:
    turns = [("system", '"'), *TURNS[:2], ("user", '"'), ("assistant", "d"), ("user", "e"), ("assistant", "f")]
    tokenizer = tokenizer_of(MISTRAL)
    assert supervised_text(tokenizer, render(tokenizer, turns)) == " b</s>¦ d</s>¦ f</s>"


def test_whitespace_that_is_an_added_token_is_no_end_of_turn() -> None:
    backend = Tokenizer.from_str(tokenizer_of(GEMMA).backend_tokenizer.to_str())
    backend.add_tokens([AddedToken("\n", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = GEMMA.template
    assert supervised_text(tokenizer, render(tokenizer, TURNS)) == "b<end_of_turn>¦d<end_of_turn>"


@pytest.mark.parametrize("answer", ["user", "assistant", '"', "'\\'"])
def test_an_answer_of_template_constants_is_not_empty(answer: str) -> None:
    tokenizer = tokenizer_of(LLAMA2)
    assert supervised_text(tokenizer, render(tokenizer, [("user", "a"), ("assistant", answer)])) == f" {answer} </s>"


def test_an_answer_of_template_constants_is_learned_beside_text_that_the_template_searches() -> None:
    """`</think>` makes this template branch, so constants of the template are not replaced: `user` is one."""
    template = CHATML_TEMPLATE.replace(
        "m['content'] +", "(m['content'].split('</think>')[-1] if m.role != 'user' else m['content']) +"
    )
    tokenizer = small_tokenizer(template, CHATML.markers, eos="<|im_end|>")
    turns = [("user", "a"), ("assistant", "<think>r</think>b"), ("user", "c"), ("assistant", "user")]
    assert supervised_text(tokenizer, render(tokenizer, turns)) == "b<|im_end|>¦user<|im_end|>"


@pytest.mark.parametrize(
    "search",
    ["{% set tag = '<result>' %}{% set ns.found = content[:8] == tag %}",
     "{% for tag in ['<result>'] %}{% if content[:8] == tag %}{% set ns.found = true %}{% endif %}{% endfor %}"],
    ids=["variable", "loop"],
)  # fmt: skip
def test_a_template_may_name_the_constants_that_it_searches_for(search: str) -> None:
    """As Unsloth's template for Qwen3, which looks for results of tools in user turns."""
    start = "{% set ns = namespace(found=false) %}{% set content = messages[0].content %}"
    template = CHATML_TEMPLATE.replace("m['content']", "('[' if ns.found else '(') + m['content']")
    tokenizer = tokenizer_with(start + search + template)
    for question, opened in (("<result>7</result>", "["), ("Hi", "(")):
        turns = [("user", question), ("assistant", "Yes")]
        assert supervised_text(tokenizer, render(tokenizer, turns)) == f"{opened}Yes<|im_end|>"


@pytest.mark.parametrize("expression", ["1 // 0", "range(10**9) | list", "'{}{}'.format(1)", "cycler().next()"])
def test_a_template_that_fails_in_any_way_is_refused(expression: str) -> None:
    tokenizer = tokenizer_with(CHATML_TEMPLATE.replace("m['content']", f"m['content'] ~ ({expression})"))
    with pytest.raises(BadRecordError):
        render(tokenizer, TURNS)


def test_an_answer_that_starts_with_a_character_without_a_token_is_supervised() -> None:
    tokenizer = smollm2()
    assert supervised_text(tokenizer, render(tokenizer, [("user", "a"), ("assistant", "\x16z")])) == "z<|im_end|>"


def test_train_on_all_counts_a_supervised_end_of_turn(own_cache: Path, jsonl) -> None:
    assert account(go(jsonl(GOOD), train_on="all"))["eos_supervised"] == 1.0


def test_the_default_of_several_named_templates_is_used() -> None:
    tokenizer = small_tokenizer(None, CHATML.markers, eos="<|im_end|>")
    tokenizer.chat_template = {"default": CHATML_TEMPLATE, "rag": "x"}
    assert Renderer(tokenizer, "assistant").text.source == CHATML_TEMPLATE
    tokenizer.chat_template = {"rag": "x", "tool": "y"}
    with pytest.raises(WhetError, match="multiple chat templates"):
        Renderer(tokenizer, "assistant")


TOOL_USE = """{%- macro kind(schema) %}
    {{- schema.type }}
    {%- for part in (schema.properties or {}).values() %}{{ kind(part) }}{% endfor %}
{%- endmacro %}
{{ '<|im_start|>system\n' }}
    {%- for tool in tools %}{{ kind(tool.function.parameters) }}{% endfor %}
<|im_end|>
"""


@pytest.mark.parametrize("start", ["", "\n", "  ", "{# of a model #}\n"])
@pytest.mark.parametrize("end", ["", "\n", "  ", "\n\n"])
def test_conversations_with_tools_have_the_template_for_them(start: str, end: str) -> None:
    """As in transformers, whitespace included. A recursive macro and what the templates set stay in their branch."""
    tokenizer = small_tokenizer(None, CHATML.markers, eos="<|im_end|>")
    templates = {name: f"{start}{text}{end}" for name, text in (("default", ""), ("tool_use", TOOL_USE))}
    tokenizer.chat_template = {name: text + CHATML_TEMPLATE + end for name, text in templates.items()}
    for train_on in ("all", "assistant"):
        renderer = Renderer(tokenizer, train_on)
        for tools in ((), (PROBE_TOOL,)):
            conversation = Conversation(conversation_of(*TURNS).messages, Origin("here", 1), tools)
            for prompt in (False, True):
                dicts = renderer.text.as_dicts(conversation.messages)
                wanted = tokenizer.apply_chat_template(
                    dicts, tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt
                )
                assert ("objectstring" in wanted) == bool(tools)
                assert renderer.text.apply(conversation.messages, tools, prompt) == wanted
                assert renderer.text.render(dicts, tools, prompt) == wanted
            if not end.strip("\n"):
                assert isinstance(renderer.render_items([conversation])[0], Rendered)


@pytest.mark.parametrize("name", ["tokens.idx", "tokens.bin", "loss.idx", "origin.npy", "targets.npy", "hashes.npy"])
@pytest.mark.parametrize("damage", ["missing", "empty"])
def test_a_store_with_a_file_missing_or_emptied_is_a_whet_error(tmp_path: Path, name: str, damage: str) -> None:
    folder = write_store(tmp_path / "store", [([1, 2], [0, 1])]).folder
    (folder / name).unlink()
    if damage == "empty":
        (folder / name).touch()
    with pytest.raises(WhetError, match=name):
        Store(folder)


def test_an_index_of_nothing_at_all_is_read(tmp_path: Path) -> None:
    from whet.data.indexed_dataset import IndexedReader

    (tmp_path / "t.bin").touch()
    (tmp_path / "t.idx").write_bytes(b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + b"\1" + bytes(16))
    assert len(IndexedReader(tmp_path / "t")) == 0


def test_offsets_that_point_elsewhere_are_an_error(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", [([1, 2], [0, 1]), ([3, 4], [0, 1])]).folder
    raw = bytearray((folder / "tokens.idx").read_bytes())
    raw[34:42] = (3).to_bytes(4, "little") + (2).to_bytes(4, "little")  # sizes 3, 2 where offsets say 2, 2
    (folder / "tokens.idx").write_bytes(raw)
    with pytest.raises(WhetError, match="corrupt at sequence 0"):
        Store(folder).ids(0)
    with pytest.raises(WhetError, match="corrupt at sequence 0"):
        Store(folder).gather(np.array([1, 0]), np.empty(5, np.int64), np.empty(5, np.uint8))


def test_an_unreadable_source_is_a_whet_error(own_cache: Path, jsonl, monkeypatch) -> None:
    path = jsonl(GOOD)

    def forbidden(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("whet.data.read.containers.container.hash_file", forbidden)
    with pytest.raises(WhetError, match=str(path)):
        go(path)
