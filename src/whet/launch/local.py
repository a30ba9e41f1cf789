"""What to start on this machine: number of processes, rendezvous, environment, and the torchrun
command or the user's program."""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import shlex
import shutil
import socket
import struct
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from whet.core.display import mask_secrets
from whet.core.errors import WhetError
from whet.core.resources import available_cores, device_count
from whet.core.yaml import parse_yaml
from whet.launch.config import LaunchConfig, LogPolicy

_SIOCGIFADDR = 0x8915
_FORWARDED_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""Signals that torchrun forwards to its workers. Without SIGUSR1, Slurm's warning kills torchrun and orphans them."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the machines of a run meet."""

    endpoint: str
    is_host: bool
    """Whether the endpoint is this machine."""
    address: str
    """Of this machine, on the network of the endpoint."""


@dataclass(frozen=True, slots=True)
class LaunchJob:
    """One machine's part of a run, or of a program of the user's."""

    command: tuple[str, ...]
    """Of each process: `whet train`, or the program."""
    folder: Path | None
    """The run folder; None for a program, of which only the exit code is known."""
    name: str
    nodes: int
    processes: int
    """On this machine."""
    rendezvous: Rendezvous | None
    """None for a single machine."""
    env: Mapping[str, str]
    named: Collection[str]
    """The variables of launch.env, whose values are not shown."""
    max_restarts: int
    wait_s: float
    log_policies: Sequence[LogPolicy] = ()
    resume: bool = False
    notify: Sequence[str] = ()
    """Whom to tell when the run has failed for good (run.notify)."""

    @property
    def uses_torchrun(self) -> bool:
        """A single process of a run is started directly; programs may need torchrun's variables (RANK, MASTER_ADDR)."""
        return self.folder is None or self.nodes * self.processes > 1


def train_command(recipe: Path, overrides: Sequence[str], quiet: bool, until: int | None = None) -> tuple[str, ...]:
    """`whet train`, without --resume and without the values of launch.env."""
    options = [*(["--quiet"] if quiet else []), *([] if until is None else ["--until", str(until)])]
    return (sys.executable, "-m", "whet", "train", str(recipe), *map(_without_values, overrides), *options)


def make_launch_job(
    command: tuple[str, ...], folder: Path | None, name: str, launch: LaunchConfig, resume: bool = False,
    notify: Sequence[str] = (),
) -> LaunchJob:  # fmt: skip
    """Count this machine's devices and resolve the rendezvous."""
    nodes, most = launch.node_range()
    if nodes != most:
        raise WhetError(f"launch.nodes: {launch.nodes} is a range, which needs --on slurm. Give the number of machines")
    if nodes > 1 and launch.rendezvous is None:
        raise WhetError(
            f"launch.rendezvous is missing: {nodes} machines (launch.nodes) need a HOST:PORT to meet. Set it to "
            "the same value on all of them, such as launch.rendezvous=node1:29400"
        )
    rendezvous = _resolve_rendezvous(launch.rendezvous) if nodes > 1 and launch.rendezvous else None
    processes = launch.gpus or launch.processes or device_count()
    env = launch.required_variables()
    if "OMP_NUM_THREADS" not in os.environ:
        env.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // processes)))
    if folder is None:
        env.setdefault("PYTHONUNBUFFERED", "1")  # as torchrun starts Python, so that a log shows what happens now
    if rendezvous is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Gloo resolves the machine's own name, which often is 127.0.1.1, where no other machine can reach it
        interface = _interface_of(rendezvous.address)
        if interface is not None:
            env.setdefault("GLOO_SOCKET_IFNAME", interface)
    return LaunchJob(
        command=command, folder=folder, name=name, nodes=nodes, processes=processes, rendezvous=rendezvous, env=env,
        named=tuple(launch.env), max_restarts=launch.max_restarts, wait_s=launch.wait,
        log_policies=launch.log_policies, resume=resume, notify=notify,
    )  # fmt: skip


def _resolve_rendezvous(endpoint: str) -> Rendezvous:
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing: selects the local address of the route
            address = str(probe.getsockname()[0])
    except (OSError, OverflowError) as error:
        raise WhetError(
            f"launch.rendezvous: {endpoint} cannot be reached from {socket.gethostname()} ({error}). Use a name or "
            "address of one of the machines that all of them can resolve"
        ) from None
    return Rendezvous(endpoint, address == place[0], address)


