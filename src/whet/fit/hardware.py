"""Hardware that `whet fit --plan` knows: cards, and nodes × devices × card."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from whet.core.errors import WhetError
from whet.model.flops import peak_flops_of
from whet.run.memory_choice import MAX_SHARE

# Cards: memory, bandwidth and links, from the vendors' data sheets.
#
# Peak FLOP/s are in `whet.model.flops`. Only the H200's rates were measured (LOG.md); those of other cards are its
# own peaks times the share that large products reach by other people's measurements, and their estimates are rougher.

_GB = 10**9


@dataclass(frozen=True, slots=True)
class Card:
    """One device. Bandwidths are bytes per second in one direction."""

    name: str
    device: str
    """The name that the driver reports, for its peak FLOP/s."""
    memory: int
    """Bytes that a program can allocate."""
    bandwidth: float
    """Of its memory."""
    link: float
    """To the other devices of its node."""
    network: float
    """To other nodes: this device's part of its node's network cards."""
    product_share: float
    """The part of peak FLOP/s that large matrix products reach."""
    is_amd: bool = False

    def peak(self, precision: str) -> float | None:
        """Peak FLOP/s; None if the card does not support the precision."""
        return peak_flops_of(self.device, precision)


def _card(
    name: str, device: str, gib: float, terabytes: float, link: float, network: float, share: float, amd: bool = False
) -> Card:
    return Card(name, device, int(gib * 2**30), terabytes * 1e12, link * _GB, network * _GB, share, amd)


CARDS: tuple[Card, ...] = (
    #     name            device name                   GiB  TB/s  link network share
    _card("H200", "NVIDIA H200", 139.8, 4.8, 450, 50, 0.71),
    _card("H100", "NVIDIA H100 80GB HBM3", 79.1, 3.35, 450, 50, 0.68),
    _card("H100-PCIe", "NVIDIA H100 PCIe", 79.1, 2.0, 64, 25, 0.65),
    _card("B200", "NVIDIA B200", 178.4, 7.7, 900, 50, 0.70),
    _card("A100", "NVIDIA A100-SXM4-80GB", 79.1, 2.04, 300, 25, 0.80),
    _card("A100-40", "NVIDIA A100-SXM4-40GB", 39.4, 1.56, 300, 25, 0.80),
    _card("A10", "NVIDIA A10", 22.0, 0.6, 32, 6, 0.60),
    _card("A6000", "NVIDIA RTX A6000", 47.4, 0.77, 32, 6, 0.75),
    _card("L4", "NVIDIA L4", 22.0, 0.3, 32, 6, 0.50),
    _card("L40S", "NVIDIA L40S", 44.4, 0.86, 32, 12.5, 0.60),
    _card("RTX4090", "NVIDIA GeForce RTX 4090", 23.5, 1.01, 32, 3, 0.90),
    _card("RTX5090", "NVIDIA GeForce RTX 5090", 31.3, 1.79, 64, 3, 0.85),
    # A device is a GCD, half of a card. The network is LUMI's: four cards of 200 Gb/s for eight devices.
    _card("MI250X", "AMD Instinct MI250X", 63.9, 1.64, 100, 12.5, 0.55, amd=True),
    _card("MI300X", "AMD Instinct MI300X", 191.9, 5.3, 448, 50, 0.50, amd=True),
)


def find_card(name: str) -> Card:
    """A card by its name; upper and lower case, spaces and hyphens do not matter."""
    cards = {_plain(card.name): card for card in CARDS}
    aliases = {"a10080": "a100", "a10080gb": "a100", "a10040gb": "a10040", "h100sxm": "h100", "mi250xgcd": "mi250x"}
    found = cards.get(aliases.get(_plain(name), _plain(name)))
    if found is None:
        known = sorted((card.name for card in CARDS), key=lambda each: -_likeness(each, name))
        raise WhetError(f"--plan: whet does not know the card {name!r}. Known cards: {', '.join(known)}")
    return found


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _likeness(known: str, given: str) -> float:
    return difflib.SequenceMatcher(None, _plain(known), _plain(given)).ratio()


_PLAN = re.compile(r"\s*(\d{1,9})\s*[x×*]\s*(\d{1,9})\s*[x×*]\s*(\S.*?)\s*", re.IGNORECASE)
_MOST_DEVICES = 10**6
_CONTEXT_BYTES, _NCCL_BYTES = 2**29, 2**30
"""What the driver and the libraries of collectives take on each device, beside torch's tensors."""


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
        return int(self.card.memory * MAX_SHARE) - taken

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
