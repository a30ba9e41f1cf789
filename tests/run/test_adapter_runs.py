"""Runs with DoRA, added tokens and modules trained whole: they resume bit for bit and ship what others load."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

Exact = Callable[[Path], list[dict[str, Any]]]
TOKENS = "model.add_tokens=['<|tool|>',' lamps']"
KINDS = {
    "dora": ("adapter.method=dora", "adapter.rank=4", "adapter.tokens=['<|im_end|>']", TOKENS),
    "in 4 bits": ("quantize=nf4", "adapter.method=dora", "adapter.rank=4", "adapter.also_train=[norm,embed_tokens]",
                  TOKENS),
}  # fmt: skip
_LOADS = """
import json, sys, torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer
adapter, merged = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(adapter)
ids = torch.tensor([tokenizer.encode("Please send three red lamps<|tool|>")])
with torch.no_grad():
    one = AutoPeftModelForCausalLM.from_pretrained(adapter)(input_ids=ids).logits
    two = AutoModelForCausalLM.from_pretrained(merged)(input_ids=ids).logits
assert "whet" not in sys.modules
print(json.dumps([ids[0, -1].item(), len(tokenizer), one.shape[-1], (one - two).abs().max().item(), one.std().item()]))
"""


@pytest.fixture(scope="module")
def make_run(whet: Any, recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("adapters") / "run"
            ended = whet("train", recipe, f"run.dir={made[kind]}", *_options(kind))
            assert ended.code == 0, ended.err
        return made[kind]

    return make


def _options(kind: str) -> list[str]:
    if "quantize=nf4" in KINDS[kind]:
        pytest.importorskip("bitsandbytes")
    short = ("train.steps=6", "checkpoint.every=3", "train.optimizer.lr=1e-2", "export.at_end=adapter")
    return [*short, *KINDS[kind]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_paused_run_continues_bit_for_bit(
    kind: str, make_run: Callable[[str], Path], whet: Any, recipe: str, tmp_path: Path, exact_of: Exact
) -> None:
    whole = make_run(kind)
    arguments = ["train", recipe, f"run.dir={tmp_path / 'run'}", *_options(kind)]
    assert whet(*arguments, "--until", 3).code == 0
    ended = whet(*arguments, "--resume")
    assert ended.code == 0, ended.err
    assert exact_of(tmp_path / "run") == exact_of(whole)
    weights = "exports/adapter/adapter_model.safetensors"
    assert (tmp_path / "run" / weights).read_bytes() == (whole / weights).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_it_exports_and_answers(kind: str, make_run: Callable[[str], Path], whet: Any) -> None:
    run = make_run(kind)
    saved = load_file(run / "exports/adapter/adapter_model.safetensors")
    whole = [name for name, tensor in saved.items() if len(tensor) == 418]
    assert len(whole) == (0 if kind == "dora" else 2)  # trained whole, it is saved as embedding and as head
    certificate = json.loads((run / "exports/adapter/certificate.json").read_text())
    assert certificate["verified"]
    ended = whet("export", run, "--to", "merged", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["certificate"]["verified"]
    ended = whet("chat", run, "--prompt", "Please send lamps<|tool|>", "--json")
    assert ended.code == 0, ended.err


@pytest.mark.parametrize("kind", KINDS)
def test_it_chats_beside_its_base(kind: str, make_run: Callable[[str], Path], whet: Any) -> None:
    """By every way to the tuned model and to the base: a run, its adapter's folder, an evaluation."""
    run = make_run(kind)
    question = ("--against", "builtin:tiny", "--prompt", "Please send lamps<|tool|>", "--max-new-tokens", "8", "--json")
    ended = whet("chat", run, *question)
    assert ended.code == 0, ended.err
    said = json.loads(ended.out)
    plain = json.loads(whet("chat", "builtin:tiny", *question[2:]).out)
    if kind == "dora":
        assert said["against"]["answer"] == plain["answer"]
    loaded = ("--load", "4bit") if kind != "dora" else ()
    ended = whet("chat", run / "exports/adapter", *question, *loaded)
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["answer"] == said["answer"]
    ended = whet("eval", run, "--tasks", "orders", "eval.examples=2", "--json")
    assert ended.code == 0, ended.err
    assert set(json.loads(ended.out)["tasks"]["orders"]) >= {"score", "base", "difference"}


def test_peft_and_transformers_load_it_alone(real_python: str, make_run: Callable[[str], Path], whet: Any) -> None:
    run = make_run("dora")
    if not (run / "exports/merged").exists():
        assert whet("export", run).code == 0
    command = [sys.executable, "-c", _LOADS, str(run / "exports/adapter"), str(run / "exports/merged")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    last, known, rows, difference, spread = json.loads(done.stdout.splitlines()[-1])
    assert (last, known, rows) == (416, 418, 418)  # <|tool|> is one token, the first after the 416 that there were
    assert difference < 1e-5 < spread


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["adapter.method=dora"], "adapter.method: dora"),
        (["adapter.rank=2", "adapter.also_train=[norm]"], "adapter.also_train: ['norm']"),
        (["adapter.rank=2", TOKENS], "model.add_tokens"),
    ],
)
def test_what_starts_from_weights_is_refused_where_they_are_sharded(
    options: list[str], message: str, whet: Any, recipe: str
) -> None:
    ended = whet("train", recipe, "parallel.shard=2", *options)
    assert ended.code == 1
    assert message in ended.err
    assert "remove parallel.shard" in " ".join(ended.err.split())
