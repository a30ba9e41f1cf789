"""What `whet fit --plan` prints: fits or not, with which settings, how fast, and why; next to published speeds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from whet.config import Config
from whet.core.console import info, info_item
from whet.core.costs import Costs
from whet.fit.estimate import GIB
from whet.fit.paper import Candidate, PaperEstimate

_MEASURED_CARD = "H200"


def print_estimate(config: Config, estimate: PaperEstimate) -> None:
    """The verdict last, as on a terminal the last lines are read first."""
    info(_candidates_table(estimate))
    shown = estimate.best or estimate.smallest
    info(_memory_table(shown))
    for speed in published_speeds(config, estimate.parameters):
        source = "measured here" if speed.checked else "published, not checked"
        info_item("·", source, str(speed))
    for reason in reasons(config, estimate):
        info_item("·", "because", reason)
    sign, title, text = verdict(config, estimate)
    info_item(sign, title, text, "bold" if estimate.best else "bold red", always=estimate.best is None)


def as_json(config: Config, estimate: PaperEstimate) -> dict[str, Any]:
    """The result of --json."""
    hardware, facts, best = estimate.hardware, estimate.facts, estimate.best
    return {
        "hardware": {
            "nodes": hardware.nodes, "devices": hardware.devices, "card": hardware.card.name,
            "memory_gib": hardware.card.memory / GIB, "usable_gib": hardware.usable_bytes / GIB,
        },
        "fits": best is not None,
        "precision": estimate.precision.name,
        "parameters": estimate.parameters,
        "trained_parameters": estimate.trained,
        "settings": None if best is None else best.settings(config),
        "layout": None if best is None else _entry(best),
        "smallest": _entry(estimate.smallest),
        "layouts": [_entry(each) for each in estimate.candidates],
        "tokens_per_s": None if best is None else best.tokens_per_s,
        "hours": estimate.hours,
        "costs": None if best is None else _costs(config, estimate).as_dict(),
        "steps": facts.steps,
        "tokens_per_step": facts.tokens,
        "reasons": reasons(config, estimate),
        "proposals": [{"settings": settings, **_entry(each)} for settings, each in estimate.proposals],
        "published": [asdict(each) for each in published_speeds(config, estimate.parameters)],
    }  # fmt: skip


def _entry(candidate: Candidate) -> dict[str, Any]:
    return {
        "shard": candidate.shard,
        "recompute": candidate.recompute,
        "micro_rows": candidate.micro_rows,
        "micro_batches": candidate.micro_batches,
        "memory_gib": candidate.memory.gib(),
        "step_s": {**asdict(candidate.step), "total": candidate.step.total},
        "tokens_per_s": candidate.tokens_per_s,
    }


def verdict(config: Config, estimate: PaperEstimate) -> tuple[str, str, str]:
    """A sign, the answer in two words, and the rest of it."""
    hardware, best = estimate.hardware, estimate.best
    if best is None:
        least = estimate.smallest.memory.total / GIB
        text = f"{least:.1f} GiB a device at least, and {hardware} have {hardware.usable_bytes / GIB:.1f} for tensors"
        return "✗", "does not fit", f"{text}. {_remedy(estimate)}"
    settings = " ".join(f"{key}={value}" for key, value in best.settings(config).items()) or "as configured"
    text = (
        f"{settings}: {best.memory.total / GIB:.1f} of {hardware.usable_bytes / GIB:.1f} GiB a device, about "
        f"{best.tokens_per_s:,.0f} tokens/s on {hardware}, {_costs(config, estimate)} for "
        f"{estimate.facts.steps:,} steps of this data"
    )
    return "→", "fits", text


def _costs(config: Config, estimate: PaperEstimate) -> Costs:
    """Of the whole run."""
    return Costs.of(3600 * (estimate.hours or 0.0), estimate.hardware.world, price=config.run.price)


def _remedy(estimate: PaperEstimate) -> str:
    if not estimate.proposals:
        return "Use more devices, or cards with more memory"
    ways = [
        f"{' '.join(f'{key}={value}' for key, value in settings.items())} ({each.memory.total / GIB:.1f} GiB, about "
        f"{each.tokens_per_s:,.0f} tokens/s)"
        for settings, each in estimate.proposals
    ]
    return f"Use more devices, or settings that change the run: {', or '.join(ways)}"


def reasons(config: Config, estimate: PaperEstimate) -> list[str]:
    """Why this layout, in sentences."""
    hardware, best, card = estimate.hardware, estimate.best, estimate.hardware.card
    usable, whole = hardware.usable_bytes / GIB, estimate.unsharded / GIB
    found = [
        f"weights, gradients and optimizer state take {whole:,.1f} GiB together, and each {card.name} has "
        f"{usable:.1f} GiB for tensors"
    ]
    if best is not None and hardware.world > 1:
        found.append(_sharding_reason(estimate, best))
    if best is not None and best.recompute == "full" and estimate.kept is not None:
        found.append(_recompute_reason(best, estimate.kept, hardware.usable_bytes))
    shown = best or estimate.smallest
    if hardware.world > 1 and shown.shard > 1 and shown.micro_batches == 1:
        found.append(
            "a step is one micro-batch on each device: with several, FSDP2 would sum all gradients in fp32 on every "
            f"device, {4 * estimate.trained / GIB:,.1f} GiB"
        )
    if best is not None:
        slowest = sorted(asdict(best.step).items(), key=lambda part: -part[1])[:3]
        shares = ", ".join(f"{name} {seconds / best.step.total:.0%}" for name, seconds in slowest)
        found.append(f"a step takes about {best.step.total:.3g} s: {shares}")
    ranks = hardware.world // (config.parallel.context * config.parallel.tensor)
    if estimate.facts.rows < ranks:
        found.append(
            f"a step has {estimate.facts.rows:,} rows for {ranks:,} devices, so {ranks - estimate.facts.rows:,} idle, "
            "and `whet train` would refuse it. Raise train.batch, or use fewer devices"
        )
    if card.name != _MEASURED_CARD:
        found.append(
            f"the rates of {card.name} are those of its data sheet, scaled by the share that others report, and not "
            "measured by whet: expect the time to be off by a third"
        )
    elif hardware.world > 1:
        found.append(
            "whet has not been measured on several GPUs: the time of collectives is computed from the bandwidth of the "
            "links"
        )
    return found


def _sharding_reason(estimate: PaperEstimate, best: Candidate) -> str:
    hardware = estimate.hardware
    others = {each.shard: each for each in estimate.candidates}
    if best.shard == 1:
        return "every device holds all of it, and gradients are summed once a step: nothing needs to be sharded"
    smaller = [each for shard, each in others.items() if shard < best.shard]
    where = "inside a node" if best.shard <= hardware.devices else f"over {best.shard // hardware.devices} nodes"
    text = f"each device holds 1/{best.shard} of it (parallel.shard={best.shard}, {where})"
    too_large = [each for each in smaller if each.memory.total > hardware.usable_bytes]
    if too_large:
        last = max(too_large, key=lambda each: each.shard)
        share = "all of it" if last.shard == 1 else f"1/{last.shard}"
        return f"{text}: with {share} on each, a device would need {last.memory.total / GIB:,.1f} GiB"
    return f"{text}: with less sharding micro-batches would be smaller, and slower"


def _recompute_reason(best: Candidate, kept: Candidate, usable: int) -> str:
    rows = "1 row" if best.micro_rows == 1 else f"{best.micro_rows} rows"
    text = (
        f"activations are computed again in the backward pass (parallel.recompute=full): if those of {rows} were kept"
    )
    if kept.memory.total > usable:
        return f"{text}, a device would need {kept.memory.total / GIB:,.1f} GiB"
    return f"{text}, weights would have to be gathered more often, and it would be slower"


def _candidates_table(estimate: PaperEstimate) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("parallel.shard", "recompute", "micro_rows", "GiB a device", "tokens/s", ""):
        table.add_column(title, justify="right")
    best = estimate.best
    for each in estimate.candidates:
        fits = each.memory.total <= estimate.hardware.usable_bytes
        chosen = best is not None and (each.shard, each.recompute) == (best.shard, best.recompute)
        table.add_row(
            "–" if each.shard == 1 else str(each.shard), each.recompute, str(each.micro_rows),
            f"{each.memory.total / GIB:,.1f}", f"{each.tokens_per_s:,.0f}" if fits else "–",
            "fastest" if chosen else "fits" if fits else "too large",
        )  # fmt: skip
    return table


def _memory_table(candidate: Candidate) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("GiB a device")
    table.add_column("estimated", justify="right")
    for part, size in candidate.memory.gib().items():
        table.add_row(part, f"{size:.2f}", style="bold" if part == "total" else None)
    return table


# Speeds that were measured or published elsewhere, to be printed beside an estimate.

_BILLION = 10**9
_SAME_SIZE = 0.2


@dataclass(frozen=True, slots=True)
class PublishedSpeed:
    """Tokens per second of one device."""

    tool: str
    billions: float
    """Parameters of the model, all experts included."""
    model: str
    mode: str
    """full, lora or qlora."""
    hardware: str
    tokens_per_s: int
    gib: float | None = None
    checked: bool = True
    """Measured by whet's benchmark on one H200 (LOG.md); else by others, on their hardware."""

    def __str__(self) -> str:
        memory = "" if self.gib is None else f", {self.gib:.1f} GiB"
        return f"{self.tool}: {self.model}, {self.hardware}: {self.tokens_per_s:,} tokens/s a device{memory}"


