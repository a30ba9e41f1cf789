"""What marked text trains is what chat, evaluation and exports speak."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from examples import examples
from whet.data.config import DataConfig, Marker, Markers, Source
from whet.data.conversation import Conversation, MarkedText, Message, Origin
from whet.data.render.marked_text import MarkedRenderer
from whet.data.render.renderer import Rendered, Renderer
from whet.exporting.dtypes import EXPORT_DTYPES
from whet.exporting.exporter import write_export
from whet.exporting.spec import ExportSpec, GenerationSettings
from whet.exporting.trained_model import TrainedModel
from whet.inference.inference_model import stop_token_ids
from whet.model.config import ModelConfig
from whet.model.load.pretrained import load_model
from whet.model.load.tokenizer import load_tokenizer
from whet.run.data import turn_markers
from whet.tokenizer.encoders import SentencePieceEncoder

U, A = "<<<|user|>>>", "<<<|assistant|>>>"
SYSTEM = Marker(text="<<<|system|>>>", id=6)
HERE = Origin("lumi.jsonl", 1)
TEXT = st.text(st.sampled_from("ab helo<|>\nkā12😀"), max_size=12)


def markers(with_system: bool = False) -> Markers:
    return Markers(
        user=Marker(text=U, id=7), assistant=Marker(text=A, id=8), system=SYSTEM if with_system else None
    )  # fmt: skip


def config_of(path: Path, markers: Markers) -> tuple[ModelConfig, DataConfig]:
    data = DataConfig(sources=[Source(path="lumi.jsonl")], markers=markers)
    return ModelConfig(path="builtin:tiny", tokenizer=str(path)), data


@pytest.mark.parametrize("with_system", [False, True])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_chat_s_prompt_is_what_training_had_before_the_answer(
    pieces: Callable[..., Path], kind: str, with_system: bool
) -> None:
    path = pieces(kind, byte_fallback=True)
    model, data = config_of(path, markers(with_system))
    trained = MarkedRenderer(SentencePieceEncoder(path), markers(with_system), "assistant")
    chat = Renderer(load_tokenizer(model, turn_markers(data)), "assistant", stop_ids=[8])
    assert stop_token_ids(chat, model) == [3, 8]

    @settings(max_examples=examples(80), deadline=None)
    @given(system=st.none() | TEXT, asked=st.lists(TEXT, min_size=1, max_size=3))
    def same(system: str | None, asked: list[str]) -> None:
        said = [] if system is None else [Message("system", system)]
        for text in asked:
            said += [Message("user", text), Message("assistant", f"{text} yes")]
        conversation = Conversation(tuple(said), HERE)
        (document,) = trained.render_items([conversation])
        assert isinstance(document, Rendered)
        prompt = chat.prompt_ids(said[:-1])
        ids, loss = document.ids.tolist(), document.loss.tolist()
        assert ids[: len(prompt)] == prompt
        assert set(loss[len(prompt) :]) == {1}, "all that follows the prompt is the answer, its marker and the end"
        assert loss[len(prompt) - 1] == 0
        (other,) = chat.encode_layouts([chat.layout(conversation)])  # by sentinels in the template
        assert isinstance(other, Rendered)
        assert other.ids.tolist() == ids
        assert other.loss.tolist() == [*loss[:-1], 0], "by a template, what follows the end of turn is not learned"

    same()


def test_a_marked_line_is_the_template_s_text(pieces: Callable[..., Path]) -> None:
    path = pieces("bpe", byte_fallback=True)
    model, data = config_of(path, markers())
    chat = Renderer(load_tokenizer(model, turn_markers(data)), "assistant")
    text = f"{U} hello{U}{A}sveiki  kā{A}{U}12{U}{A}345 {A}"
    (document,) = MarkedRenderer(SentencePieceEncoder(path), markers(), "assistant").render_items(
        [MarkedText(text, HERE)]
    )
    assert isinstance(document, Rendered)
    said = [("user", " hello"), ("assistant", "sveiki  kā"), ("user", "12"), ("assistant", "345 ")]
    whole = chat.text.apply([Message(role, content) for role, content in said])
    assert whole == text + "<|endoftext|>"
    assert document.ids.tolist() == chat.tokenizer.encode(whole, add_special_tokens=False)


def test_an_export_stops_at_the_closing_marker_and_at_the_end(pieces: Callable[..., Path], tmp_path: Path) -> None:
    model, data = config_of(pieces("bpe"), markers())
    tokenizer = load_tokenizer(model, turn_markers(data))
    stops = stop_token_ids(Renderer(tokenizer, "assistant"), model)
    order = ExportSpec(
        TrainedModel(load_model(model, "auto")), GenerationSettings(tokenizer, stops, 8, {}), EXPORT_DTYPES["f32"], 1
    )
    write_export(order, "merged", tmp_path / "out", [[7, 50, 7, 8, 60, 8, 3]])
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [3, 8]
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "hello"}]
    ids = loaded.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == [7, loaded.convert_tokens_to_ids("▁hello"), 7, 8]
    again = ModelConfig(path=str(tmp_path / "out"))
    assert stop_token_ids(Renderer(load_tokenizer(again), "assistant"), again) == [3, 8]


def test_without_markers_the_tokenizer_keeps_its_own_template() -> None:
    data = DataConfig(sources=[Source(path="x.jsonl")])
    assert turn_markers(data) is None
    model = ModelConfig(path="builtin:tiny")
    assert "im_start" in str(load_tokenizer(model, turn_markers(data)).chat_template)
