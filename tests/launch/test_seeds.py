"""docs/seeds: every command of these pages runs, on small files and one machine.

Pages name large models, hub datasets and clusters; KEY=VALUE after each command replaces them here. A block after the
line `<!-- needs: slurm -->` runs in its dry form, and in a slow test on a real Slurm.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from slurm_cluster import Cluster

from whet.cli.app import app
from whet.cli.launch_verb import parse_verb
from whet.config import read_config
from whet.tokenizer.encoders import SentencePieceEncoder

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "seeds"
U, A = "<<<|user|>>>", "<<<|assistant|>>>"


@dataclass(frozen=True)
class Command:
    """A line of a page."""

    words: list[str]
    needs: str | None

    @property
    def recipe(self) -> str | None:
        return next((word for word in self.words[2:3] if word.endswith(".yaml")), None)

    def with_settings(self, settings: list[str]) -> list[str]:
        """The words after `whet`, with settings for a small run that the command does not give itself."""
        words = self.words[1:]
        if self.recipe is None:
            return words
        given = [word.partition("=")[0] for word in words if re.match(r"[a-z_.0-9]+=", word)]
        more = [each for each in settings if not any(f"{each}.".startswith(f"{key}.") for key in given)]
        more = [each for each in more if not any(each.partition("=")[0].startswith(key) for key in given)]
        at = words.index("--") if "--" in words else len(words)
        inner = more if at < len(words) else []  # a verb after `--` reads the recipe too
        return [*words[:at], *(m for m in more if at == len(words) or m.startswith("launch.")), *words[at:], *inner]


def with_option(words: list[str], option: str) -> list[str]:
    """The option of `whet launch` itself, before `--`."""
    at = words.index("--") if "--" in words else len(words)
    return words if option in words else [*words[:at], option, *words[at:]]


def commands_of(page: str) -> list[Command]:
    """The lines of a page's code blocks that begin with `whet`, in order."""
    found, needs, in_block = list[Command](), None, False
    for line in (PAGES / page).read_text().splitlines():
        if line.startswith("```"):
            in_block = not in_block
            needs = needs if in_block else None
        elif mark := re.fullmatch(r"<!-- needs: (\w+) -->", line):
            needs = mark[1]
        elif in_block and line.startswith("whet "):
            found.append(Command(shlex.split(line, comments=True), needs))
    return found


# What pages name, in small.

LUMI = [
    "run.dir=runs/lumi", "model.path=models/30B", "model.tokenizer=tokenizer/model.model",
    "data.sources.0.path=sft.jsonl", "data.max_length=64", "train.steps=3", "train.batch.rows=2", "train.micro_rows=1",
    "parallel.tensor=1", "parallel.shard=1", "parallel.recompute=none", "checkpoint.every=1", "checkpoint.keep_every=1",
    "launch.nodes=2", "launch.gpus=null", "launch.processes=1", "launch.slurm.tasks=node", "launch.slurm.account=null",
    "launch.slurm.partition=debug", "launch.slurm.exclusive=false", "launch.slurm.gpu_type=null",
    "launch.slurm.hint=null", "launch.slurm.cpus=1", "launch.slurm.memory=null", "launch.slurm.srun_options=[]",
    "launch.slurm.setup=[]", "launch.slurm.container=null", "launch.slurm.binds=[]", "launch.slurm.time=10",
    f"launch.slurm.python={sys.executable}",
]  # fmt: skip
MLDE = [
    "model.path=builtin:tiny", "data.sources=[{path: math.jsonl, format: prompt-completion, fields: {prompt: "
    "message_1, completion: message_2}}]", "data.max_length=128", "train.steps=8", "train.batch.rows=2",
    "train.precision=fp32", "eval.every=4", "checkpoint.every=4", "parallel.shard=2", "launch.gpus=null",
    "launch.processes=2", "search.max_trials=4",
]  # fmt: skip
MINDSPEED = [
    "model.path=builtin:tiny", "data.sources=[{path: alpaca.json}]", "data.max_length=128", "train.epochs=null",
    "train.steps=6", "train.batch.rows=4", "train.precision=fp32", "parallel.shard=2", "parallel.context=2",
    "launch.gpus=null", "launch.processes=4", "eval.every=3", "checkpoint.every=3",
]  # fmt: skip
SETTINGS = {"lumi.md": LUMI, "mlde.md": MLDE, "mindspeed.md": MINDSPEED}


