"""CONTRIBUTING.md follows one conversation through the code: every function it names is called, in that order."""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import whet

SOURCE = Path(whet.__file__).parent
PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
_STOP = re.compile(r"`([\w/]+\.py)` `([\w.]+)`")


def stops_of(text: str) -> list[tuple[str, str]]:
    """(file, function) of every stop of the walk, in order."""
    walk = text.partition("## One conversation, from file to export")[2].partition("\n## ")[0]
    return _STOP.findall(walk)


def test_one_conversation_passes_these_functions_in_this_order(whet: Any, tmp_path: Path) -> None:
    stops = stops_of(PAGE.read_text())
    assert len(stops) >= 12
    seen: dict[tuple[str, str], int] = {}

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            file = frame.f_code.co_filename.removeprefix(f"{SOURCE}/")
            seen.setdefault((file, frame.f_code.co_qualname), len(seen))

    messages = [{"role": "user", "content": "Two teas, please."}, {"role": "assistant", "content": "Two teas."}]
    data = tmp_path / "one.jsonl"
    data.write_text(json.dumps({"messages": messages}) + "\n")
    recipe = tmp_path / "one.yaml"
    recipe.write_text(
        f"model: {{path: builtin:tiny}}\ndata: {{sources: [{{path: {data}}}], max_length: 256}}\n"
        "train: {steps: 1, batch: {conversations: 1}}\nparallel: {}\n"
    )
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert ended.code == 0, ended.err
    missing = [stop for stop in stops if stop not in seen]
    assert missing == [], "named in CONTRIBUTING.md, but not called"
    order = [seen[stop] for stop in stops]
    assert order == sorted(order), [stop for _, stop in sorted(zip(order, stops, strict=True))]


def test_a_function_that_is_gone_is_found() -> None:
    text = (
        "## One conversation, from file to export\n1. `core/files.py` `no_such_function` reads it.\n## Next\n`a.py` `b`"
    )
    assert stops_of(text) == [("core/files.py", "no_such_function")]
