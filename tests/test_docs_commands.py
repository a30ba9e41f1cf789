"""Every `whet …` line in a code block of README and docs runs: as it stands, on small files and a tiny model.

Lines that need more than this machine has say so, for readers and for this test: `<!-- needs: gpu -->` above a block,
or `needs: gpu` at the end of a line; `slurm` and `hub` likewise. They run in their dry form: `--dry-run` of launch,
`--plan` of fit; other verbs are parsed (test_docs.py). docs/seeds has tests of its own: launch/test_seeds.py and
test_seed_nanochat.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer import testing

from docs_commands import DOCS, NEEDS, PAGES, RECIPE, ROOT, Line, lines_of, write_desk
from whet.cli.app import app

Hook = Callable[["Desk"], None]


class Desk:
    """The folder in which a page's commands run, one after the other."""

    def __init__(self, place: Place, pieces: Callable[..., Path]) -> None:
        self.place, self.pieces = place, pieces
        self.environment: dict[str, str] = {}  # what the page exports
        self.processes: list[subprocess.Popen[str]] = []

    def whet(self, *words: str) -> str:
        """In this process; whatever it asks is answered with yes."""
        ended = testing.CliRunner().invoke(app, list(words), input="y\n")
        if ended.exception is not None and not isinstance(ended.exception, SystemExit):
            raise ended.exception
        assert ended.exit_code == 0, f"whet {' '.join(words)}: {ended.stdout[-1500:]}{ended.stderr[-1500:]}"
        return ended.stdout

    def start(self, *words: str) -> subprocess.Popen[str]:
        environment = {**os.environ, **self.environment, "OMP_NUM_THREADS": "1"}
        self.processes.append(subprocess.Popen(
            [sys.executable, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ))  # fmt: skip
        return self.processes[-1]

    def run_line(self, line: Line) -> None:
        words = [self.small(word) for word in line.words if word != "…"]
        for prefix, more in self.place.more.items():
            words += more if " ".join(words).startswith(prefix) else []
        for hook in (act for prefix, act in self.place.before.items() if " ".join(words).startswith(prefix)):
            hook(self)
        if words[0] in ("train", "launch", "search") and not {"--resume", "--dry-run", "--preview"} & {*words}:
            self.clear(words)
        if "--dry-run" in words and words[0] == "launch":
            self.whet(*words)
        elif words[0] in ("dash", "serve"):
            self.visit(words)
        elif words[0].startswith("-"):  # completion is for the shell that runs whet
            ask = f"{shlex.quote(os.environ['WHET_TEST_PYTHON'])} -m whet {shlex.join(words)}; exit $?"
            subprocess.run(["bash", "-c", ask], check=True, stdout=subprocess.DEVNULL)
        elif line.torchrun or words[0] in ("launch", "search"):
            torchrun = ["-m", "torch.distributed.run", *line.torchrun] if line.torchrun else []
            process = self.start(*torchrun, "-m", "whet", *words)
            shown, _ = process.communicate(timeout=600)
            assert process.returncode == 0, f"whet {line.text}: {shown[-3000:]}"
        else:
            self.whet(*words)

    def small(self, word: str) -> str:
        for pattern, here in self.place.words.items():
            word = re.sub(pattern, here, word)
        return os.path.expandvars(word)

    def clear(self, words: list[str]) -> None:
        """Alternatives stand below each other; each starts a new run."""
        name = Path(words[1]).stem + ("-smoke" if "--smoke" in words else "-lr" if "--lr" in words else "")
        given = [word.partition("=")[2] for word in words if word.startswith("run.dir=")]
        shutil.rmtree(given[0] if given else f"runs/{name}", ignore_errors=True)

    def visit(self, words: list[str]) -> None:
        """Start a server, open its page, and end it as Ctrl-C does."""
        server = self.start("-m", "whet", *words, *(["--port", "0"] if words[0] == "serve" else []))
        assert server.stdout is not None
        address = next(found[0] for said in server.stdout if (found := re.findall(r"https?://\S+", said)))
        ask = urllib.request.Request(address.replace("0.0.0.0", "127.0.0.1"))
        if "WHET_TOKEN" in self.environment:
            ask.add_header("authorization", f"Bearer {self.environment['WHET_TOKEN']}")
        assert urllib.request.urlopen(ask, timeout=60).status == 200
        server.terminate()
        server.communicate(timeout=60)
        assert server.returncode == 0


@dataclass(frozen=True)
class Place:
    """What a page's commands find: files and runs, and what stands for the names on the page."""

    prepare: tuple[Hook, ...] = ()
    words: dict[str, str] = field(default_factory=dict)  # regular expression → what stands here
    more: dict[str, list[str]] = field(default_factory=dict)  # verb → words after those of the line
    before: dict[str, Hook] = field(default_factory=dict)  # beginning of a line → what happens before it


# Hooks


def other_runs(*names: str) -> Hook:
    """Copies of runs/my."""

    def copy(desk: Desk) -> None:
        for name in names:
            shutil.copytree("runs/my", name)

    return copy


def command(*words: str) -> Hook:
    return lambda desk: desk.whet(*words) and None


def recipe(name: str, **sections: Any) -> Hook:
    """my.yaml with other sections, under another name."""
    return lambda desk: Path(name).write_text(yaml.safe_dump(yaml.safe_load(RECIPE) | sections)) and None


def write(name: str, text: str) -> Hook:
    def make(desk: Desk) -> None:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)

    return make


