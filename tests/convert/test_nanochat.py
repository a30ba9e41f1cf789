"""nanochat's model of February 2026 and its tokenizer: imported, trained, exported back, the same all the way."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanochat_files import SPECIAL_TOKENS, tiktoken_encoding, write_base, write_checkpoint
from several_processes import torchrun
from whet.convert.nanochat import NanochatCheckpoint, load_nanochat_tokenizer, read_encoding
from whet.core.errors import WhetError
from whet.data.conversation import Conversation, Message, Origin
from whet.data.render.renderer import Rendered, Renderer
from whet.exporting.nanochat import nanochat_logits
from whet.model.attention import install_backend
from whet.model.loss.loss_model import LossModel
from whet.model.loss.output_head import read_output_head


@pytest.fixture(scope="module")
def pickled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.pkl"
    file.write_bytes(pickle.dumps(tiktoken_encoding()))
    return file


def test_the_tokenizer_gives_tiktokens_ids(pickled: Path) -> None:
    tokenizer, encoding = load_nanochat_tokenizer(pickled), tiktoken_encoding()
    draw = random.Random(0)
    letters = "aeinrst hlo,.'!?\n\t 0123456789ÄßéА中🙂\u0301"
    texts = ["".join(draw.choice(letters) for _ in range(draw.randint(0, 60))) for _ in range(400)]
    texts += ["Don't we'll THEY'RE", "  two  spaces \r\n", "strawberry.count('r')", "a\u00a0b", "x" * 300]
    for text in texts:
        assert tokenizer.encode(text, add_special_tokens=False) == encoding.encode_ordinary(text), repr(text)
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [
        encoding.encode_single_token(token) for token in SPECIAL_TOKENS
    ]
    assert len(tokenizer) == encoding.n_vocab


def test_its_chat_template_is_nanochats(pickled: Path) -> None:
    tokenizer = load_nanochat_tokenizer(pickled)
    turns = (Message("system", "Be kind."), Message("user", "Hi"), Message("assistant", "Hello"))
    (rendered,) = Renderer(tokenizer, "assistant").render_items([Conversation(turns, Origin("x", 1))])
    assert isinstance(rendered, Rendered)
    assert tokenizer.decode(rendered.ids) == (
        "<|bos|><|user_start|>Be kind.\n\nHi<|user_end|><|assistant_start|>Hello<|assistant_end|>"
    )
    assert tokenizer.decode(rendered.ids[rendered.loss == 1]) == "Hello<|assistant_end|>"


class Code:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("echo code ran > ran",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(Code()), "posix.system is not allowed"),
        (pickle.dumps({"pat_str": "x"}), "not a pickled tiktoken.Encoding"),
        (b"\x80\x04garbage", "not a tokenizer of nanochat"),
        (b"ctiktoken.core\nEncoding\n(S'cl100k_base'\ntR.", "not a tokenizer of nanochat"),
        (b"", "not a tokenizer of nanochat"),
    ],
    ids=["code", "no encoding", "garbage", "called with arguments", "empty"],
)
def test_a_pickle_with_anything_else_is_refused_and_nothing_runs(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.pkl").write_bytes(content)
    with pytest.raises(WhetError, match=message):
        read_encoding(tmp_path / "tokenizer.pkl")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("change", ["code inside", "a hole", "a missing byte"])
def test_a_forged_encoding_is_refused(change: str, pickled: Path, tmp_path: Path) -> None:
    state = dict(read_encoding(pickled))
    if change == "code inside":
        state["special_tokens"] = {"<|bos|>": Code()}
    elif change == "a hole":
        state["special_tokens"] = {**state["special_tokens"], "<|bos|>": 10**6}
    else:
        state["mergeable_ranks"] = {token: rank for token, rank in state["mergeable_ranks"].items() if token != b"a"}
    forged = pickle.dumps(tiktoken_encoding()).partition(b"\x94}")[0]  # up to the state
    (tmp_path / "tokenizer.pkl").write_bytes(forged + b"\x94" + pickle.dumps(state)[2:-1] + b"b.")
    with pytest.raises(WhetError, match=r"not allowed|not a pickled tiktoken|not a tokenizer"):
        read_encoding(tmp_path / "tokenizer.pkl")


def test_a_checkpoint_of_february_is_imported(whet: Any, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", steps=(100, 650), sequence_len=32)  # windows shorter than the probes
    source = base / "base_checkpoints/d4"
    ended = whet("import", "checkpoint", "nanochat", source, "--out", tmp_path / "out", "--step", 100, "--json")
    assert ended.code == 0, ended.err
    certificate = json.loads(ended.out)["certificate"]
    assert (certificate["verified"], certificate["compared"]) == (True, "logits")
    assert certificate["mapped"]["model.layers.3.self_attn.ve_gate.weight"] == [
        "model_000100.pt:transformer.h.3.attn.ve_gate.weight"
    ]
    assert certificate["left_out"] == {"rows of padding": "3 in each table of tokens; nanochat ignores them"}
    assert (tmp_path / "out/tokenizer.json").exists()  # found beside the checkpoints
    ended = whet("import", "checkpoint", "nanochat", source, "--out", tmp_path / "other", "--step", 7)
    assert ended.code == 1
    assert "has the steps 100, 650" in " ".join(ended.err.split())


@pytest.mark.parametrize("name", ["smear_gate.weight", "backout_lambda", "transformer.h.0.attn.sink.weight"])
def test_tensors_of_later_releases_are_refused(name: str, whet: Any, tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "d4")
    torch.save({**tensors, name: torch.ones(2)}, tmp_path / "d4/model_000650.pt")
    ended = whet("import", "checkpoint", "nanochat", tmp_path / "d4", "--out", tmp_path / "out")
    assert ended.code == 1
    assert f"whet has no model with the tensor {name}" in " ".join(ended.err.split())


@pytest.mark.parametrize("part", ["window_pattern", "resid_lambdas", "x0_lambdas", "value_embeds.3.weight"])
def test_every_part_matters_to_the_model(part: str, tmp_path: Path) -> None:
    """The import compares logits: a part that did not change them would be compared with nothing."""
    tensors = write_checkpoint(tmp_path / "d4")
    sizes = json.loads((tmp_path / "d4/meta_000650.json").read_text())["model_config"] | {"sequence_len": 16}
    ids = list(range(24))
    whole = nanochat_logits(tensors, sizes, ids)
    if part == "window_pattern":
        other = nanochat_logits(tensors, sizes | {part: "L"}, ids)
        assert torch.equal(other[:9], whole[:9])  # a token sees eight tokens before it
        assert not torch.allclose(other[9], whole[9], atol=1e-3)
    else:
        other = nanochat_logits({**tensors, part: tensors[part] * 0.5}, sizes, ids)
    assert not torch.allclose(other, whole, atol=1e-3)


def test_packed_conversations_are_computed_as_nanochat_computes_each(tmp_path: Path) -> None:
    """By training's own attention, with windows shorter than the conversations."""
    tensors = write_checkpoint(tmp_path / "d4", sequence_len=16)
    checkpoint = NanochatCheckpoint(tmp_path / "d4")
    model = AutoModelForCausalLM.from_config(checkpoint.config).eval()
    model.load_state_dict({target.name: target.build().float() for target in checkpoint.targets()})
    install_backend(model, "sdpa")
    draw = torch.Generator().manual_seed(0)
    documents = [torch.randint(509, (length,), generator=draw) for length in (24, 13, 40)]
    bounds = [0, 24, 37, 77]
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    with torch.no_grad():
        hidden = LossModel(model).hidden(
            torch.cat(documents), positions, torch.tensor(bounds, dtype=torch.int32), 40, bounds
        )
        logits = read_output_head(model).logits(hidden)
    sizes = json.loads((tmp_path / "d4/meta_000650.json").read_text())["model_config"]
    expected = torch.cat([nanochat_logits(tensors, sizes, document.tolist()) for document in documents])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_sharded_training_equals_that_of_one_process(whet: Any, tmp_path: Path) -> None:
    """Tables, scalars and Muon's matrices over two processes, in fp64."""
    base = write_base(tmp_path / "base")
    assert whet("import", "checkpoint", "nanochat", base / "base_checkpoints/d4", "--out", tmp_path / "d4").code == 0
    recipe = {
        "model": {"path": str(tmp_path / "d4")},
        "data": {"sources": [{"path": "builtin:spelling-bee", "calculator": "calls", "max_samples": 30}],
                 "max_length": 512},
        "train": {"steps": 3, "batch": {"tokens": 2048}, "precision": "fp64",
                  "optimizer": {"name": "muon", "flavour": "nanochat", "scalar_lr": 0.5, "weight_decay": 0.1}},
        "export": {"at_end": "none"},
    }  # fmt: skip
    (tmp_path / "my.yaml").write_text(json.dumps(recipe))
    assert whet("train", tmp_path / "my.yaml", f"run.dir={tmp_path / 'one'}").code == 0
    ended = torchrun(2, "-m", "whet", "train", tmp_path / "my.yaml", f"run.dir={tmp_path / 'two'}", "parallel.shard=2")
    assert ended.returncode == 0, ended.stderr
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    for key in ("loss", "grad_norm"):
        found = [line[key] for line in two if key in line]
        assert found == pytest.approx([line[key] for line in one if key in line], rel=1e-9)
        assert len(found) == 3
