"""`whet fit --plan`: does a run fit hardware that is not here, sharded how, and how long does it take?

Each candidate is a layout of the same run: how many devices share the weights, whether activations are recomputed, how
many rows a device computes at a time. None changes what the model learns. The fastest that fits is proposed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet.config import Config
from whet.core.console import info
from whet.core.errors import WhetError
from whet.data.plan.planner import Plan, typical_length
from whet.fit.estimate import LargestBatch, MemoryParts, Sharding, estimate_memory, trace_batch, training_size
from whet.fit.fake_model import FakeModel, build_fake_model
from whet.fit.hardware import Card, Hardware
from whet.fit.model_trace import ModelTrace
from whet.fit.throughput import StepTimeParts, StepWork, estimate_step_time, runs_as_cuda_graphs
from whet.model.config import AdapterConfig
from whet.run.data import RunData
from whet.run.step_rows import typical_rows
from whet.training.precision import PrecisionPolicy, precision_policy

_MOST_MICRO_ROWS = 64
_SAME_SPEED = 0.97
_SAMPLED_ROWS = 2048


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What the estimate needs to know of a run's data and plan."""

    steps: int
    rows: int
    """Of a typical step."""
    tokens: float
    """Of an average step, without padding."""
    supervised: float
    """Supervised tokens of an average row."""
    most_supervised: int
    """Of any row."""
    lengths: NDArray[np.integer]
    """Of the documents in some of the rows."""
    sampled_rows: int

    @property
    def typical_length(self) -> float:
        """The length of the document that an average token is in."""
        return typical_length(self.lengths)


