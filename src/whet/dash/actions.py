"""The buttons of the page: stop and resume, as `whet runs` does them, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from typing import Any

from whet.core.display import mask_secrets
from whet.core.errors import WhetError
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
