"""Runs whet on a tiny random model of several families: check, train, resume, eval and both exports of each.

    python tests/model_families.py [FAMILY …] [--out FOLDER]

Mixtures of experts, also trained by two processes; hybrids, image-text checkpoints, and a base model without a chat
template, which trains on plain text. Each command runs as a user would type it; the first that fails ends its
family, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

from tiny_architectures import save_tiny_model
from whet.cli.app import main as whet

EXPERT_FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
CHAT_FAMILIES = ("qwen3_5", "qwen3_next", "falcon_h1", "gemma3")
BASE_FAMILIES = ("gpt_neox",)
FAMILIES = (*EXPERT_FAMILIES, *CHAT_FAMILIES, *BASE_FAMILIES)


def write_recipe(folder: Path, family: str) -> Path:
    """A recipe beside a tiny model and its data; models in `BASE_FAMILIES` have no chat template."""
    torch.manual_seed(0)
    save_tiny_model(family, folder / "model", torch.bfloat16)
    answers = [f"{number} cups of tea cost {3 * number} euros, and milk is free." for number in range(1, 61)]
    if family in BASE_FAMILIES:
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        tokenizer.chat_template = None
        (folder / "model" / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer.save_pretrained(folder / "model")
        records = [{"text": answer} for answer in answers]
    else:
        records = [
            {"messages": [{"role": "user", "content": "How much?"}, {"role": "assistant", "content": answer}]}
            for answer in answers
        ]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"""
model: {{path: {folder / "model"}}}
adapter: {{rank: 4}}
data:
  sources: [{{path: {folder / "data.jsonl"}}}]
  validation: {{fraction: 0.1}}
  max_length: 256
train: {{steps: 2, batch: {{conversations: 8}}, optimizer: {{lr: 1e-2}}}}
export: {{at_end: none}}
"""
    )
    return recipe


def commands(recipe: Path, family: str) -> list[list[str]]:
    """Arguments of whet, in order."""
    run, pair = str(recipe.parent / "run"), str(recipe.parent / "pair")
    by_two = ["launch", str(recipe), f"run.dir={pair}", "launch.processes=2"]
    return [
        ["check", str(recipe)],
        ["train", str(recipe), f"run.dir={run}", "--until", "1"],
        ["train", str(recipe), f"run.dir={run}", "--resume"],
        *([by_two] if family in EXPERT_FAMILIES else []),
        ["eval", run],
        ["export", run, "--to", "merged"],
        ["export", run, "--to", "adapter"],
    ]


def run_family(folder: Path, family: str) -> bool:
    """Whether every command succeeds; prints a line for each."""
    (folder / family).mkdir(parents=True)
    for arguments in commands(write_recipe(folder / family, family), family):
        began, said = time.monotonic(), io.StringIO()
        code = 0
        sys.argv = ["whet", *arguments]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                whet()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
        word = "ok" if code == 0 else f"exit code {code}"
        shown = " ".join(part for part in (arguments[0], *arguments[2:]) if not part.startswith("run.dir="))
        sys.stdout.write(f"{family:12} whet {shown:28.28} {word:8} {time.monotonic() - began:5.1f} s\n")
        sys.stdout.flush()
        if code != 0:
            sys.stdout.write(said.getvalue())
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES, metavar="FAMILY", help=" ".join(FAMILIES))
    parser.add_argument("--out", type=Path, help="an empty folder to keep models and runs in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = [run_family(options.out or Path(scratch), family) for family in options.families]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
