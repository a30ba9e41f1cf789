"""The buttons of the page: stop and resume, as `whet runs` does them, in processes of their own; good and bad answers,
as lines that whet can train or evaluate on."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from whet.core.display import mask_secrets
from whet.core.errors import WhetError, os_error
from whet.core.json_lines import append_json_line
from whet.runs.summary import RunSummary, summarize_run_folder

_WAIT_S = 3.0
"""How long a command may take to say that it cannot start."""


def stop(run: RunSummary) -> dict[str, Any]:
    """Let a run save a checkpoint and end. The answer does not wait for that."""
    if not run.state.is_active and run.state.name != "unreachable":
        raise WhetError(f"{run.name}: not running ({run.state.name}), so there is nothing to stop")
    _start("stop", run)
    return {"message": f"{run.name} saves a checkpoint and ends after the current step"}


def resume(run: RunSummary) -> dict[str, Any]:
    """Continue a run from its newest checkpoint, as it was started."""
    if run.state.is_active:
        raise WhetError(f"{run.name}: {run.state.name} already")
    if run.state.name == "unreachable":
        raise WhetError(
            f"{run.name}: {run.state.note}. Two processes would destroy the run: if the one on {run.host} is gone, use "
            f"a terminal: whet runs resume {run.folder}"
        )
    _start("resume", run)
    return {"message": f"{run.name} continues"}


def _start(verb: str, run: RunSummary) -> None:
    """Start `whet runs VERB` so that it outlives this server. If it fails at once, say why."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "whet", "runs", verb, str(run.folder), "--quiet"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output, start_new_session=True,
        )  # fmt: skip
        end = time.monotonic() + _WAIT_S
        while time.monotonic() < end and process.poll() is None:
            time.sleep(0.05)
            if verb == "resume" and summarize_run_folder(run.folder).state.is_active:
                return
        if process.poll() not in (None, 0, 75):
            output.seek(0)
            said = output.read(4000).decode("utf-8", "replace").strip()
            raise WhetError(mask_secrets(said.removeprefix("error: ")) or f"whet runs {verb} ended with an error")


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
