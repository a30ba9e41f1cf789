"""What a user thinks of an answer: a line that whet can train or evaluate on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from whet.core.errors import WhetError, os_error
from whet.core.files import append_json_line


def write_feedback(run: Path, messages: list[dict[str, Any]], good: bool, model: str, step: int | None) -> Path:
    """Append a conversation to feedback/good.jsonl or feedback/bad.jsonl in the folder of its run."""
    if messages[-1]["role"] != "assistant" or not any(each["role"] == "user" for each in messages):
        raise WhetError("messages: feedback is about an answer, so the last message is the assistant's")
    folder = run / "feedback"
    file = folder / ("good.jsonl" if good else "bad.jsonl")
    if folder.is_symlink() or file.is_symlink():
        raise WhetError(f"{file}: this is a link. Feedback is written into the folder of the run itself")
    try:
        folder.mkdir(exist_ok=True)
        append_json_line(file, {"messages": messages, "model": model, "step": step, "time": time.time()})
    except OSError as error:
        raise os_error(error, "writing feedback", file) or WhetError(f"{file}: cannot be written ({error})") from None
    return file
