"""Hardware that is not here, as `--plan` names it: nodes × devices × card."""

from __future__ import annotations

import re
from dataclasses import dataclass

from whet.core.errors import WhetError
from whet.fit.cards import Card, find_card
from whet.fit.memory_parts import GIB

_PLAN = re.compile(r"\s*(\d{1,9})\s*[x×*]\s*(\d{1,9})\s*[x×*]\s*(\S.*?)\s*", re.IGNORECASE)
_MOST_DEVICES = 10**6
_CONTEXT_BYTES, _NCCL_BYTES = GIB // 2, GIB
"""What the driver and the libraries of collectives take on each device, beside torch's tensors."""
_MAX_SHARE = 0.92
"""Of a device's memory that a run uses, as `train.micro_rows: auto` does: the rest is for fragments."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """So many nodes with so many devices each."""

    nodes: int
    devices: int
    card: Card

    @property
    def world(self) -> int:
        """All devices, one process each."""
        return self.nodes * self.devices

    @property
    def usable_bytes(self) -> int:
        """What the tensors of a run may take on one device."""
        taken = _CONTEXT_BYTES + (_NCCL_BYTES if self.world > 1 else 0)
        return int(self.card.memory * _MAX_SHARE) - taken

    def __str__(self) -> str:
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes:,} nodes"
        return f"{nodes} × {self.devices:,} {self.card.name}"


def parse_hardware(text: str) -> Hardware:
    """`24x8xMI250X`: 24 nodes with 8 devices each; a MI250X has two devices, its GCDs."""
    found = _PLAN.fullmatch(text)
    if found is None:
        example = "1x1xH200"
        if short := re.fullmatch(r"\s*(\d{1,9})\s*[x×*]\s*([A-Za-z].*?)\s*", text):
            example = f"1x{short[1]}x{short[2]}"
        elif re.fullmatch(r"\s*[A-Za-z][\w \-]*", text):
            example = f"1x1x{text.strip()}"
        raise WhetError(
            f"--plan: {text!r} is not of the form NODESxDEVICESxCARD. Give nodes, devices of each and the card, such "
            f"as --plan {example}"
        )
    nodes, devices = int(found[1]), int(found[2])
    if not nodes or not devices:
        what = "nodes" if not nodes else "devices"
        raise WhetError(f"--plan: {text!r} has 0 {what}. Give at least 1, such as --plan 1x8x{found[3]}")
    if nodes * devices > _MOST_DEVICES:
        raise WhetError(f"--plan: {text!r} has more than {_MOST_DEVICES:,} devices. Give fewer")
    return Hardware(nodes, devices, find_card(found[3]))
