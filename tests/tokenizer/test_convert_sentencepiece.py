"""A SentencePiece model as a fast tokenizer: the ids must be the library's own, span by span."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from examples import examples
from whet.core.errors import WhetError
from whet.model.config import ModelConfig
from whet.model.load.tokenizer import load_tokenizer, sentencepiece_file, stop_ids
from whet.tokenizer import convert_sentencepiece
from whet.tokenizer.convert_sentencepiece import to_fast_tokenizer
from whet.tokenizer.named_templates import TurnMarker, TurnMarkers
from whet.tokenizer.sentencepiece import BPE, UNIGRAM, load_processor, read_sentencepiece_model

SentencePieceProcessor = pytest.importorskip("sentencepiece").SentencePieceProcessor

Train = Callable[..., Path]
U, A, S = "<<<|user|>>>", "<<<|assistant|>>>", "<<<|system|>>>"
TURNS = TurnMarkers({"user": TurnMarker(U, 7), "assistant": TurnMarker(A, 8)})
VARIANTS = [
    {"byte_fallback": fallback, "add_dummy_prefix": prefix, "remove_extra_whitespaces": extra, **defined}
    for fallback in (False, True)
    for prefix, extra in ((True, True), (True, False), (False, False), (False, True))
    for defined in ({}, {"user_defined_symbols": ["\n", "▁▁", "<br>", "abc", "ell"]})
]


def apart(text: str, processor: Any) -> list[int]:
    """Each span by itself, by the library; markers and the end of document by their ids."""
    ids: list[int] = []
    for part in re.split(f"({re.escape(U)}|{re.escape(A)}|{re.escape('<|endoftext|>')})", text):
        if part in (U, A, "<|endoftext|>"):
            ids.append({U: 7, A: 8, "<|endoftext|>": 3}[part])
        elif part.strip():
            ids += processor.encode(part)
    return ids


def assert_same(text: str, path: Path, tokenizer: PreTrainedTokenizerFast, processor: Any) -> None:
    ours, theirs = tokenizer.encode(text, add_special_tokens=False), apart(text, processor)
    if ours != theirs and read_sentencepiece_model(path).algorithm == UNIGRAM:
        scores = [sum(processor.get_score(number) for number in ids) for ids in (ours, theirs)]
        assert len(ours) == len(theirs), "not even as many pieces"
        assert scores[0] == pytest.approx(scores[1], rel=1e-6), "not equally likely"
        return
    assert ours == theirs


ODD = st.sampled_from([
    " ", "  ", "▁", "\n", "\t", "\0", "\u00a0", "\u2028", "<s>", "</s>", "<unk>", "<0x41>", "<|user|>", "r4", "<", "0x",
    "a", "aa", "aaa", "hello", " world", "abc", "<br>", "ell", "--", "e\u0301", "ﬁ", "\u1100\u1161", "😀", "kā", "12",
])  # fmt: skip
TEXT = st.lists(ODD | st.text(max_size=4) | st.sampled_from([U, A, "<|endoftext|>"]), max_size=14).map("".join)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        # each variant by one of the kinds, whichever the neighbouring variants do not have; slow: by both
        pytest.param(
            options, kind, id="-".join((*map(str, options.values()), kind)),
            marks=() if (number + number // 2 + place) % 2 else pytest.mark.slow,
        )
        for number, options in enumerate(VARIANTS)
        for place, kind in enumerate(("bpe", "unigram"))
    ],
)  # fmt: skip
def test_ids_equal_sentencepieces(pieces: Train, kind: str, options: dict[str, Any]) -> None:
    path = pieces(kind, **options)
    tokenizer, processor = to_fast_tokenizer(path, TURNS), load_processor(path)

    @settings(max_examples=examples(120), deadline=None)
    @given(TEXT)
    def same(text: str) -> None:
        assert_same(text, path, tokenizer, processor)

    same()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_saved_tokenizer_loads_as_the_same(pieces: Train, kind: str, tmp_path: Path) -> None:
    path = pieces(kind, byte_fallback=True, user_defined_symbols=["<br>"], control_symbols=[
        "<|endoftext|>", "r4", "<|user|>", "<|assistant|>",
    ])  # fmt: skip
    turns = TurnMarkers({"user": TurnMarker(U, 5), "assistant": TurnMarker(A, 6), "system": TurnMarker(S, 4)})
    made = to_fast_tokenizer(path, turns)
    made.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.backend_tokenizer.to_str() == made.backend_tokenizer.to_str()
    assert loaded.chat_template == made.chat_template
    assert len(loaded) == SentencePieceProcessor(model_file=str(path)).get_piece_size()
    specials = {loaded.eos_token: 3, loaded.pad_token: 3, loaded.eot_token: 6, U: 5, S: 4}
    assert loaded.convert_tokens_to_ids(list(specials)) == list(specials.values())
    assert (loaded.eos_token_id, loaded.eot_token_id, loaded.bos_token_id) == (3, 6, None)
    assert loaded.decode(loaded.encode("hello kā 😀 <br>")) == "hello kā 😀 <br>"
    assert loaded.decode(loaded.encode(f"{A}hello{A}"), skip_special_tokens=True) == "hello"


def talk(tokenizer: PreTrainedTokenizerFast, *turns: tuple[str, str], prompt: bool = False) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))


def test_the_chat_template_gives_the_ids_of_marked_text(pieces: Train) -> None:
    tokenizer = to_fast_tokenizer(pieces("bpe"), TURNS)
    turns = (("user", "a"), ("assistant", "b"), ("user", " "), ("assistant", "'c\\"))
    assert talk(tokenizer, *turns) == f"{U}a{U}{A}b{A}{U}{U}{A}'c\\{A}<|endoftext|>"
    assert talk(tokenizer, *turns[:3], prompt=True) == f"{U}a{U}{A}b{A}{U}{U}{A}"
    assert talk(tokenizer, ("system", "s"), ("user", "a"), prompt=True) == f"{U}s\n\na{U}{A}"
    for wrong in ([("tool", "1")], [("system", "s"), ("assistant", "b")]):
        with pytest.raises(Exception, match=r"no form between markers|needs a user turn"):
            talk(tokenizer, *wrong)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_user_defined_piece_can_be_a_marker(pieces: Train, kind: str) -> None:
    """Its own text is in the template, because SentencePiece finds it in text, too; ids are the library's."""
    path = pieces(
        kind, control_symbols=["<|endoftext|>"], user_defined_symbols=["r4", "r5", "r6", "<|user|>", "<|assistant|>"]
    )
    processor = load_processor(path)
    assert processor.id_to_piece([7, 8]) == ["<|user|>", "<|assistant|>"]
    tokenizer = to_fast_tokenizer(path, TURNS)
    said = talk(tokenizer, ("user", "a"), ("assistant", "b"))
    assert said == "<|user|>a<|user|><|assistant|>b<|assistant|><|endoftext|>"
    assert tokenizer.eot_token_id == 8
    for text in ("hello world", "kā r4 r5"):
        assert tokenizer.encode(text, add_special_tokens=False) == processor.encode(text)
    assert (
        tokenizer.encode("a<|user|>b", add_special_tokens=False).count(7) == 1 == processor.encode("<|user|>").count(7)
    )