def write_token_file(prefix: Path, documents: list[list[int]]) -> None:
    """Megatron's layout, byte by byte: uint16 tokens; sizes, byte offsets and documents in the index."""
    sizes = [len(ids) for ids in documents]
    offsets = [2 * sum(sizes[:number]) for number in range(len(sizes))]
    Path(f"{prefix}.bin").write_bytes(b"".join(struct.pack(f"<{len(ids)}H", *ids) for ids in documents))
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(sizes), len(sizes) + 1)
        + struct.pack(f"<{len(sizes)}i{len(sizes)}q{len(sizes) + 1}q", *sizes, *offsets, *range(len(sizes) + 1))
    )  # fmt: skip


def write_lumi_files(pieces: Callable[..., Path]) -> None:
    """Marked text, a tokenizer, preprocess_sft.py's files, and a folder with a link to the checkpoint and `latest`."""
    sys.path.insert(0, str(ROOT / "tests" / "convert"))
    from neox_writer import write
    from transformers import LlamaConfig, LlamaForCausalLM

    texts = [f"{U}hello {word} {n}{U}{A}sveiki {word} {n}{A}" for n in range(20) for word in ("world", "data", "jums")]
    for name in ("sft.jsonl", "test.jsonl"):
        Path(name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    Path("tokenizer").mkdir()
    Path("tokenizer/model.model").write_bytes(pieces("bpe", byte_fallback=True).read_bytes())
    encoder = SentencePieceEncoder(Path("tokenizer/model.model"))
    documents = []
    for text in texts:
        parts = [part for part in re.split(f"({re.escape(U)}|{re.escape(A)})", text) if part]
        ids = [{U: [7], A: [8]}.get(part) or encoder.encode_batch([part])[0] for part in parts]
        documents.append([number for part in ids for number in part] + [encoder.eod_id])
    write_token_file(Path("sft_text_document"), documents)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=-(-encoder.vocab_size // 128) * 128, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128, tie_word_embeddings=False,
    ))  # fmt: skip
    write(model, Path("final_train_v2"), ranks=2)
    Path("LATEST_translate_sft_v1").mkdir()
    Path("LATEST_translate_sft_v1/global_step423858").symlink_to("../final_train_v2/global_step7")
    Path("LATEST_translate_sft_v1/latest").write_text("global_step423858\n")
    settings = yaml.safe_load((ROOT / "tests/fixtures/configs/neox.yml").read_text())
    Path("30B_SOTA_finetune_latest.yml").write_text(yaml.safe_dump(settings | {"iteration_offset": 423858}))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with the recipes."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def steps_of(run: str) -> list[int]:
    lines = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if "loss" in line]


@pytest.mark.parametrize("page", SETTINGS)
def test_every_command_is_one_of_whet_s_and_every_recipe_valid(page: str, place: Path) -> None:
    """Without running any: options and arguments exist, settings are valid, and the page is more than a few lines."""
    from typer.main import get_command

    root = get_command(app)
    whet, commands = root.make_context("whet", ["doctor"]), commands_of(page)
    assert len(commands) > 8
    for command in commands:
        words = command.with_settings(SETTINGS[page])
        parse_verb(whet, root.commands[words[0]], words)
        if command.recipe is not None and "search" not in command.recipe:
            settings = [word for word in words[2:] if re.match(r"[a-z_]+\.?[a-z_.0-9]*=", word)]
            assert read_config(Path(command.recipe), settings).run.dir != ""