_SPEEDS = (
    PublishedSpeed("whet", 8.03, "Llama 8B, LoRA, 4 rows of 4096", "lora", "1 H200", 19_320, 62.8),
    PublishedSpeed("TRL 1.16 + Liger", 8.03, "Llama 8B, LoRA, 4 rows of 4096", "lora", "1 H200", 13_398, 101.5),
    PublishedSpeed("Unsloth 2026.10", 8.03, "Llama 8B, LoRA, 4 rows of 4096", "lora", "1 H200", 13_434, 79.2),
    PublishedSpeed("whet", 8.03, "Llama 8B, QLoRA, 4 rows of 4096", "qlora", "1 H200", 18_869, 53.2),
    PublishedSpeed("Unsloth 2026.10", 8.03, "Llama 8B, QLoRA, 4 rows of 4096", "qlora", "1 H200", 12_876, 69.6),
    PublishedSpeed("whet", 8.03, "Llama 8B, all weights, 4 rows of 4096", "full", "1 H200", 13_694, 94.3),
    PublishedSpeed("TRL 1.16 + Liger", 8.03, "Llama 8B, all weights, 4 rows of 4096", "full", "1 H200", 12_521, 116.8),
    PublishedSpeed("whet", 1.24, "Llama 1B, all weights, 8 rows of 4096", "full", "1 H200", 81_955, 34.3),
    PublishedSpeed("TRL 1.16 + Liger", 1.24, "Llama 1B, all weights, 8 rows of 4096", "full", "1 H200", 66_663, 46.4),
    PublishedSpeed("whet", 0.135, "SmolLM2 135M, LoRA, 8 rows of 4096", "lora", "1 H200", 405_873, 11.6),
    PublishedSpeed("TRL 1.16 + Liger", 0.135, "SmolLM2 135M, LoRA, 8 rows of 4096", "lora", "1 H200", 113_416, 20.7),
    PublishedSpeed("NeMo Automodel", 8.03, "Llama 8B, LoRA", "lora", "1 H100", 12_473, checked=False),
    PublishedSpeed("torchtitan, fp8", 8.03, "Llama 8B, all weights", "full", "32 H200", 10_938, checked=False),
    PublishedSpeed("NeMo Automodel", 30.5, "Qwen3-30B-A3B, all weights", "full", "8 H100", 11_340, checked=False),
    PublishedSpeed(
        "prime-rl", 30.5, "Qwen3-30B-A3B, all weights, rows of 16 k", "full", "8 H200", 4_380, checked=False
    ),
    PublishedSpeed("NeMo Automodel", 20.9, "gpt-oss-20b, all weights", "full", "8 H100", 13_058, checked=False),
)


def published_speeds(config: Config, parameters: int) -> list[PublishedSpeed]:
    """Those of models of about this size, trained in the same way."""
    mode = "full" if config.adapter is None else "qlora" if config.quantize else "lora"
    size = parameters / _BILLION
    return [each for each in _SPEEDS if each.mode == mode and abs(each.billions - size) <= _SAME_SIZE * size]