def _interface_of(address: str) -> str | None:
    """The name of the network interface with this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


def launch_command(job: LaunchJob, resume: bool) -> list[str]:
    """One process is started directly, several by torchrun, without its restarts: it has no backoff and does not notice
    failures that repeat."""
    command = [*job.command, *(["--resume"] if resume and job.folder is not None else [])]
    if not job.uses_torchrun:
        return command
    program, *arguments = command
    arguments = [word.replace("$", "$$") for word in arguments]  # torchrun replaces $$ and ${local_rank} in them
    return [
        sys.executable, "-m", "whet.launch.torchrun_agent", *_rendezvous_arguments(job), "--nproc-per-node",
        str(job.processes), "--max-restarts", "0", "--signals-to-handle", _FORWARDED_SIGNALS, "--no-python", program,
        *arguments,
    ]  # fmt: skip


def _rendezvous_arguments(job: LaunchJob) -> list[str]:
    if job.rendezvous is None:
        return ["--standalone", "--nnodes", "1"]
    endpoint, is_host = job.rendezvous.endpoint, str(job.rendezvous.is_host).lower()
    return [
        "--nnodes", str(job.nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", job.name,
        "--rdzv-conf", f"is_host={is_host}", "--local-addr", job.rendezvous.address,
    ]  # fmt: skip


def _without_values(override: str) -> str:
    """An override in which the values of launch.env are variables: the processes have them in their environment."""
    key, _, value = override.partition("=")
    keys = key.strip().split(".")
    if len(keys) > 2 and keys[:2] == ["launch", "env"]:
        return f'{key}="${{{".".join(keys[2:])}}}"'
    if keys not in (["launch"], ["launch", "env"]):
        return override
    given = parse_yaml(value, key, numbered=False).plain()
    env = given if len(keys) == 2 else given.get("env")
    if not isinstance(env, dict):
        return override
    names = {name: f"${{{name}}}" for name in env}
    return f"{key}={json.dumps(names if env is given else given | {'env': names})}"


def format_command(job: LaunchJob, resume: bool) -> str:
    """The command as a shell line. Variables of launch.env are named: the shell that runs it must have them."""
    values = {name: f'"${{{name}:?}}"' if name in job.named else shlex.quote(value) for name, value in job.env.items()}
    variables = "".join(f"{name}={value} " for name, value in values.items())
    return (f"env {variables}" if variables else "") + mask_secrets(shlex.join(launch_command(job, resume)))


# Programs of the user's that `whet launch` starts: a script, or anything that the shell would find.

_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def resolve_program(words: Sequence[str], python: str, verbs: Collection[str], is_here: bool = True) -> tuple[str, ...]:
    """The command of a program. A script by itself is run by `python`. `is_here`: its files can be looked for on this
    machine, because it does not run in a container. `verbs` of whet, one of which may have been meant."""
    program, script = words[0], python_script(words)
    command = (python, *words) if program == script else tuple(words)
    if not is_here:
        return command
    if script is not None and not Path(script).expanduser().is_file():
        raise WhetError(f"-- {' '.join(words[:3])}: there is no file {script}. Check the path{_near_files(script)}")
    if program != script and "/" in program and Path(program).is_file() and shutil.which(program) is None:
        raise WhetError(f"-- {program}: the file is not executable. Make it so: chmod +x {program}")
    if program != script and shutil.which(program) is None:
        near = difflib.get_close_matches(program, verbs, n=1, cutoff=0.6)
        hint = f"Did you mean {near[0]}?" if near else f"The verbs are {', '.join(verbs)}"
        raise WhetError(f"-- {program}: neither a verb of whet nor a program on this machine. {hint}")
    return command


def python_script(words: Sequence[str]) -> str | None:
    """The script that a command runs with Python: the command itself, or the first argument of the interpreter."""
    if words[0].endswith(".py"):
        return words[0]
    if not Path(words[0]).name.startswith("python"):
        return None
    rest = iter(words[1:])
    for word in rest:
        if word in _OPTIONS_WITH_VALUE:
            next(rest, None)
        elif word.startswith(("-m", "-c")) or word == "-":
            return None
        elif not word.startswith("-"):
            return word
    return None


def program_name(words: Sequence[str]) -> str:
    """A short name for what runs."""
    return Path(python_script(words) or words[0]).stem


def _near_files(script: str) -> str:
    folder = Path(script).expanduser().parent
    names = [path.name for path in folder.glob("*.py")] if folder.is_dir() else []
    near = difflib.get_close_matches(Path(script).name, names, n=1, cutoff=0.6)
    return f"; did you mean {folder / near[0]}?" if near else ""