def remove(name: str) -> Hook:
    def act(desk: Desk) -> None:
        shutil.rmtree(name, ignore_errors=True)
        Path(name).unlink(missing_ok=True)

    return act


def adapters(*folders: str) -> Hook:
    """The adapter of runs/my, in several folders."""

    def copy(desk: Desk) -> None:
        desk.whet("export", "runs/my", "--to", "adapter")
        for folder in folders:
            shutil.copytree("runs/my/exports/adapter", folder)

    return copy


def old_results(desk: Desk) -> None:
    desk.whet("eval", "runs/old", "--tasks", "my.jsonl", "--out", "runs/old/evals/step-000100.json", "eval.examples=2")


def new_data(desk: Desk) -> None:
    shutil.copyfile("my.jsonl", "new.jsonl")


def paused(desk: Desk) -> None:
    """runs/my, stopped in the middle."""
    shutil.rmtree("runs/my", ignore_errors=True)
    desk.whet("train", "my.yaml", "--until", "4")


def running(desk: Desk) -> None:
    """runs/my, making steps in a process of its own."""
    shutil.rmtree("runs/my", ignore_errors=True)
    desk.start("-m", "whet", "train", "my.yaml", "train.epochs=5000", "eval.every=null", "checkpoint.keep_best=0")
    until = time.monotonic() + 120
    metrics = Path("runs/my/metrics.jsonl")
    while not (metrics.exists() and '"loss"' in metrics.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)


def long_recipe(desk: Desk) -> None:
    """Probes of learning rates take 28 steps or more."""
    Path("my.yaml").write_text(RECIPE.replace("epochs: 1", "epochs: 4"))


def bench_model(desk: Desk) -> None:
    """A shape for `random:`, small enough for two cores."""
    from whet.model.load.builtin_models import builtin_folder

    shutil.copytree(builtin_folder("builtin:tiny"), "small")


def ranges(desk: Desk) -> None:
    """my.yaml with a range, and no run yet."""
    remove("runs/my")(desk)
    rate = "lr: {search: log, low: 1e-4, high: 1e-2}"
    Path("my.yaml").write_text(f"{RECIPE.replace('lr: 2e-3', rate)}search: {{max_trials: 3}}\n")


def token(desk: Desk) -> None:
    desk.environment["WHET_TOKEN"] = "0123456789abcdef" * 2


def fault(desk: Desk) -> None:
    """A run whose loss is not finite: a rate far too high."""
    shutil.rmtree("runs/my")
    ended = testing.CliRunner().invoke(app, ["train", "my.yaml", "train.optimizer.lr=1e30"])
    assert ended.exit_code == 3, ended.stderr
    (file,) = Path("runs/my/faults").glob("step-*.json")
    file.rename(file.with_name("step-000009.json"))


def other_shards(desk: Desk) -> None:
    for number in (1, 2, 3):
        desk.whet("prepare", "my.yaml", "data.store=shared/my", "--shard", f"{number}/4")


def token_file(desk: Desk) -> None:
    """old.bin as Megatron writes it, and tokenizer.model."""
    sys.path.insert(0, str(ROOT / "tests" / "launch"))
    from test_seeds import write_token_file

    write_token_file(Path("old"), [[10, 11, 12, 3], [13, 14, 3]])
    shutil.copy(desk.pieces("bpe", byte_fallback=True), "tokenizer.model")


def foreign_configs(desk: Desk) -> None:
    configs = ROOT / "tests" / "fixtures" / "configs"
    for name, theirs in (("sft.yaml", "trl.yaml"), ("run_sft.sh", "nanochat.sh"), ("ds.json", "deepspeed.json")):
        shutil.copy(configs / theirs, name)


