"""Runs over a base in 4 bits: they learn what a plain loop learns, survive, answer and ship."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from whet.config import read_config
from whet.data.plan.planner import Plan
from whet.data.prepare.store import Store

pytest.importorskip("bitsandbytes")

Steps = Callable[[Path], list[dict[str, Any]]]
NF4 = ("quantize=nf4", "adapter.rank=4")
PROMPT = "Please send two red mugs to Anna in Riga by Mon."


@pytest.fixture(scope="module")
def run(shared_run: Callable[..., Path]) -> Path:
    """Eight steps with dropout, finished. To be read, not changed."""
    options = ("train.steps=8", "checkpoint.every=4", "adapter.dropout=0.1", "export.at_end=merged")
    return shared_run("nf4", *NF4, *options)


def in_a_plain_loop(folder: Path, steps: int, dtype: torch.dtype) -> list[float]:
    """One conversation at a time through transformers' own model, whose layers hold what 4 bits leave of them."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from whet.model.load.builtin_models import builtin_folder

    config = read_config(folder / "config.yaml")
    assert config.adapter is not None
    model = AutoModelForCausalLM.from_pretrained(builtin_folder("builtin:tiny"), dtype=dtype)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            packed = quantize_4bit(module.weight.data, quant_type="nf4", compress_statistics=True)
            module.weight.data = dequantize_4bit(*packed)
    torch.manual_seed(config.run.seed)
    wanted = LoraConfig(r=config.adapter.rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, wanted)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    rule = config.train.optimizer
    optimizer = torch.optim.AdamW(trained, betas=rule.betas, eps=rule.eps, weight_decay=rule.weight_decay)
    rates = [line["lr"] for line in map(json.loads, (folder / "metrics.jsonl").open()) if "lr" in line]
    plan, store = (
        Plan.load(folder / "plan"),
        Store(Path(json.loads((folder / "ledger.json").read_text())["stores"]["train"])),
    )
    losses = []
    for step in range(steps):
        total, count = torch.zeros(()), 0
        for document in map(int, plan.documents_of(step)):
            ids = torch.from_numpy(store.ids(document))
            labels = ids.masked_fill(~torch.from_numpy(store.loss(document)), -100)[1:]
            with torch.autocast("cpu", dtype) if dtype == torch.bfloat16 else nullcontext():
                logits = model(input_ids=ids[None]).logits[0, :-1]
            total = total + F.cross_entropy(logits.float(), labels, reduction="sum")
            count += int((labels != -100).sum())
        optimizer.zero_grad()
        (total / count).backward()
        nn.utils.clip_grad_norm_(trained, config.train.clip_norm)
        optimizer.param_groups[0]["lr"] = rates[step]
        optimizer.step()
        losses.append(total.item() / count)
    return losses


