"""Base models, which have no chat template: plain text needs none, and conversations get one by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from whet.config import Config
from whet.data.conversation import Conversation, Message, Origin
from whet.data.indexed_dataset import IndexedWriter
from whet.data.render.renderer import Rendered, Renderer
from whet.run.data import load_run_tokenizer, prepare_data
from whet.tokenizer.named_templates import NAMED_TEMPLATES

EOS, BOS = "<|endoftext|>", "<s>"


def make_tokenizer(folder: Path, bos: bool = False, known: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[EOS, BOS, *known], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["the fox and the dog"], trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, bos_token=BOS)
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-NeoX with separate head, and no chat template."""
    folder = tmp_path_factory.mktemp("base") / "neox"
    tokenizer = make_tokenizer(folder)
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=256, eos_token_id=0, bos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    return folder


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def recipe_of(base: Path, data: Path, run: Path, *settings: str) -> list[str]:
    recipe = run.with_suffix(".yaml")
    recipe.write_text(
        f"model: {{path: {base}}}\n"
        f"data: {{sources: [{{path: {data}}}], validation: {{fraction: 0.2}}, max_length: 128}}\n"
        "train: {steps: 2, batch: {conversations: 4}, optimizer: {lr: 2e-4}}\n"
    )
    return [str(recipe), f"run.dir={run}", *settings]


def test_plain_text_needs_no_template(base: Path, whet: Callable[..., Any], tmp_path: Path) -> None:
    text = write_lines(tmp_path / "text.jsonl", [{"text": f"the fox number {i}"} for i in range(20)])
    checked = whet("check", *recipe_of(base, text, tmp_path / "run"), "--all")
    assert checked.code == 0, checked.out
    assert "plain text needs none" in checked.out + checked.err
    trained = whet("train", *recipe_of(base, text, tmp_path / "run"))
    assert trained.code == 0, trained.err
    other = write_lines(tmp_path / "other.jsonl", [{"text": f"the dog number {i}"} for i in range(9)])
    for model in (base, tmp_path / "run"):
        assert json.loads(whet("eval", str(model), "--data", str(other), "--json").out)["val_perplexity"] > 1
        assert whet("chat", str(model), "--unconditional", "--max-new-tokens", "3").code == 0
    refused = whet("chat", str(base), "--prompt", "hi")
    assert refused.code == 1
    assert "`template: chatml`" in refused.err


def test_token_files_need_no_template(base: Path, tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "tokens", np.uint16)
    for number in range(20):
        tokens = np.array([5, 6, 7 + number, 0], dtype=np.int32)
        writer.add(tokens, np.array([len(tokens)], dtype=np.int32))
    writer.finish()
    config = Config.model_validate(
        {"model": {"path": str(base)},
         "data": {"sources": [{"path": str(tmp_path / "tokens.bin")}], "validation": {"fraction": 0.2}},
         "train": {"batch": {"conversations": 4}, "optimizer": {"lr": 0.1}}}
    )  # fmt: skip
    data = prepare_data(config)
    assert len(data.train_documents) + len(data.validation_documents) == 20
    assert data.train.store.ids(19).tolist() == tokens.tolist()


@pytest.mark.parametrize("settings", [(), ("adapter={rank: 2}",)], ids=["full", "lora"])
def test_a_named_template_adds_trains_and_exports_its_tokens(
    base: Path, whet: Callable[..., Any], tmp_path: Path, settings: tuple[str, ...]
) -> None:
    talk = [{"role": "user", "content": "the fox?"}, {"role": "assistant", "content": "  the dog"}]
    data = write_lines(tmp_path / "talk.jsonl", [{"messages": talk * (1 + i % 2)} for i in range(20)])
    refused = whet("train", *recipe_of(base, data, tmp_path / "run"))
    assert refused.code == 1
    assert "`template: chatml`" in refused.err
    assert not (tmp_path / "run").exists()
    trained = whet("train", *recipe_of(base, data, tmp_path / "run", "data.template=chatml", *settings))
    assert trained.code == 0, trained.err

    export = tmp_path / "run/exports/merged"
    tokenizer, model = AutoTokenizer.from_pretrained(export), AutoModelForCausalLM.from_pretrained(export)
    before = AutoModelForCausalLM.from_pretrained(base)
    first = before.config.vocab_size
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [first, first + 1]
    assert first + 1 in model.generation_config.eos_token_id
    ids = tokenizer.apply_chat_template(talk, return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>user\nthe fox?<|im_end|>\n<|im_start|>assistant\n  the dog<|im_end|>\n"
    old = AutoTokenizer.from_pretrained(base)
    for name in ("get_input_embeddings", "get_output_embeddings"):
        rows, known = getattr(model, name)().weight, getattr(before, name)().weight
        for number, marker in ((first, "<|im_start|>"), (first + 1, "<|im_end|>")):
            start = known[old(marker).input_ids].mean(dim=0)
            moved = (rows[number] - start).norm() / start.norm()
            assert 1e-4 < moved < 0.5, (name, marker, moved)  # from the mean, and trained


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("known", [False, True], ids=["added", "known"])
def test_the_mask_of_a_named_template_is_exact(name: str, bos: bool, known: bool, tmp_path: Path) -> None:
    tokens = NAMED_TEMPLATES[name].tokens
    size = len(make_tokenizer(tmp_path, bos, tokens if known else ()))
    config = Config.model_validate(
        {"model": {"path": "builtin:tiny", "tokenizer": str(tmp_path)},
         "data": {"sources": [{"path": "builtin:orders"}], "template": name},
         "train": {"batch": {"rows": 1}, "optimizer": {"lr": 0.1}}}
    )  # fmt: skip
    assert config.model.add_tokens == list(tokens)
    tokenizer = load_run_tokenizer(config)
    assert len(tokenizer) == size + (0 if known else len(tokens))
    turns = [("system", "be kind"), ("user", "a?"), ("assistant", "b"), ("user", "c?"), ("assistant", "d")]
    conversation = Conversation(tuple(Message(*turn) for turn in turns), Origin("x", 1))
    renderer = Renderer(tokenizer, "assistant")
    (rendered,) = renderer.render_items([conversation])
    assert isinstance(rendered, Rendered)
    end = NAMED_TEMPLATES[name].end_of_turn
    assert tokenizer.decode(rendered.ids[rendered.loss == 1]) == f"b{end}d{end}"
    assert (rendered.ids[0] == tokenizer.bos_token_id) == bos
    assert "be kind" in tokenizer.decode(rendered.ids)
    assert renderer.end_of_turn() == tokenizer.convert_tokens_to_ids(end)
    prompt = renderer.prompt_ids(conversation.messages[:2])
    assert rendered.ids[: len(prompt)].tolist() == prompt


def test_a_misspelt_template_names_those_there_are(tmp_path: Path, whet: Callable[..., Any], base: Path) -> None:
    data = write_lines(tmp_path / "talk.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    ended = whet("check", *recipe_of(base, data, tmp_path / "run", "data.template=chatlm"))
    assert ended.code == 1
    assert "chatlm is neither a file nor a template of the tokenizer, which has none" in ended.out + ended.err
    assert "chatml, llama3, gemma" in ended.out + ended.err
