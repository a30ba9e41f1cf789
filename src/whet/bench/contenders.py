"""Who takes part: which other tools, found where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from whet.core.errors import WhetError

PEERS = {"trl": "TRL", "unsloth": "Unsloth"}
"""By the name of their package."""
_SCRIPTS = Path(__file__).parent / "peers"
_PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "trl",
    "unsloth",
    "flash-attn",
    "liger-kernel",
    "bitsandbytes",
    "accelerate",
)


@dataclass(frozen=True, slots=True)
class Contender:
    """A tool, and the Python that runs it."""

    name: str
    python: str = sys.executable
    folders: str = ""
    """Put in front of PYTHONPATH, joined as there."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of the packages that it would use; only those that are installed."""

    @property
    def title(self) -> str:
        return PEERS.get(self.name, self.name)

    @property
    def script(self) -> Path:
        return _SCRIPTS / f"{self.name}_peer.py"

    def environment(self) -> dict[str, str]:
        """This process's own, with the folders in front; the hub is not asked by anyone."""
        ours = os.environ | {"HF_HUB_OFFLINE": "1"}
        path = [part for part in (self.folders, os.environ.get("PYTHONPATH", "")) if part]
        return ours | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})


def ourselves() -> Contender:
    """whet, as it is installed here."""
    return _with_versions(Contender("whet"))


def parse_peers(text: str) -> list[Contender]:
    """From `trl,unsloth=/opt/unsloth/bin/python`: after = stands an interpreter, or folders joined by colons."""
    found: list[Contender] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, where = part.partition("=")
        if name not in PEERS:
            raise WhetError(f"--peers {part}: {name} is not known; known are: {', '.join(PEERS)}")
        if name in (peer.name for peer in found):
            raise WhetError(f"--peers {text}: {name} is named twice")
        found.append(_with_versions(_placed(name, where)))
    return found


def _placed(name: str, where: str) -> Contender:
    places = [Path(place).expanduser().absolute() for place in where.split(os.pathsep) if place]
    if not places:
        return Contender(name)
    if len(places) == 1 and os.access(places[0], os.X_OK) and places[0].is_file():
        return Contender(name, python=str(places[0]))
    for place in places:
        if not place.is_dir():
            raise WhetError(
                f"--peers {name}={where}: {place} is neither a folder of packages nor a Python that can be run"
            )
    return Contender(name, folders=os.pathsep.join(map(str, places)))


def _with_versions(contender: Contender) -> Contender:
    """Ask its own Python what it has, without importing any of it."""
    try:
        done = subprocess.run(
            [contender.python, str(_SCRIPTS / "installed.py"), *_PACKAGES], env=contender.environment(),
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        versions: dict[str, str] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise WhetError(f"--peers {contender.name}={contender.python}: this is no Python that works: {error}") from None
    return Contender(contender.name, contender.python, contender.folders, versions)