def read_data_facts(data: RunData, plan: Plan) -> DataFacts:
    """From the run's own plan."""
    store = data.train.store
    targets = np.add.reduceat(store.targets[plan.documents], plan.rows[:-1]) if len(plan.documents) else np.zeros(1)
    rows = len(plan.rows) - 1
    chosen = range(0, rows, max(1, rows // _SAMPLED_ROWS))
    documents = np.concatenate([plan.documents[plan.rows[row] : plan.rows[row + 1]] for row in chosen])
    return DataFacts(
        len(plan), typical_rows(plan), plan.mean_step_tokens, float(targets.mean()), int(targets.max()),
        store.lengths[documents], len(chosen),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout of the run, and its estimate."""

    shard: int
    """1: every device holds all weights."""
    recompute: str
    micro_rows: int
    micro_batches: int
    memory: MemoryParts
    step: StepTimeParts
    tokens_per_s: float

    def settings(self, config: Config) -> dict[str, Any]:
        """The keys that choose this layout, without those that the configuration has already."""
        found = {"train.micro_rows": self.micro_rows, "parallel.recompute": self.recompute}
        if self.shard > 1:
            found["parallel.shard"] = self.shard // config.parallel.context
        has = {
            "train.micro_rows": config.train.micro_rows, "parallel.recompute": config.parallel.recompute,
            "parallel.shard": config.parallel.shard,
        }  # fmt: skip
        return {key: value for key, value in found.items() if has[key] != value}


@dataclass(frozen=True, slots=True)
class PaperEstimate:
    """What `whet fit --plan` says."""

    hardware: Hardware
    precision: PrecisionPolicy
    parameters: int
    trained: int
    facts: DataFacts
    best: Candidate | None
    """The fastest layout that fits; None if none does."""
    kept: Candidate | None
    """The best layout without recomputation, where the configuration leaves that open."""
    smallest: Candidate
    """The layout that needs the least memory."""
    candidates: tuple[Candidate, ...]
    """For each number of devices that share the weights: the fastest that fits, else the smallest."""
    unsharded: int
    """Bytes of weights, gradients and optimizer state on one device that holds all."""
    proposals: tuple[tuple[dict[str, Any], Candidate], ...] = ()
    """If nothing fits: settings that do."""

    @property
    def hours(self) -> float | None:
        return None if self.best is None else self.facts.steps * self.best.step.total / 3600


def estimate_on_paper(config: Config, hardware: Hardware, facts: DataFacts) -> PaperEstimate:
    """Try the layouts of this run on that hardware."""
    info(f"estimating {config.model.path} on {hardware}")
    search = _LayoutSearch(config, hardware, facts)
    candidates = list(search.candidates())
    fitting = [each for each in candidates if each.memory.total <= hardware.usable_bytes]
    best = _fastest(fitting)
    size = training_size(search.config, search.fake)
    parameters = sum(weight.numel() for weight in search.fake.root.parameters())
    return PaperEstimate(
        hardware, search.precision, parameters, size.trained, facts,
        None if best is None else search.retraced(best),
        None if best is None else _without_recompute(candidates, best),
        min(candidates, key=lambda each: each.memory.total),
        tuple(_best_of_each_shard(candidates, hardware.usable_bytes)),
        size.weights + size.gradients + size.optimizer,
        () if best is not None else tuple(_proposals(config, hardware, facts)),
    )  # fmt: skip


def _fastest(fitting: list[Candidate]) -> Candidate | None:
    """Of those that are about as fast, the one whose weights the fewest devices share: it depends least on links."""
    fastest = max((each.tokens_per_s for each in fitting), default=0.0)
    near = [each for each in fitting if each.tokens_per_s >= _SAME_SPEED * fastest]
    return min(near, key=lambda each: (each.shard, -each.tokens_per_s), default=None)


def _without_recompute(candidates: list[Candidate], best: Candidate) -> Candidate | None:
    return next(
        (
            each for each in candidates
            if (each.shard, each.micro_rows, each.recompute) == (best.shard, best.micro_rows, "none")
        ),
        None,
    )  # fmt: skip


def _best_of_each_shard(candidates: list[Candidate], usable: int) -> Iterator[Candidate]:
    for shard in dict.fromkeys(each.shard for each in candidates):
        group = [each for each in candidates if each.shard == shard]
        fitting = [each for each in group if each.memory.total <= usable]
        fastest = _fastest(fitting)
        if fastest is not None:
            yield fastest
        else:
            yield min(group, key=lambda each: each.memory.total)


class _LayoutSearch:
    def __init__(self, config: Config, hardware: Hardware, facts: DataFacts) -> None:
        if config.parallel.expert > 1:
            raise WhetError(
                f"parallel.expert: {config.parallel.expert}: whet fit --plan does not estimate expert parallelism. "
                "Remove it to see the run without"
            )
        self.config, self.hardware, self.facts = config, hardware, facts
        self.precision = paper_precision(config, hardware.card)
        compiles = config.model.compile is not False and self.precision.compute.itemsize <= 4
        gpu = "amd" if hardware.card.is_amd else "nvidia"
        self.fake: FakeModel = build_fake_model(config, self.precision, gpu=gpu, compiles=compiles)  # type: ignore[arg-type]
        self._traces: dict[tuple[str, int], ModelTrace] = {}
        self._model_parallel = config.parallel.context * config.parallel.tensor
        config.parallel.replicas(hardware.world)  # the mesh fits

    def candidates(self) -> Iterator[Candidate]:
        for shard in self._shards():
            for recompute in self._recomputes():
                for micro_rows in self._micro_rows():
                    yield self._estimate(shard, recompute, micro_rows, exactly=False)

    def retraced(self, candidate: Candidate) -> Candidate:
        """With the trace of its own micro-batch instead of a scaled one."""
        return self._estimate(candidate.shard, candidate.recompute, candidate.micro_rows, exactly=True)

    def _shards(self) -> list[int]:
        """Devices that share the weights: a number that the configuration sets, else any that divides a node or is a
        number of whole nodes."""
        parallel, context = self.config.parallel, self.config.parallel.context
        if parallel.shard is not None or parallel.replicate is not None:
            return [(parallel.shard or 1) * context]
        ranks = self.hardware.world // self._model_parallel
        if self.config.quantize is not None or self.config.adapter_needs_weights:
            return [context]  # whet does not shard such weights
        inside = self.hardware.devices // math.gcd(self.hardware.devices, self._model_parallel)
        sizes = {size for size in range(1, ranks + 1) if ranks % size == 0}
        return sorted(context * size for size in sizes if inside % size == 0 or size % inside == 0)

    def _recomputes(self) -> list[str]:
        given = self.config.parallel.recompute
        return [given] if "recompute" in self.config.parallel.model_fields_set else ["none", "full"]

    def _micro_rows(self) -> list[int]:
        given = self.config.train.micro_rows
        if isinstance(given, int) and "micro_rows" in self.config.train.model_fields_set:
            return [given]
        most = min(_MOST_MICRO_ROWS, self._rows_of_rank())
        return sorted({*(2**power for power in range(most.bit_length()) if 2**power <= most), most})

    def _rows_of_rank(self) -> int:
        """The most rows of a step that one device, or group of devices that compute rows together, gets."""
        return max(1, -(-self.facts.rows // (self.hardware.world // self._model_parallel)))

    def _estimate(self, shard: int, recompute: str, micro_rows: int, *, exactly: bool) -> Candidate:
        parallel = self.config.parallel.model_copy(
            update={"recompute": recompute, "shard": shard if shard > 1 else self.config.parallel.shard}
        )
        config = self.config.model_copy(update={"parallel": parallel})
        tokens = -(-micro_rows * config.row_length // parallel.context)
        trace = self._trace(config, tokens) if exactly else self._extrapolate(config, tokens)
        micro_batches = -(-self._rows_of_rank() // micro_rows)
        facts, world = self.facts, self.hardware.world
        sharding = Sharding(shard, parallel.tensor, world)
        supervised = min(tokens, -(-micro_rows * facts.most_supervised // parallel.context))
        captured = runs_as_cuda_graphs(config, self.fake, trace, self.hardware.card, sharding)
        batch = LargestBatch(tokens, supervised, micro_batches)
        memory = estimate_memory(config, self.fake, trace, batch, sharding, captured)
        share = micro_rows / facts.sampled_rows / parallel.context
        work = StepWork(micro_batches, facts.supervised * micro_rows / parallel.context, facts.lengths, share)
        step = estimate_step_time(config, self.fake, trace, self.hardware.card, work, sharding, self.hardware.nodes)
        return Candidate(shard, recompute, micro_rows, micro_batches, memory, step, facts.tokens / step.total)

    def _extrapolate(self, config: Config, tokens: int) -> ModelTrace:
        """From one row and two: each trace takes seconds."""
        row = -(-config.row_length // config.parallel.context)
        one = self._trace(config, row)
        if tokens == row:
            return one
        return one.extrapolated(self._trace(config, 2 * row), tokens) or self._trace(config, tokens)

    def _trace(self, config: Config, tokens: int) -> ModelTrace:
        key = config.parallel.recompute, tokens
        if key not in self._traces:
            self._traces[key] = trace_batch(config, self.fake, tokens, self.facts.typical_length)
        return self._traces[key]


def paper_precision(config: Config, card: Card) -> PrecisionPolicy:
    """The precision of a run on that card."""
    name = "bf16" if config.train.precision == "auto" else config.train.precision
    if name == "fp64" or card.peak(name) is None or (name == "fp8" and card.is_amd):
        raise WhetError(
            f"train.precision: {name}: whet has no speed for it on {card.name}. Set train.precision=bf16 to estimate"
        )
    return precision_policy(config, name)


# What could be done where nothing fits


def _proposals(config: Config, hardware: Hardware, facts: DataFacts) -> Iterator[tuple[dict[str, Any], Candidate]]:
    """Settings with which the run would fit; these change its numbers, so a person has to choose."""
    for settings in _smaller_settings(config):
        changed = _with_settings(config, settings)
        candidates = _LayoutSearch(changed, hardware, facts).candidates()
        fastest = _fastest([each for each in candidates if each.memory.total <= hardware.usable_bytes])
        if fastest is not None:
            yield settings | fastest.settings(changed), fastest


def _smaller_settings(config: Config) -> Iterator[dict[str, Any]]:
    if config.adapter is None:
        bf16 = {} if config.model.dtype == "bf16" else {"model.dtype": "bf16"}
        for name in ("adamw16bit", "adamw8bit"):
            yield {**bf16, "train.optimizer.name": name}
        yield {"adapter.rank": 16}
        yield {"adapter.rank": 16, "quantize": "nf4"}
    elif config.quantize is None and config.train.precision != "fp8":
        yield {"quantize": "nf4"}


def _with_settings(config: Config, settings: dict[str, Any]) -> Config:
    changes: dict[str, Any] = {}
    model, train = config.model, config.train
    if "model.dtype" in settings:
        changes["model"] = model.model_copy(update={"dtype": settings["model.dtype"]})
    if "train.optimizer.name" in settings:
        optimizer = train.optimizer.model_copy(update={"name": settings["train.optimizer.name"]})
        changes["train"] = train.model_copy(update={"optimizer": optimizer})
    if "adapter.rank" in settings:
        changes |= {"adapter": AdapterConfig(rank=settings["adapter.rank"])}
        changes["model"] = model.model_copy(update={"dtype": "auto"})
    if "quantize" in settings:
        changes["quantize"] = settings["quantize"]
    return config.model_copy(update=changes)