@pytest.mark.parametrize(("precision", "within"), [("fp32", 1e-5), ("bf16", 2e-3)])
def test_its_losses_are_those_of_a_plain_loop_over_the_numbers_that_4_bits_leave(
    whet: Any, shipped_recipe: str, tmp_path: Path, steps_of: Steps, precision: str, within: float
) -> None:
    losses = {}
    for name, options in {"packed": NF4, "plain": NF4[1:]}.items():
        ended = whet(
            "train", shipped_recipe, f"run.dir={tmp_path / name}", *options, "train.steps=5", "export.at_end=none",
            "data.validation=null", "train.optimizer.lr=1e-2", "train.schedule.name=constant",
            f"train.precision={precision}",
        )  # fmt: skip
        assert ended.code == 0, ended.err
        losses[name] = [line["loss"] for line in steps_of(tmp_path / name)]
    wanted = in_a_plain_loop(tmp_path / "packed", 5, {"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    assert losses["packed"] == pytest.approx(wanted, rel=within)
    assert losses["plain"] != pytest.approx(wanted, rel=2 * within)  # 4 bits do lose something
    assert losses["packed"][-1] < losses["packed"][0] - 0.05


def test_it_continues_bit_for_bit(
    whet: Any, recipe: str, run: Path, tmp_path: Path, exact_of: Callable[[Path], list[Any]], state_of: Any
) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(run, cut)
    shutil.rmtree(cut / "checkpoints" / "step-000008")
    shutil.rmtree(cut / "exports")
    (cut / "status.json").unlink()
    options = ("train.steps=8", "checkpoint.every=4", "adapter.dropout=0.1")
    ended = whet("train", recipe, f"run.dir={cut}", *NF4, *options, "--resume")
    assert ended.code == 0, ended.err
    assert "continuing after step 4" in ended.err
    assert exact_of(cut) == exact_of(run)
    assert state_of(cut) == state_of(run)


def test_its_checkpoints_hold_the_adapter_alone(run: Path) -> None:
    from whet.checkpoint.dcp_storage import SafeStorageReader

    held = SafeStorageReader(run / "checkpoints" / "step-000008" / "model").read_metadata().state_dict_metadata
    assert held
    assert all("lora_" in name for name in held)


def test_a_run_in_4_bits_is_not_continued_in_16(whet: Any, recipe: str, run: Path) -> None:
    options = ("train.steps=8", "checkpoint.every=4", "adapter.dropout=0.1", "adapter.rank=4")
    ended = whet("train", recipe, f"run.dir={run}", *options, "--resume")
    assert ended.code == 1
    assert "quantize: 'nf4' then, not set now" in ended.err


@pytest.mark.parametrize("divided", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_processes_give_the_first_losses_of_one(
    divided: bool, whet: Any, recipe: str, tmp_path: Path, steps_of: Steps
) -> None:
    """Each holds the whole base; adapters are held by both, or divided among them and gathered."""
    from whet.checkpoint.dcp_storage import SafeStorageReader

    options = [*NF4, "train.steps=4", "train.micro_rows=1", "train.precision=fp32"]
    assert whet("train", recipe, f"run.dir={tmp_path / 'one'}", *options).code == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port),
        "-m", "whet", "train", recipe, f"run.dir={tmp_path / 'two'}", *options,
        *(["parallel.shard=2"] if divided else []),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    for key in ("loss", "grad_norm"):
        ours, one = ([line[key] for line in steps_of(tmp_path / folder)] for folder in ("two", "one"))
        assert ours == pytest.approx(one, rel=1e-4), key
    held = SafeStorageReader(tmp_path / "two/checkpoints/step-000004/model").read_metadata().state_dict_metadata
    assert {len(about.chunks) for about in held.values()} == {2 if divided else 1}  # type: ignore[union-attr]
    exported = whet("export", tmp_path / "two", "--json")  # by one process, of what two have trained
    assert exported.code == 0, exported.err
    assert json.loads((tmp_path / "two/exports/merged/certificate.json").read_text())["verified"]


def test_the_plan_counts_whole_weights(run: Path, lora_run: Path) -> None:
    ours, theirs = (json.loads((folder / "plan.json").read_text()) for folder in (run, lora_run))
    assert (ours["quantize"], theirs["quantize"]) == ("nf4", None)
    for key in ("parameters", "trainable_parameters"):
        assert ours[key] == theirs[key]


def test_the_run_its_export_and_transformers_answer_alike(whet: Any, run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run / "exports" / "merged"
    certificate = json.loads((folder / "certificate.json").read_text())
    assert (certificate["verified"], certificate["quantize"]) == (True, "nf4")
    assert "4 bits" in (folder / "README.md").read_text()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {nn.Linear}
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, max_new_tokens=16, do_sample=False)
    theirs = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    for reference in (run, folder):
        ended = whet("chat", reference, "--prompt", PROMPT, "--max-new-tokens", 16, "--json")
        assert json.loads(ended.out)["answer"] == theirs


def test_it_is_measured_again_as_it_was(whet: Any, run: Path) -> None:
    ended = whet("eval", run, "--json")
    assert ended.code == 0, ended.err
    *_, last = (line for line in map(json.loads, (run / "metrics.jsonl").open()) if "val_loss" in line)
    assert json.loads(ended.out)["val_loss"] == last["val_loss"]


def test_its_adapter_is_loaded_over_4_bits_and_over_16(whet: Any, run: Path, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    copy = shutil.copytree(run, tmp_path / "run")
    ended = whet("export", copy, "--to", "adapter", "--json")
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    folder = Path(result["export"])
    assert (result["certificate"]["verified"], result["certificate"]["quantize"]) == (True, "nf4")
    card = (folder / "README.md").read_text()
    assert "bnb_4bit_use_double_quant=True" in card
    assert "PEFT" in card  # peft's own card is still there
    merging = whet("merge", "builtin:tiny", "--adapter", folder, "--out", tmp_path / "merged", "--json")
    assert merging.code == 0, merging.err
    assert "in 4 bits, but merged into the unquantized one" in merging.err
    beside = whet("chat", run, "--against", "builtin:tiny", "--prompt", PROMPT, "--max-new-tokens", 2, "--json")
    assert "builtin:tiny in 4 bits" in beside.out, beside.err
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    ids = torch.arange(3, 40)[None]

    def logits(model: Any) -> torch.Tensor:
        for module in model.eval().modules():
            module.support_avx512bf16_for_cpu = False  # where there is, bitsandbytes evaluates in bf16
        with torch.no_grad():
            return model(input_ids=ids).logits

    where = {"quantization_config": how, "device_map": {"": "cpu"}, "dtype": torch.float32}
    packed = logits(AutoPeftModelForCausalLM.from_pretrained(folder, **where))
    merged = logits(AutoModelForCausalLM.from_pretrained(run / "exports" / "merged"))
    over16 = logits(AutoPeftModelForCausalLM.from_pretrained(folder))
    scale = merged.abs().max()
    assert (packed - merged).abs().max() < 1e-4 * scale
    assert 1e-3 * scale < (over16 - merged).abs().max() < 0.5 * scale


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["quantize=nf4"], ("quantize", "cannot be trained", "adapter.rank=16")),
        ([*NF4, "train.precision=fp64"], ("quantize", "fp64", "train.precision=fp32")),
        ([*NF4, "model.dtype=bf16"], ("model.dtype", "bf16", "Remove one of them")),
        ([*NF4, "quantize=int8"], ("quantize", "int8", "nf4")),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_cannot_be_is_refused_with_a_remedy(
    whet: Any, recipe: str, tmp_path: Path, options: list[str], words: tuple[str, ...]
) -> None:
    ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}", *options, "--json")
    assert ended.code == 1
    assert all(word in json.loads(ended.out)["error"] for word in words)
    assert not (tmp_path / "run").exists()


def test_check_says_how_much_is_in_4_bits(whet: Any, recipe: str) -> None:
    ended = whet("check", recipe, *NF4, "--json")
    assert ended.code == 0, ended.err
    findings = {finding["check"]: finding for finding in json.loads(ended.out)["checks"]}
    assert findings["quantize"]["level"] == "ok"
    assert findings["quantize"]["text"].startswith("68% of the weights are in nf4; the model takes 0.2 MiB")
    assert findings["leak"]["level"] == "ok"


def test_a_model_that_is_mostly_embedding_is_warned_about(whet: Any, recipe: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from whet.model.load.builtin_models import builtin_folder

    folder = tmp_path / "model"
    tokenizer = AutoTokenizer.from_pretrained(builtin_folder("builtin:tiny"))
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    ended = whet("train", recipe, *NF4, f"model.path={folder}", f"run.dir={tmp_path / 'run'}", "train.steps=1")
    assert ended.code == 0, ended.err
    assert "of this model's weights are in nf4" in ended.err
    ended = whet("check", recipe, *NF4, f"model.path={folder}", "--json")
    findings = {finding["check"]: finding for finding in json.loads(ended.out)["checks"]}
    assert findings["quantize"]["level"] == "warning"