def test_a_system_marker_and_no_end_of_document(pieces: Train) -> None:
    marks = {**TURNS.by_role, "system": TurnMarker(S, 6)}
    tokenizer = to_fast_tokenizer(pieces("bpe"), TurnMarkers(marks, append_eod=False))
    said = talk(tokenizer, ("system", "s"), ("developer", "t"), ("user", "a"), ("assistant", "b"))
    assert said == f"{S}s{S}{S}t{S}{U}a{U}{A}b{A}"


# Refused rather than different


@pytest.mark.parametrize("rules", ["nmt_nfkc", "nfkc", "nmt_nfkc_cf"])
def test_rules_that_rewrite_characters_are_refused(pieces: Train, rules: str) -> None:
    with pytest.raises(WhetError, match=rf"rewrites characters by the rules {rules}.*model\.tokenizer=FOLDER"):
        to_fast_tokenizer(pieces("bpe", normalization_rule_name=rules), TURNS)


def test_tokenizers_precompiled_normalizer_gives_other_ids(pieces: Train) -> None:
    """What tokenizers makes of the same rules. When this fails, they can be served."""
    path = pieces("bpe", normalization_rule_name="nmt_nfkc")
    found = re.search(rb"\x0a\x08nmt_nfkc\x12(.)(.)(.)", path.read_bytes(), re.DOTALL)
    assert found is not None
    size = sum((byte[0] & 127) << 7 * place for place, byte in enumerate(found.groups()))
    charsmap = path.read_bytes()[found.end() : found.end() + size]
    ours = normalizers.Precompiled(charsmap).normalize_str("ｃ\u0327")
    theirs = SentencePieceProcessor(model_file=str(path)).normalize("ｃ\u0327")
    assert theirs.strip("▁") != ours


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model_type": "char"}, "neither a unigram nor a BPE"),
        ({"treat_whitespace_as_suffix": True}, "treats spaces"),
        ({"byte_fallback": True, "user_defined_symbols": ["<0", "x4"]}, "cannot be told from the byte pieces"),
    ],
)
def test_unsupported_features_are_refused(pieces: Train, options: dict[str, Any], says: str) -> None:
    with pytest.raises(WhetError, match=says):
        to_fast_tokenizer(pieces("bpe", **options), TURNS)


