"""GPUs that `whet fit --plan` knows: memory, bandwidth and links, from the vendors' data sheets.

Peak FLOP/s are in `whet.model.peak_flops`. Only the H200's rates were measured (LOG.md); those of other cards are its
own peaks times the share that large products reach by other people's measurements, and their estimates are rougher.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from whet.core.errors import WhetError
from whet.model.peak_flops import peak_flops_of

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
        raise WhetError(f"--plan: {name!r} is no card that whet knows. Known cards: {', '.join(known)}")
    return found


def card_of_device(device: str) -> Card | None:
    """The card that a driver's device name belongs to; None if it is not in the table."""
    by_name = {card.device: card for card in CARDS}
    return by_name.get(device)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _likeness(known: str, given: str) -> float:
    return difflib.SequenceMatcher(None, _plain(known), _plain(given)).ratio()