def foreign_config(desk: Desk) -> None:
    """A TRL user's, in a folder without a recipe."""
    remove("my.yaml")(desk)
    settings = {
        "model_name_or_path": "builtin:tiny", "dataset_name": "my.jsonl", "assistant_only_loss": True,
        "max_length": 256, "per_device_train_batch_size": 4, "max_steps": 4,
    }  # fmt: skip
    Path("my-config.yaml").write_text(yaml.safe_dump(settings))


def foreign_checkpoints(desk: Desk) -> None:
    """GPT-NeoX's, nanochat's, and two of torch.distributed."""
    sys.path[:0] = [str(ROOT / "tests" / "convert")]
    import torch
    from neox_writer import write as write_neox
    from torch.distributed.checkpoint.state_dict_saver import save
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    from nanochat_files import write_base
    from whet.model.load.builtin_models import builtin_folder

    torch.manual_seed(0)
    write_neox(LlamaForCausalLM(LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=128, tie_word_embeddings=False,
    )), Path("run"), ranks=2)  # fmt: skip
    Path("run/global_step7").rename("run/global_step1000")
    write_base(Path(), tag="d20", steps=(20000, 21400))
    tiny = builtin_folder("builtin:tiny")
    shutil.copytree(tiny, "neox-tokenizer")
    shutil.copy(tiny / "config.json", "config.json")
    tensors = AutoModelForCausalLM.from_pretrained(tiny).state_dict()
    for folder in ("folder", "run/checkpoints"):
        save(tensors, checkpoint_id=folder, no_dist=True)


def page_files(name: str, changes: dict[str, str]) -> Hook:
    """The files that a page shows, whose first line is their name, with changes for this machine."""

    def write_all(desk: Desk) -> None:
        page = page_named(name).read_text()
        for there, here in changes.items():
            assert there in page
            page = page.replace(there, here)
        for file, text in re.findall(r"```(?:yaml|python)\n# (\S+)\n(.*?)```", page, flags=re.DOTALL):
            Path(file).write_text(text)

    return write_all


def other_test_text(desk: Desk) -> None:
    """Validation texts that are not among the training texts."""
    Path("test.jsonl").write_text(Path("test.jsonl").read_text().replace("hello", "the quick"))


def new_users_files(desk: Desk) -> None:
    """A spreadsheet, a dump with broken lines, GPT-NeoX's files, and a script of TRL's with a search over it."""
    import openpyxl

    book = openpyxl.Workbook()
    book.active.append(["Nr.", "Frage", "Antwort"])
    for n in range(40):
        book.active.append([n, f"Wie viel kostet Stück {n}?", f"Stück {n} kostet {n} Euro."])
    book.save("Kundenfragen.xlsx")
    turns = [[{"from": "human", "value": f"{n} cups?"}, {"from": "gpt", "value": f"Yes, {n}."}] for n in range(40)]
    lines = [json.dumps({"conversations": each}) for each in turns]
    Path("sharegpt_dump.jsonl").write_text("\n".join([*lines, lines[0][:20], "", "<<<<<<< HEAD"]))
    sys.path.insert(0, str(ROOT / "tests" / "launch"))
    from test_seeds import write_lumi_files

    from whet.model.load.builtin_models import builtin_folder

    write_lumi_files(desk.pieces)
    shutil.copytree(builtin_folder("builtin:tiny"), "tiny")
    Path("mine.yaml").write_text(
        "model: {path: model, tokenizer: tokenizer/model.model}\n"
        "data:\n  sources: [{path: sft_text_document, format: tokens, mask: {pairs: [[7, 7]], alternating: [8]}}]\n"
        "  max_length: 64\ntrain: {steps: 2, step_offset: 423858, batch: {rows: 4}}\nexport: {at_end: none}\n"
    )
    Path("sft.py").write_text(SCRIPT)
    Path("search.yaml").write_text(
        f"run: {{name: sft-rate}}\nscript:\n  command: {sys.executable} sft.py\n  steps: 4\n"
        "  arguments: {learning_rate: {search: log, low: 1e-4, high: 1e-2}}\nsearch: {max_trials: 2}\n"
    )


