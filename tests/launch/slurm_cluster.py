"""A real Slurm on this machine: munge, one slurmctld and a slurmd per node, all inside one folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged")

_CONFIG = """
ClusterName=whet
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={lab}/munge/sock,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={lab}/state
SlurmdSpoolDir={lab}/spool/%n
SlurmctldPidFile={lab}/run/slurmctld.pid
SlurmdPidFile={lab}/run/slurmd-%n.pid
SlurmctldLogFile={lab}/log/slurmctld.log
SlurmdLogFile={lab}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
SlurmdParameters=config_overrides
KillWait=5
{nodes}
PartitionName=debug Nodes=n[1-{count}] Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=n[1-{count}] MaxTime=5 State=UP
PartitionName=closed Nodes=n[1-{count}] AllowAccounts=physics State=UP
"""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if _find(name) is None]


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Cluster:
    """A running cluster of nodes n1, n2, …"""

    def __init__(self, lab: Path, count: int) -> None:
        self.lab, self.count = lab, count
        self.environment = {"SLURM_CONF": str(lab / "slurm.conf")}

    def run(self, *words: str) -> str:
        """The output of one of Slurm's commands."""
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, env={**os.environ, **self.environment}
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def wait_for_state(self, job: int, *states: str, timeout_s: float = 300) -> str:
        until = time.monotonic() + timeout_s
        while True:
            text = self.run("scontrol", "show", "job", str(job), "--oneliner")
            state = text.split("JobState=")[1].split()[0]
            if state in states:
                return text
            assert time.monotonic() < until, f"job {job} is {state}"
            time.sleep(0.1)

    def output(self, run: Path, job: int) -> str:
        """What a job of a run has printed."""
        return (run / "slurm" / f"{job}.out").read_text()

    def cancel_all(self) -> None:
        jobs = self.run("squeue", "-h", "-o", "%A").split()
        if jobs:
            self.run("scancel", *jobs)
        until = time.monotonic() + 150
        while self.run("squeue", "-h").strip() and time.monotonic() < until:
            time.sleep(0.2)

    def free_port(self) -> int:
        return _free_ports(1)[0]

    def start_node(self, number: int, hidden: Path | None = None) -> None:
        """Start the slurmd of a node; `hidden`: a folder that it does not see."""
        found = _find("slurmd")
        assert found
        words = [found, "-N", f"n{number}"]
        if hidden is not None:
            script = f"mount -t tmpfs none {hidden} && exec {' '.join(words)}"
            words = ["unshare", "--mount", "sh", "-c", script]
        self.run(*words)
        self.wait_for_nodes()

    def kill_node(self, number: int) -> None:
        """The node dies: its slurmd and everything that runs on it, at once; Slurm notices."""
        file = self.lab / f"run/slurmd-n{number}.pid"
        os.kill(int(file.read_text()), signal.SIGKILL)
        file.unlink()
        name = f"SLURMD_NODENAME=n{number}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (path / "environ").read_bytes().split(b"\0")
                if name in variables and f"SLURM_CONF={self.lab}/slurm.conf".encode() in variables:
                    os.kill(int(path.name), signal.SIGKILL)
        self.run("scontrol", "update", f"NodeName=n{number}", "State=DOWN", "Reason=died")

    def wait_for_nodes(self) -> None:
        until = time.monotonic() + 300
        while len(self.run("sinfo", "-hN", "-t", "idle", "-p", "debug").split("\n")) <= self.count:
            assert time.monotonic() < until, (self.lab / "log/slurmctld.log").read_text()[-2000:]
            time.sleep(0.1)


@contextlib.contextmanager
def slurm_cluster(lab: Path, count: int = 2) -> Iterator[Cluster]:
    """Start a cluster and wait until its nodes are idle."""
    for folder in ("munge", "state", "log", "run", *(f"spool/n{n}" for n in range(1, count + 1))):
        (lab / folder).mkdir(parents=True)
    key = lab / "munge/key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    controller, *ports = _free_ports(count + 1)
    host = socket.gethostname().split(".")[0]
    nodes = "\n".join(
        f"NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=8000"
        for n, port in enumerate(ports, 1)
    )
    user = os.environ.get("USER", "root") if os.geteuid() else "root"
    config = lab / "slurm.conf"
    config.write_text(_CONFIG.format(host=host, controller=controller, user=user, lab=lab, nodes=nodes, count=count))
    cluster = Cluster(lab, count)
    munge = [f"--{name}-file={lab}/munge/{name}" for name in ("key", "seed", "pid", "log")]
    try:
        _start(cluster, "munged", *munge, f"--socket={lab}/munge/sock")
        _start(cluster, "slurmctld", "-c")
        for n in range(1, count + 1):
            _start(cluster, "slurmd", "-N", f"n{n}")
        cluster.wait_for_nodes()
        yield cluster
    finally:
        _stop(cluster)


def _start(cluster: Cluster, program: str, *arguments: str) -> None:
    found = _find(program)
    assert found
    cluster.run(found, *arguments)


def _stop(cluster: Cluster) -> None:
    with contextlib.suppress(AssertionError):
        cluster.cancel_all()
    for file in (*cluster.lab.glob("run/*.pid"), cluster.lab / "munge/pid"):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(file.read_text()), signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
