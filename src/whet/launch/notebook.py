"""Jupyter in a Slurm job. `python -m whet.launch.notebook FOLDER` starts it on the node; `whet launch --notebook` waits
for it and shows how to reach it.

The token is in a file that only its user can read and in Jupyter's environment: not in the script, the log or the
command line, which others on the node can see.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from whet.core.console import info, print_error
from whet.core.errors import WhetError
from whet.core.files import read_json
from whet.launch.slurm_commands import ENDED_STATES, POLL_S, describe_end, run_slurm, task_records

LOCAL_PORT = 8888
IDLE_S = 3600
"""Kernels and terminals that are idle so long end, and the server with the last of them."""


@dataclass(frozen=True, slots=True)
class Notebook:
    """Where Jupyter listens."""

    host: str
    port: int
    token_file: Path

    @property
    def tunnel(self) -> str:
        """The command for the user's own machine; this one is the login node."""
        return f"ssh -N -L {LOCAL_PORT}:{self.host}:{self.port} {getpass.getuser()}@{socket.getfqdn()}"


def jupyter_command() -> list[str]:
    """The user's own JupyterLab: of this Python, or on the PATH."""
    if importlib.util.find_spec("jupyterlab") is not None:
        return [sys.executable, "-m", "jupyterlab"]
    if (program := shutil.which("jupyter-lab")) is not None:
        return [program]
    raise WhetError(
        f"--notebook: JupyterLab is not installed for {sys.executable}, and jupyter-lab is not on the PATH. Install it "
        f"({sys.executable} -m pip install jupyterlab), or load it in the job: launch.slurm.modules, launch.slurm.setup"
    )


# On the login node.


def wait_for_notebook(job: int, folder: Path) -> Notebook:
    """Wait until Jupyter runs; Ctrl-C cancels the job, which nobody could find otherwise."""
    shown = ""
    try:
        while not _connection_file(folder, str(job)).exists():
            states = [task["JobState"] for task in task_records(job)]
            if not states or states[0] in ENDED_STATES:
                raise WhetError(_why_not(job, folder, states))
            if states[0] != shown:
                shown = states[0]
                info(f"job {job}: {shown.lower()}")
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would leave the job
        run_slurm("scancel", str(job))
        info(f"job {job} is cancelled")
        raise
    where = read_json(_connection_file(folder, str(job)))
    return Notebook(where["host"], where["port"], _token_file(folder, str(job)))


def _why_not(job: int, folder: Path, states: list[str]) -> str:
    output, lines = folder / f"{job}.out", []
    with contextlib.suppress(OSError):
        lines = [line for line in output.read_text(errors="replace").splitlines() if line.startswith("error: ")]
    reason = lines[-1].removeprefix("error: ") if lines else describe_end(states[0]) if states else "it is gone"
    return f"job {job}: Jupyter did not start: {reason.removesuffix('.')}. Its output is in {output}"


def _connection_file(folder: Path, job: str) -> Path:
    return folder / f"{job}.json"


def _token_file(folder: Path, job: str) -> Path:
    return folder / f"{job}.token"


# On the node.


def main(folder: Path, job: str) -> int:
    """Start Jupyter and wait for its end; returns its exit code."""
    try:
        command = jupyter_command()
    except WhetError as error:
        print_error(f"error: {error}")
        return error.exit_code
    token, port = secrets.token_urlsafe(32), _free_port()
    command += [
        "--no-browser", "--ip=0.0.0.0", f"--port={port}", "--ServerApp.port_retries=0",
        f"--ServerApp.shutdown_no_activity_timeout={IDLE_S}", f"--MappingKernelManager.cull_idle_timeout={IDLE_S}",
        "--MappingKernelManager.cull_connected=True", f"--TerminalManager.cull_inactive_timeout={IDLE_S}",
    ]  # fmt: skip
    if os.geteuid() == 0:
        command.append("--allow-root")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # of scancel: remove the files
    env = {**os.environ, "JUPYTER_TOKEN": token}
    with _private_file(_token_file(folder, job), token), subprocess.Popen(command, env=env) as jupyter:
        try:
            while not _is_listening(port):
                if jupyter.poll() is not None:
                    return jupyter.returncode
                time.sleep(0.2)
            connection = json.dumps({"host": socket.gethostname(), "port": port})
            with _private_file(_connection_file(folder, job), connection):
                return jupyter.wait()
        finally:
            jupyter.terminate()


@contextlib.contextmanager
def _private_file(path: Path, text: str) -> Iterator[None]:
    """A file for its owner alone, which exists during the block; complete from the start."""
    temporary = path.with_name(f".{path.name}")
    for leftover in (temporary, path):  # of a job that was requeued
        leftover.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    temporary.rename(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def _is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), os.environ["SLURM_JOB_ID"]))