def test_a_conversion_with_other_ids_is_refused(pieces: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_sentencepiece, "_SPACE", "_")
    with pytest.raises(WhetError, match=r"no fast tokenizer gives the same ids.*by SentencePiece and"):
        to_fast_tokenizer(pieces("bpe", byte_fallback=True), TURNS)


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        (TurnMarker("[user]"), r"data\.markers\.user: .*has no piece \[user\]"),
        (TurnMarker(U, 99999), r"data\.markers\.user: .*has no piece 99999"),
        (TurnMarker(U, 0), r"data\.markers\.user: .*the unknown piece '<unk>': text becomes it too"),
        (TurnMarker("r4", 7), r"data\.markers\.user: r4 cannot be id 7, .*it is piece 4 already"),
    ],
)
def test_an_invalid_marker_is_refused(pieces: Train, mark: TurnMarker, says: str) -> None:
    with pytest.raises(WhetError, match=says):
        to_fast_tokenizer(pieces("bpe"), TurnMarkers({"user": mark, "assistant": TurnMarker(A, 8)}))


# Reading the file


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_parser_agrees_with_the_library(pieces: Train, kind: str) -> None:
    path = pieces(kind, byte_fallback=True, add_dummy_prefix=False, user_defined_symbols=["<br>"])
    model, processor = read_sentencepiece_model(path), load_processor(path)
    asked = range(processor.get_piece_size())
    assert [piece.text for piece in model.pieces] == [processor.id_to_piece(number) for number in asked]
    assert [piece.score for piece in model.pieces] == [processor.get_score(number) for number in asked]
    kinds = (processor.is_unknown, processor.is_control, processor.is_byte)
    for found, is_kind in zip((2, 3, 6), kinds, strict=True):
        assert [piece.kind == found for piece in model.pieces] == [is_kind(number) for number in asked]
    assert [piece.text for piece in model.pieces if piece.kind == 4] == ["<br>"]
    assert model.algorithm == (BPE if kind == "bpe" else UNIGRAM)
    assert (model.dummy_prefix, model.removes_extra_spaces, model.byte_fallback) == (False, True, True)
    assert (model.normalizer_name, model.eod_id) == ("", 3)


def test_end_of_document_falls_back_to_end_of_sentence(pieces: Train) -> None:
    assert read_sentencepiece_model(pieces("bpe", control_symbols=[])).eod_id == 2
    with pytest.raises(WhetError, match=r"neither <\|endoftext\|> nor </s>"):
        _ = read_sentencepiece_model(pieces("bpe", control_symbols=[], eos_id=-1)).eod_id


@pytest.mark.parametrize("content", [b"", b"text", b"\x0a\xff\xff", b'{"a": 1}'])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.model").write_bytes(content)
    with pytest.raises(WhetError, match=r"x\.model: not a SentencePiece model"):
        to_fast_tokenizer(tmp_path / "x.model", None)


def test_without_the_library_the_error_names_the_extra(pieces: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(WhetError, match=r"pip install 'whet\[data\]'"):
        to_fast_tokenizer(pieces("bpe"), None)


# model.tokenizer


def test_model_tokenizer_overrides_the_models_own(pieces: Train, tmp_path: Path) -> None:
    path = pieces("bpe")
    config = ModelConfig(path="builtin:tiny", tokenizer=str(path))
    assert sentencepiece_file(config) == path
    tokenizer = load_tokenizer(config, TURNS)
    assert tokenizer.eot_token_id == 8
    assert stop_ids(config) == []  # the model's generation settings name ids of its own tokenizer
    tokenizer.save_pretrained(tmp_path)
    folder = ModelConfig(path="builtin:tiny", tokenizer=str(tmp_path))
    assert sentencepiece_file(folder) is None
    assert load_tokenizer(folder).backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_a_folder_with_only_tokenizer_model_is_converted(pieces: Train, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(pieces("bpe").read_bytes())
    config = ModelConfig(path="builtin:tiny", tokenizer=str(tmp_path))
    assert sentencepiece_file(config) == tmp_path / "tokenizer.model"
    assert load_tokenizer(config, TURNS).convert_tokens_to_ids(A) == 8
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert sentencepiece_file(config) is None


@pytest.mark.parametrize("name", ["absent", "absent.model", "config.yaml"])
def test_a_model_tokenizer_that_is_not_a_tokenizer_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(WhetError, match=rf"model\.tokenizer: .*{name}: no such folder or \.model file"):
        load_tokenizer(ModelConfig(path="builtin:tiny", tokenizer=str(tmp_path / name)))


def test_special_tokens_of_a_fast_tokenizer_can_be_markers() -> None:
    tiny = ModelConfig(path="builtin:tiny")
    start, pad = (load_tokenizer(tiny).convert_tokens_to_ids(text) for text in ("<|im_start|>", "<|endoftext|>"))
    tokenizer = load_tokenizer(tiny, TurnMarkers({"user": TurnMarker(U, start), "assistant": TurnMarker(A, pad)}))
    said = talk(tokenizer, ("user", "a"), ("assistant", "b"))
    assert said == "<|im_start|>a<|im_start|><|endoftext|>b<|endoftext|><|im_end|>"
    assert tokenizer.eot_token_id == pad
    with pytest.raises(WhetError, match=rf"data\.markers\.user: {re.escape(U)} is not a special token of"):
        load_tokenizer(tiny, TurnMarkers({"user": TurnMarker(U), "assistant": TurnMarker(A, pad)}))
