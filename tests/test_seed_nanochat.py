"""docs/seeds/nanochat.md: its commands run, on small files in place of the hub's data sets and nanochat's d20."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat_files import write_base
from whet.config import read_config
from whet.convert.configs.importer import import_config
from whet.exporting.nanochat import nanochat_logits

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "seeds" / "nanochat.md"
SMALL = (
    "data.sources=[{path: smoltalk.jsonl}, {path: mmlu.jsonl, format: multiple-choice}, {path: gsm8k.jsonl, "
    "format: gsm8k, calculator: calls, epochs: 2.0}, {path: identity_conversations.jsonl, epochs: 2.0}, "
    "{path: 'builtin:spelling', max_samples: 10}, {path: 'builtin:spelling-bee', calculator: calls, max_samples: 10}]",
    "data.validation.sources=[{path: validation.jsonl, format: gsm8k, calculator: calls}]",
    "data.max_length=512", "train.batch.tokens=4096", "train.precision=fp32", "train.micro_rows=2", "eval.rows=4",
    "eval.examples=2",
)  # fmt: skip
"""Instead of the hub, of 524288 tokens a step and of bf16, which is slow on a CPU."""


def page_commands() -> list[tuple[list[str], str]]:
    """(words, what the command needs) of each line in the page's shell blocks."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        for line in block.splitlines():
            needs = re.search(r"# needs: (\w+)$", line)
            found.append((shlex.split(line, comments=True), needs[1] if needs else ""))
    return found


def write_data(folder: Path) -> None:
    """A few records in the format of each source."""

    def write(name: str, records: list[Any]) -> None:
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    def turns(number: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"Tell me about {number}."},
                {"role": "assistant", "content": f"{number} is a number."}]  # fmt: skip

    sums = [{"question": f"Half of {2 * n}?", "answer": f"It is {2 * n}/2 = <<{2 * n}/2={n}>>{n}.\n#### {n}"}
            for n in range(3, 9)]  # fmt: skip
    write("smoltalk.jsonl", [{"messages": turns(number)} for number in range(8)])
    write("mmlu.jsonl", [{"question": "2 + 2?", "choices": ["3", "4", "5", str(n)], "answer": 1} for n in range(6, 10)])
    write("gsm8k.jsonl", sums[:4])
    write("validation.jsonl", sums[4:])
    write("identity_conversations.jsonl", [turns(number) for number in range(20, 24)])
    (folder / "run_sft.sh").write_text("python -m scripts.chat_sft --dtype=float32 --run=mine --model-tag=d20\n")


def test_the_recipe_has_the_numbers_of_chat_sft(tmp_path: Path) -> None:
    """The defaults of chat_sft, as `whet import config nanochat` knows them."""
    (tmp_path / "run_sft.sh").write_text("python -m scripts.chat_sft --dtype=bfloat16\n")
    imported = import_config("nanochat", tmp_path / "run_sft.sh")["config"]
    recipe = read_config(ROOT / "recipes" / "nanochat.yaml").model_dump(mode="json")
    for section in ("batch", "optimizer", "schedule"):
        for key, value in imported["train"][section].items():
            assert recipe["train"][section][key] == (value if isinstance(value, str) else pytest.approx(value)), key
    assert recipe["train"]["precision"] == imported["train"]["precision"]
    for ours, theirs in zip(recipe["data"]["sources"], imported["data"]["sources"], strict=True):
        assert {key: value for key, value in ours.items() if value is not None} == {
            "calculator": "remove",
            "format": "auto",
            **theirs,
        }


@pytest.mark.parametrize("rehearsals", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_page_is_walked_through(
    rehearsals: bool, whet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rehearsals, --smoke and --dry-run, or without."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    write_base(tmp_path / "home/.cache/nanochat", tag="d20")
    write_data(tmp_path)
    ran = []
    for words, needs in page_commands():
        if words[0] == "cp":
            shutil.copy(*words[1:])
        is_rehearsal = bool({"--smoke", "--dry-run"} & {*words})
        if needs == "hub" or words[0] != "whet" or (is_rehearsal and not rehearsals):
            continue
        small = SMALL if "nanochat.yaml" in words else ()
        arguments = [Path(word).expanduser() if word.startswith("~") else word for word in words[1:]]  # as a shell does
        ended = whet(*arguments, *(["--dry-run"] if needs == "gpu" else small))
        assert ended.code == 0, (words, ended.err)
        ran.append(" ".join(words[1:3]))
    assert len(ran) == (14 if rehearsals else 12)
    folder = tmp_path / "home/.cache/nanochat/chatsft_checkpoints/d20"
    assert json.loads((folder / "certificate.json").read_text())["verified"]
    (file,) = folder.glob("model_*.pt")
    meta = json.loads((folder / file.name.replace("model", "meta").replace(".pt", ".json")).read_text())
    assert nanochat_logits(torch.load(file), meta["model_config"], range(20)).shape == (20, 509)
    assert read_config(tmp_path / "mine.yaml").train.optimizer.flavour == "nanochat"
