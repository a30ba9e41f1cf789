"""The `whet …` lines of the pages, and the small files they run on."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
NEEDS = ("gpu", "slurm", "hub")


@dataclass(frozen=True)
class Line:
    """A line of a code block that starts whet, itself or under torchrun."""

    text: str  # after `whet`
    needs: str | None  # one of NEEDS, from `<!-- needs: gpu -->` above the block or `needs: gpu` at the end of the line
    torchrun: tuple[str, ...] = ()  # its options

    @property
    def words(self) -> list[str]:
        """As a shell passes them, without comment and redirection."""
        return shlex.split(self.text.partition(" > ")[0], comments=True)


def lines_of(page: Path) -> Iterator[Line]:
    """The commands of a page's code blocks, in order."""
    block = re.compile(r"(?:^ *<!-- needs: (\w+) -->\n+)?^ *```\w*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
    for mark, code in block.findall(page.read_text()):
        for line in code.replace("\\\n", " ").splitlines():
            if found := re.match(r"\s*(?:- )?(?:torchrun (.*) -m )?whet (?=[a-z-]+\b)(?!= )(.*)", line):
                needs = re.search(r"\bneeds: (\w+)\s*$", line)
                yield Line(found[2], needs[1] if needs else mark or None, tuple((found[1] or "").split()))


def phrases_of(page: Path) -> Iterator[str]:
    """Commands in the prose, which may be named without their arguments."""
    prose = re.sub(r"^ *```\w*\n.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return iter(re.findall(r"`(?:torchrun [^`]* -m )?whet ([a-z-][^`]*)`", prose))


RECIPE = """\
model: {path: builtin:tiny}
adapter: {rank: 4}
data:
  sources: [{path: my.jsonl}]
  validation: {fraction: 0.2}
  max_length: 64
train:
  epochs: 1
  batch: {conversations: 4}
  optimizer: {lr: 2e-3}
eval: {every: 2, prompts: [], examples: 2}
checkpoint: {every: 2, keep_best: 1}
export: {at_end: none}
"""


def write_desk(folder: Path) -> None:
    """my.jsonl, my.yaml, my-test.jsonl and held-out.jsonl."""
    turns = [(f"What is {n} + 1?", f"It is {n + 1}.") for n in range(44)]
    chats = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in turns]
    write_records(folder / "my.jsonl", chats[:40])
    write_records(folder / "held-out.jsonl", chats[40:])
    write_records(folder / "my-test.jsonl", [{"prompt": a, "answer": b} for a, b in turns[40:]])
    (folder / "my.yaml").write_text(RECIPE)


def write_records(file: Path, records: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
