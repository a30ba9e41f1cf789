"""What to start on this machine: process count, rendezvous, environment, and the torchrun command."""

from __future__ import annotations

import fcntl
import os
import shlex
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from whet.core.errors import WhetError
from whet.core.resources import available_cores
from whet.launch.config import LaunchConfig

# What is to be started, with everything about this machine settled.

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the machines of a run find each other."""

    endpoint: str
    is_host: bool
    """Whether it is this machine."""
    address: str
    """Of this machine, as the others reach it."""


@dataclass(frozen=True, slots=True)
class LaunchJob:
    """One machine's part of a run."""

    recipe: Path
    overrides: tuple[str, ...]
    folder: Path
    name: str
    nodes: int
    processes: int
    """On this machine."""
    meeting: Rendezvous | None
    """None on a single machine."""
    env: Mapping[str, str]
    max_restarts: int
    wait_s: float
    resume: bool
    quiet: bool


def make_launch_job(
    recipe: Path, overrides: tuple[str, ...], folder: Path, name: str, launch: LaunchConfig, resume: bool, quiet: bool
) -> LaunchJob:
    """Count this machine's devices and find its place among the others."""
    if launch.nodes > 1 and launch.rendezvous is None:
        raise WhetError(
            f"launch.rendezvous is missing: {launch.nodes} machines (launch.nodes) find each other at HOST:PORT, such "
            "as launch.rendezvous=node1:29400, the same on all of them"
        )
    meeting = _resolve_rendezvous(launch.rendezvous) if launch.nodes > 1 and launch.rendezvous else None
    processes = launch.gpus or launch.processes or _device_count()
    env = dict(launch.env)
    if "OMP_NUM_THREADS" not in os.environ:
        env.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // processes)))
    if meeting is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Gloo asks for the address of the machine's own name, which on many is 127.0.1.1: no other machine reaches it.
        interface = _interface_of(meeting.address)
        if interface is not None:
            env.setdefault("GLOO_SOCKET_IFNAME", interface)
    return LaunchJob(
        recipe, overrides, folder, name, launch.nodes, processes, meeting, env, launch.max_restarts, launch.wait,
        resume, quiet,
    )  # fmt: skip


def _device_count() -> int:
    import torch

    return max(1, torch.accelerator.device_count())


def _resolve_rendezvous(endpoint: str) -> Rendezvous:
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing: asks the system which of its addresses leads there
            address = str(probe.getsockname()[0])
    except (OSError, OverflowError) as error:
        raise WhetError(
            f"launch.rendezvous: {endpoint} cannot be reached from {socket.gethostname()} ({error}). Give the name or "
            "address of one of the machines, as all of them know it"
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


# The command that starts a job's processes on this machine.

_FORWARDED_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""What torchrun passes on to its processes. Without SIGUSR1 in it, Slurm's warning kills torchrun and orphans them."""


def launch_command(job: LaunchJob, resume: bool) -> list[str]:
    """One process is started as it is; several by torchrun, which restarts nothing: it knows neither growing waits nor
    failures that repeat."""
    train = ["whet", "train", str(job.recipe), *job.overrides]
    train += ["--resume"] * resume + ["--quiet"] * job.quiet
    if job.nodes * job.processes == 1:
        return [sys.executable, "-m", *train]
    return [
        sys.executable, "-m", "whet.launch.torchrun_agent", *_rendezvous_arguments(job), "--nproc-per-node", str(job.processes),
        "--max-restarts", "0", "--signals-to-handle", _FORWARDED_SIGNALS, "-m", *train,
    ]  # fmt: skip


def _rendezvous_arguments(job: LaunchJob) -> list[str]:
    if job.meeting is None:
        return ["--standalone", "--nnodes", "1"]
    return [
        "--nnodes", str(job.nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", job.meeting.endpoint, "--rdzv-id",
        job.name, "--rdzv-conf", f"is_host={str(job.meeting.is_host).lower()}", "--local-addr", job.meeting.address,
    ]  # fmt: skip


def format_command(job: LaunchJob, resume: bool) -> str:
    """As one would type it."""
    set_first = ["env", *(f"{name}={value}" for name, value in job.env.items())] if job.env else []
    return shlex.join([*set_first, *launch_command(job, resume)])