def run_locally(whet: Any, page: str) -> Iterator[tuple[Command, Any]]:
    """Run the commands of a page in order. Several processes are started as a user would."""
    for command in commands_of(page):
        words = command.with_settings(SETTINGS[page])
        if command.needs == "slurm":
            ended = whet(*with_option(words, "--dry-run"))
            assert ended.code == 0, (words, ended.err)
            if command.words[1] == "launch" and "--chain" in words:  # the run itself, without Slurm
                local = [word for word in words[1:] if not word.startswith("launch.") and "=" in word]
                ended = whet("train", words[1], *local)
        elif command.words[1] in ("launch", "search"):
            done = subprocess.run(
                [sys.executable, "-m", "whet", *words], capture_output=True, text=True, check=False,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            assert done.returncode == 0, (words, done.stderr[-3000:])
            yield command, done
            continue
        else:
            ended = whet(*words)
        assert ended.code == 0, (words, ended.err)
        yield command, ended


@pytest.mark.slow
def test_lumi(whet: Any, place: Path, pieces: Callable[..., Path]) -> None:
    write_lumi_files(pieces)
    ran = list(run_locally(whet, "lumi.md"))
    assert len(ran) > 12
    assert steps_of("runs/lumi") == [423859, 423860, 423861]
    assert Path("runs/lumi/checkpoints/latest").read_text() == "step-423861\n"
    imported = yaml.safe_load(Path("imported.yaml").read_text())
    assert imported["train"]["step_offset"] == 423858
    # the ids of the store are those of the files of preprocess_sft.py
    assert Path("store/train/tokens.bin").read_bytes() == Path("sft_text_document.bin").read_bytes()


@pytest.mark.slow
def test_lumi_on_slurm(whet: Any, place: Path, pieces: Callable[..., Path], cluster: Cluster) -> None:
    write_lumi_files(pieces)
    assert cluster.count == 2
    for command in commands_of("lumi.md"):
        words = command.with_settings(LUMI)
        if command.needs != "slurm" and command.words[1] != "import":
            continue
        if command.needs == "slurm" and "--dry-run" not in words:
            words = with_option(words, "--wait")
        ended = whet(*words)
        assert ended.code == 0, (words, ended.err)
    assert steps_of("runs/lumi") == [423859, 423860, 423861]


@pytest.mark.slow
def test_mlde(whet: Any, place: Path) -> None:
    """LoRA over sharded weights in two processes, best and latest checkpoints, a search, both models side by side."""
    records = [
        {"message_1": f"What is {n} plus {m}?", "message_2": f"It is {n + m}."} for n in range(12) for m in range(8)
    ]
    Path("math.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    experiment = ROOT / "tests/fixtures/configs/determined.yaml"
    Path("swallow_70b_ds3.yaml").write_text(experiment.read_text())
    Path("deepspeed_auto.json").write_text((experiment.parent / "deepspeed_auto.json").read_text())
    list(run_locally(whet, "mlde.md"))
    assert steps_of("runs/mlde") == [*range(1, 9)]
    checkpoints = {path.name for path in Path("runs/mlde/checkpoints").iterdir() if not path.name.startswith(".")}
    assert {"latest", "best"} < checkpoints
    assert (Path("runs/mlde/exports/adapter") / "adapter_config.json").is_file()
    assert list(Path("runs/mlde/tensorboard").iterdir())
    assert json.loads(Path("runs/mlde/plan.json").read_text())["world"] == 2
    assert json.loads(Path("runs/mlde-search/search.json").read_text())["best"]


@pytest.mark.slow
def test_mindspeed(whet: Any, place: Path) -> None:
    """Stage pt, then sft on its weights, with FSDP2 and Ulysses over four processes, and the profiler."""
    records = [{"instruction": f"Say {n} twice.", "input": "", "output": f"{n} {n}"} for n in range(60)]
    Path("alpaca.json").write_text(json.dumps(records))
    Path("documents.jsonl").write_text("".join(json.dumps({"text": f"Number {n} " * 30}) + "\n" for n in range(40)))
    Path("qwen3.yaml").write_text((ROOT / "tests/fixtures/configs/mindspeed.yaml").read_text())
    list(run_locally(whet, "mindspeed.md"))
    assert steps_of("runs/pt") == steps_of("runs/mindspeed") == [*range(1, 7)]
    plan = json.loads(Path("runs/mindspeed/plan.json").read_text())
    assert (plan["world"], plan["shard"], plan["context"]) == (4, 2, 2)
    assert (Path("runs/profiled/profile") / "rank-0.trace.json.gz").is_file()
    assert str(Path("runs/pt").resolve()) in Path("runs/mindspeed/config.yaml").read_text()
