"""What is to be started, with everything about this machine settled."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from whet.core.cores import usable_cores
from whet.core.errors import WhetError
from whet.fleet.config import LaunchConfig

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the machines of a run find each other."""

    endpoint: str
    is_host: bool
    """Whether it is this machine."""
    address: str
    """Of this machine, as the others reach it."""


@dataclass(frozen=True, slots=True)
class Job:
    """One machine's part of a run."""

    recipe: Path
    overrides: tuple[str, ...]
    folder: Path
    name: str
    nodes: int
    processes: int
    """On this machine."""
    meeting: Meeting | None
    """None on a single machine."""
    env: Mapping[str, str]
    max_restarts: int
    wait_s: float
    resume: bool
    quiet: bool


def make_job(
    recipe: Path, overrides: tuple[str, ...], folder: Path, name: str, launch: LaunchConfig, resume: bool, quiet: bool
) -> Job:
    """Count this machine's devices and find its place among the others."""
    if launch.nodes > 1 and launch.rendezvous is None:
        raise WhetError(
            f"launch.rendezvous is missing: {launch.nodes} machines (launch.nodes) find each other at HOST:PORT, such "
            "as launch.rendezvous=node1:29400, the same on all of them"
        )
    meeting = _meeting(launch.rendezvous) if launch.nodes > 1 and launch.rendezvous else None
    processes = launch.gpus or launch.processes or _devices()
    env = dict(launch.env)
    if "OMP_NUM_THREADS" not in os.environ:
        env.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // processes)))
    if meeting is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Gloo asks for the address of the machine's own name, which on many is 127.0.1.1: no other machine reaches it.
        interface = _interface(meeting.address)
        if interface is not None:
            env.setdefault("GLOO_SOCKET_IFNAME", interface)
    return Job(
        recipe, overrides, folder, name, launch.nodes, processes, meeting, env, launch.max_restarts, launch.wait,
        resume, quiet,
    )  # fmt: skip


def _devices() -> int:
    import torch

    return max(1, torch.accelerator.device_count())


def _meeting(endpoint: str) -> Meeting:
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
    return Meeting(endpoint, address == place[0], address)


def _interface(address: str) -> str | None:
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