SCRIPT = """
import argparse
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from whet.integrations.transformers import WhetCallback

parser = argparse.ArgumentParser()
parser.add_argument("--learning_rate", type=float)
options = parser.parse_args()
data = load_dataset("json", data_files="my.jsonl", split="train").train_test_split(0.1, seed=0)
arguments = SFTConfig(
    output_dir="out", learning_rate=options.learning_rate, logging_steps=1, use_cpu=True, bf16=False, report_to="none",
    per_device_train_batch_size=2, max_length=64,
)
whet = WhetCallback()
trainer = SFTTrainer("tiny", arguments, train_dataset=data["train"], eval_dataset=data["test"], callbacks=[whet])
trainer.train(resume_from_checkpoint=whet.checkpoint)
"""


TINY = {"builtin:smollm2": "builtin:tiny", "Qwen/Qwen3-0.6B": "builtin:tiny", "(^|=)/(shared|models|tmp)/": r"\1\2/"}
SAY = {"chat": ["--max-new-tokens", "4"]}

PLACES: dict[str, Place] = {
    "README.md": Place(words=TINY, more=SAY),
    "adapters.md": Place((other_runs("runs/a"), adapters("runs/a/exports/adapter", "other/folder")), TINY),
    "bench.md": Place((bench_model,), {"^smollm-135m$": "small"}),
    "chat.md": Place((adapters("out/legal", "out/poems"),), TINY, SAY),
    "check.md": Place(),
    "checkpoints.md": Place((paused, recipe("new.yaml"), new_data)),
    "clouds.md": Place(more={"launch": ["train.batch={rows: 64}"]}),
    "coming-from.md": Place((foreign_config,)),
    "dash.md": Place(words=TINY, prepare=(other_runs("shared/runs/a"),)),
    "evaluate.md": Place(
        (other_runs("runs/other", "runs/old", "runs/new"), old_results), TINY, {"eval": ["eval.examples=2"]}
    ),
    "export.md": Place(before={}, words={"FOLDER": "runs/my/exports/merged"}),
    "field-notes.md": Place(
        (new_users_files,),
        TINY,
        before={"import config": remove("my.yaml"), "runs": command("train", "mine.yaml", "--fresh")},
    ),
    "fit.md": Place(),
    "guard.md": Place((fault,)),
    "guide.md": Place(more=SAY),
    "import.md": Place(
        (foreign_configs, foreign_checkpoints),
        {"^tokenizer/$": "neox-tokenizer"},
        before={"import config trl": remove("my.yaml"), "import checkpoint": remove("model")},
    ),
    "index.md": Place((remove("my.yaml"),), TINY, SAY),
    "launch.md": Place((write("my_trainer.py", "import sys; assert sys.argv[1:] == ['--lr', '1e-4']\n"),)),
    "masks.md": Place(),
    "models.md": Place(
        (command("export", "runs/my@best"), recipe("next.yaml", export={"at_end": "merged"})),
        TINY,
        SAY | {"models remove": ["--yes"]},
    ),
    "packing.md": Place(),
    "parallel.md": Place(),
    "preparing.md": Place(
        (token_file,), TINY | {"^100$": "10"}, before={"prepare my.yaml data.store=shared/my --merge": other_shards}
    ),
    "runs.md": Place(
        (
            other_runs("shared/runs/a", "runs/b", "runs/lr-1e-4", "runs/lr-3e-4", "runs/mine"),
            command("train", "my.yaml", "run.dir=runs/tea", "run.project=tea"),
        ),
        TINY | {"^NAME$": "my", "^A$": "my", "^B$": "b", "^NEW$": "new", "^mine@500$": "mine@4"},
        {"runs delete": ["--yes"]},
        {"runs stop": running, "runs cancel": running, "runs resume": paused, "runs delete": paused},
    ),
    "search.md": Place((ranges,), before={"search my.yaml --lr": long_recipe}),
    "serving.md": Place((other_runs("runs/support", "runs/legal"),), TINY, before={"serve runs/my --host": token}),
    "training.md": Place(words=TINY | {r"\[10,12\]": "[2,3]"}),
    "walks/neox-slurm.md": Place(
        (
            new_users_files,
            other_test_text,
            page_files("walks/neox-slurm.md", {"nodes: 2\n  gpus: 4 ": "processes: 1 "}),
        ),
        before={"import config": remove("my.yaml"), "runs": command("train", "mine.yaml")},
    ),
    "walks/sharegpt.md": Place((new_users_files,), TINY, SAY),
    "walks/spreadsheet.md": Place((new_users_files,), TINY, SAY),
    "walks/trl-sweep.md": Place(
        (
            new_users_files,
            page_files(
                "walks/trl-sweep.md",
                {
                    "python sft.py\n": f"{sys.executable} sft.py\n",
                    "steps: 60": "steps: 4",
                    '"wandb"': '"none"',
                    "Qwen/Qwen3-0.6B": "tiny",
                },
            ),
        )
    ),
    "watching.md": Place((other_runs("runs/a", "runs/b"),), {"^1234$": "7"}),
}


