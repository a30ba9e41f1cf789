"""What a run costs: hours, energy and money, predicted after its first steps and counted over all processes that have
worked on it. RUN/usage.json has a session for each start, written every ten seconds: a killed process loses no more
than that. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from whet.core.checksums import read_hashed_json, write_hashed_json
from whet.core.errors import WhetError
from whet.core.yaml import read_yaml

USAGE_FILE = "usage.json"
_LONG_HOURS = 0.5


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured or predicted. None: unknown, as energy on devices that do not tell their power."""

    seconds: float
    device_hours: float
    kwh: float | None = None
    money: float | None = None
    """In the currency of run.price."""

    @classmethod
    def of(cls, seconds: float, devices: float, joules: float | None = None, price: float | None = None) -> Costs:
        """Of so many devices for so long; `price`: of a device hour."""
        hours = seconds / 3600 * devices
        kwh, money = None if joules is None else joules / 3.6e6, None if price is None else hours * price
        return cls(seconds, hours, kwh, money)

    @property
    def is_worth_predicting(self) -> bool:
        """Whether a prediction is printed: the bar shows the time left of a short run."""
        return self.device_hours >= _LONG_HOURS or self.money is not None

    def as_dict(self) -> dict[str, float | None]:
        return asdict(self)

    def __str__(self) -> str:
        size, unit = _time_unit(self.seconds)
        parts = [f"{self.seconds / size:.3g} {unit}", f"{self.device_hours:.3g} device hours"]
        if self.kwh is not None:
            parts.append(f"{self.kwh:.3g} kWh")
        if self.money is not None:
            parts.append(f"price {self.money:,.2f}" if self.money >= 0.01 else f"price {self.money:.1g}")
        return ", ".join(parts)


def format_estimate(seconds: float) -> str:
    """Two digits: 19 min, 1.4 h."""
    size, unit = _time_unit(seconds)
    return f"{seconds / size:.{0 if seconds >= 9.5 * size else 1}f} {unit}"


def _time_unit(seconds: float) -> tuple[int, str]:
    return (3600, "h") if seconds >= 3600 else (60, "min") if seconds >= 60 else (1, "s")


def read_sessions(run: Path) -> list[dict[str, Any]]:
    """The sessions of a run, oldest first; none if the file is missing or damaged."""
    sessions = _read(run).get("sessions")
    known = sessions if isinstance(sessions, list) else []
    return [each for each in known if isinstance(each, dict) and _session_costs(each) is not None]


def counted_costs(run: Path) -> Costs | None:
    """What the run has cost so far, resumes included; None for runs of earlier versions."""
    found = [costs for each in read_sessions(run) if (costs := _session_costs(each)) is not None]
    if not found:
        return None
    energies = [each.kwh for each in found]
    kwh = None if None in energies else sum(each for each in energies if each is not None)
    total = Costs(sum(each.seconds for each in found), sum(each.device_hours for each in found), kwh)
    return _with_price(total, read_price(run))


def counted_device_hours(run: Path) -> float | None:
    """The device hours of `counted_costs`, without reading the recipe for the price: a list has a thousand runs."""
    found = [costs.device_hours for each in read_sessions(run) if (costs := _session_costs(each)) is not None]
    return sum(found) if found else None


def predicted_costs(run: Path) -> Costs | None:
    """What the whole run was predicted to cost after its first steps; None for a run that was shorter."""
    found = _read(run).get("predicted")
    costs = _session_costs(found) if isinstance(found, dict) else None
    return None if costs is None else _with_price(costs, read_price(run))


def read_price(run: Path) -> float | None:
    """run.price of a run."""
    try:
        config = read_yaml(run / "config.yaml", expand="none").plain()
    except (OSError, WhetError):
        return None
    section = config.get("run") if isinstance(config, dict) else None
    return _number(section.get("price")) if isinstance(section, dict) else None


def read_prediction(run: Path) -> dict[str, Any] | None:
    """What usage.json says of the whole run, in the form of a session."""
    found = _read(run).get("predicted")
    return found if isinstance(found, dict) and _session_costs(found) is not None else None


def write_usage(run: Path, sessions: list[dict[str, Any]], predicted: dict[str, Any] | None) -> None:
    """Replace usage.json."""
    write_hashed_json(run / USAGE_FILE, {"sessions": sessions, "predicted": predicted})


def _read(run: Path) -> dict[str, Any]:
    """usage.json; empty if it is missing or damaged."""
    try:
        return read_hashed_json(run / USAGE_FILE)
    except (OSError, WhetError):
        return {}


def _with_price(costs: Costs, price: float | None) -> Costs:
    return costs if price is None else replace(costs, money=costs.device_hours * price)


def _number(value: object) -> float | None:
    """A number that a run can have; None for anything else in a damaged file."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e15 else None  # type: ignore[arg-type]


def _session_costs(session: dict[str, Any]) -> Costs | None:
    """None for a session with damaged numbers."""
    seconds, devices = _number(session.get("seconds")), _number(session.get("devices"))
    if seconds is None or devices is None or seconds < 0 or devices < 1:
        return None
    return Costs.of(seconds, devices, _number(session.get("joules")))
