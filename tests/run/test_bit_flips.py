"""Random bit flips over a run folder and its stores: none changes weights, scores or exports unnoticed, none ends in a
traceback."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLIPS, SAMPLE = 344, 4
SHARES = 4
"""The flips before a resume, and those before an evaluation, are divided among so many tests, for several workers."""
SETTINGS = (
    "train.steps=4", "checkpoint.every=2", "train.precision=fp64", "data.sources.0.max_samples=40",
    "export.at_end=merged",
)  # fmt: skip
WEIGHTS = "exports/merged/model.safetensors"


class Subject:
    """A run folder with its stores, which is flipped, used and restored."""

    def __init__(self, root: Path, whet: Any, recipe: str) -> None:
        self.root, self.run, self._whet, self._pristine = root, root / "run", whet, root.with_name("pristine")
        self._train = ("train", recipe, *SETTINGS, f"run.dir={self.run}", f"data.store={root / 'store'}")

    def make(self, *more: str) -> None:
        ended = self._whet(*self._train, *more)
        assert ended.code == 0, ended.err
        shutil.copytree(self.root, self._pristine)

    def restore(self) -> None:
        shutil.rmtree(self.root)
        shutil.copytree(self._pristine, self.root)

    def files(self) -> list[str]:
        names = (str(f.relative_to(self._pristine)) for f in sorted(self._pristine.rglob("*")) if f.is_file())
        return [name for name in names if (self._pristine / name).stat().st_size and Path(name).name != "lock"]

    def flip(self, name: str, dice: random.Random) -> None:
        content = bytearray((self.root / name).read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        (self.root / name).write_bytes(content)

    def resume(self) -> tuple[Any, Any]:
        """How the run ended, and its weights and scores."""
        ended = self._whet(*self._train, "--resume")
        if ended.code:
            return ended, None
        lines = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        scores = [(line["step"], line.get("loss"), line.get("val_loss")) for line in lines if line["step"] > 2]
        return ended, ((self.run / WEIGHTS).read_bytes(), scores)

    def evaluate(self, export: bool) -> tuple[Any, Any]:
        """How `whet eval` of the run or of its export ended, and the scores."""
        file = self.root.with_name("data.jsonl")
        file.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]}\n')
        what = (self.run / "exports/merged", "--data", file) if export else (self.run,)
        ended = self._whet("eval", *what, "--json")
        return ended, None if ended.code else json.loads(ended.out)


@pytest.fixture
def interrupted(tmp_path: Path, whet: Any, recipe: str) -> Subject:
    subject = Subject(tmp_path / "flipped", whet, recipe)
    subject.make("--until", "2")
    return subject


@pytest.fixture
def finished(tmp_path: Path, whet: Any, recipe: str) -> Subject:
    subject = Subject(tmp_path / "flipped", whet, recipe)
    subject.make()
    return subject


def outcomes(subject: Subject, count: int, seed: int, trains: bool) -> Iterator[tuple[str, str, str]]:
    """(file, outcome, message) of each flip."""

    def use(name: str) -> tuple[Any, Any]:
        return subject.resume() if trains else subject.evaluate(name.startswith("run/exports/merged/"))

    dice, files, expected = random.Random(seed), subject.files(), dict[bool, Any]()
    for _ in range(count):
        name = dice.choice(files)
        kind = name.startswith("run/exports/merged/")
        subject.restore()
        if kind not in expected:
            expected[kind] = use(name)[1]
            subject.restore()
        subject.flip(name, dice)
        try:
            ended, result = use(name)
        except Exception as error:
            yield name, "traceback", repr(error)
            continue
        if ended.code:
            yield name, "refused" if ended.code in (1, 3) and "Traceback" not in ended.err else "traceback", ended.err
        elif result == expected[kind]:
            yield name, "same result", ended.err
        else:
            yield name, "noticed" if "changed after" in ended.err else "changed unnoticed", ended.err


def report(subject: Subject, count: int, seed: int, trains: bool) -> str:
    """Which outcomes there were, and how often; a failure if one is wrong."""
    found = list(outcomes(subject, count, seed, trains))
    counts = Counter(outcome for _, outcome, _ in found)
    wrong = [each for each in found if each[1] in ("traceback", "changed unnoticed")]
    assert not wrong, "\n".join(f"{name}: {outcome}: {how[-600:]}" for name, outcome, how in wrong)
    return f"{count} bit flips, then {'resume' if trains else 'eval'}: {dict(counts)}"


def test_a_few_flipped_bits_before_a_resume(interrupted: Subject) -> None:
    report(interrupted, SAMPLE, seed=1, trains=True)


def test_a_few_flipped_bits_before_an_evaluation(finished: Subject) -> None:
    report(finished, SAMPLE // 2, seed=2, trains=False)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_flipped_bits_before_a_resume(share: int, interrupted: Subject, record_property: Any) -> None:
    record_property("shown", report(interrupted, FLIPS // 2 // SHARES, seed=30 + share, trains=True))


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_flipped_bits_before_an_evaluation(share: int, finished: Subject, record_property: Any) -> None:
    record_property("shown", report(finished, FLIPS // 2 // SHARES, seed=40 + share, trains=False))