QUICK = {
    "adapters.md",
    "chat.md",
    "check.md",
    "clouds.md",
    "dash.md",
    "guard.md",
    "masks.md",
    "preparing.md",
    "watching.md",
}
"""Seconds; the others are left to `make test-all`."""


@pytest.fixture
def desk_files(whet: Any, make_once: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of write_desk and the finished run of my.yaml."""

    def make(folder: Path) -> None:
        folder.mkdir()
        write_desk(folder)
        monkeypatch.chdir(folder)
        assert whet("train", "my.yaml").code == 0

    return make_once("desk", make)


@pytest.fixture
def make_desk(
    desk_files: Path, pieces: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Place], Desk]]:
    desks = []

    def make(place: Place) -> Desk:
        shutil.copytree(desk_files, tmp_path / "desk")
        monkeypatch.chdir(tmp_path / "desk")
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("WHET_MODELS", str(tmp_path / "registry"))
        Path("recipes").symlink_to(ROOT / "recipes")
        desks.append(Desk(place, pieces))
        for hook in place.prepare:
            hook(desks[-1])
        return desks[-1]

    yield make
    for process in (process for desk in desks for process in desk.processes):
        process.kill()
        process.wait()


def page_named(name: str) -> Path:
    return ROOT / name if name == "README.md" else DOCS / name


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PLACES]
)
def test_every_command_of_a_page_runs(name: str, make_desk: Callable[[Place], Desk]) -> None:
    desk = make_desk(PLACES[name])
    for line in lines_of(page_named(name)):
        if line.needs is None and line.words[0] != "demo":  # minutes; cli/test_manners.py and test_packaging.py have it
            desk.run_line(line)


def marked_lines(verb: str) -> list[tuple[str, Line]]:
    pages = [page for page in PAGES if page.parent != DOCS / "seeds"]
    return [(page.name, line) for page in pages for line in lines_of(page) if line.needs and line.words[0] == verb]


def test_every_launch_that_needs_more_runs_in_its_dry_form(
    whet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if on a machine with eight GPUs; names of other machines are this one's."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("SKYPILOT_NUM_NODES", "2"), ("DSTACK_NODES_NUM", "2"), ("DSTACK_MASTER_NODE_IP", "localhost")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("rendezvous", "localhost:29400")
    write_desk(tmp_path)
    Path("my_trainer.py").touch()
    eight = RECIPE.replace("conversations: 4", "conversations: 512") + "launch: {gpus: 8}\n"
    Path("my.yaml").write_text(eight)
    Path("every-weight.yaml").write_text(eight.replace("adapter: {rank: 4}\n", ""))
    Path("mine.yaml").write_text(eight)
    marked = marked_lines("launch")
    assert len(marked) > 20
    for page, line in marked:
        words = [os.path.expandvars(word.replace("node1:", "localhost:")) for word in line.words]
        if any(word.startswith("parallel.tensor=") for word in words):  # which excludes adapters
            words[1] = "every-weight.yaml"
        if any(word.startswith("launch.processes=") for word in words):
            words.insert(2, "launch.gpus=null")
        at = words.index("--") if "--" in words else len(words)
        ended = whet(*words[:at], *(["--dry-run"] if "--dry-run" not in words else []), *words[at:])
        assert ended.code == 0, f"{page}: whet {line.text}: {ended.err}"
        assert ended.out, line.text


@pytest.mark.slow
def test_every_fit_that_needs_a_gpu_runs_on_paper(whet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_desk(tmp_path)
    marked = marked_lines("fit")
    assert len(marked) > 3
    for page, line in marked:
        ended = whet(*line.words, "--plan", "1x1xH200")
        assert ended.code == 0, f"{page}: whet {line.text}: {ended.err}"


def test_no_page_is_left_out() -> None:
    pages = {page for page in PAGES if any(lines_of(page))}
    tested = {page_named(name) for name in PLACES} | {page for page in pages if page.parent == DOCS / "seeds"}
    assert pages == tested
    marks = {line.needs for page in pages for line in lines_of(page)}
    assert marks == {None, *NEEDS}
    dry = {line.words[0] for page in pages for line in lines_of(page) if line.needs}
    assert dry <= {"launch", "fit", "bench", "eval", "train", "import"}, "what is the dry form of the new one?"
