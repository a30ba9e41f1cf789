"""The knobs of training."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from whet.core.config import Section, config_error


class BatchConfig(Section):
    """What one optimizer step covers, over all devices."""

    alternatives = (("conversations", "rows", "tokens"),)

    conversations: int | None = Field(
        default=None, ge=1, description="This many conversations; packing then changes nothing but speed."
    )
    rows: int | None = Field(default=None, ge=1, description="Or this many packed rows.")
    tokens: int | None = Field(default=None, ge=1, description="Or rows of about this many tokens together.")

    @model_validator(mode="after")
    def _something(self) -> BatchConfig:
        if self.conversations is None and self.rows is None and self.tokens is None:
            raise config_error("conversations", "give one of conversations, rows, tokens")
        return self


_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """How gradients become updates."""

    name: Literal["adamw", "adamw16bit", "adamw8bit", "muon"] = Field(
        default="adamw",
        description="The rule: AdamW, with states in 16 or 8 bits where memory is short, or Muon for matrices and "
        "AdamW for all else.",
    )
    lr: float = Field(default=1e-4, gt=0, description="The highest learning rate; the schedule scales it.")
    embedding_lr: float | None = Field(
        default=None, gt=0, description="The input embedding's, and a tied head's; lr if absent."
    )
    head_lr: float | None = Field(default=None, gt=0, description="Of an output head of its own; lr if absent.")
    matrix_lr: float | None = Field(default=None, gt=0, description="Of all other matrices; lr if absent.")
    scalar_lr: float | None = Field(default=None, gt=0, description="Of vectors and single numbers; lr if absent.")
    betas: Annotated[tuple[_Beta, _Beta], Field(strict=False)] = Field(
        default=(0.9, 0.95), description="How long AdamW remembers gradients and their squares."
    )
    eps: float = Field(default=1e-8, gt=0, description="Keeps AdamW from dividing by zero.")
    weight_decay: float = Field(default=0.0, ge=0, description="Pull of matrices towards zero; vectors are spared.")
    momentum: _Beta = Field(default=0.95, description="How long Muon remembers gradients.")
    momentum_start: _Beta = Field(default=0.85, description="Muon's momentum in the first step.")
    momentum_warmup: int = Field(default=300, ge=0, description="Steps over which it moves to `momentum`.")

    @model_validator(mode="after")
    def _momentum_is_muons(self) -> OptimizerConfig:
        for key in ("momentum", "momentum_start", "momentum_warmup"):
            if self.name != "muon" and getattr(self, key) != type(self).model_fields[key].default:
                raise config_error(key, f"it is Muon's, and train.optimizer.name is {self.name}")
        return self


class ScheduleConfig(Section):
    """How the learning rate moves."""

    name: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="linear", description="Its shape after the warm-up; wsd is flat, then falls over `decay`."
    )
    by: Literal["step", "epoch", "conversation", "token"] = Field(
        default="step", description="What `warmup` and `decay` count, and what the way through the run is measured in."
    )
    warmup: int | float = Field(
        default=0.03,
        ge=0,
        description="Over how many of them it rises; a fraction is a part of the run, but by epoch it is epochs.",
    )
    decay: int | float = Field(
        default=0.2, ge=0, description="Of wsd: over how many of them it falls at the end; fractions as of warmup."
    )
    init_frac: float = Field(default=0.0, ge=0, le=1, description="Where the warm-up starts, as a part of lr.")
    min_frac: float = Field(default=0.0, ge=0, le=1, description="Where it ends, as a part of lr.")

    @model_validator(mode="after")
    def _a_part_of_the_run(self) -> ScheduleConfig:
        for key, given in (("warmup", self.warmup), ("decay", self.decay)):
            if isinstance(given, float) and given > 1 and self.by != "epoch":
                raise config_error(
                    key, f"{given} is neither a whole number of {self.by}s nor, up to 1, a part of the run"
                )
        return self


Tracker = Literal["tensorboard"]
"""Services that show a run's curves."""

_Step = Annotated[int, Field(ge=1)]


class ProfileConfig(Section):
    """Watch some steps closely, into the run's folder `profile`; they are slower for it."""

    steps: Annotated[tuple[_Step, _Step], Field(strict=False)] = Field(
        description="From this step to that one, both included; the first step of a run is 1."
    )
    ranks: list[Annotated[int, Field(ge=0)]] = Field(default=[0], description="On these processes.")
    memory: bool = Field(
        default=False, description="Who holds which memory: on CUDA a snapshot for pytorch.org/memory_viz."
    )
    stack: bool = Field(default=False, description="The lines of Python that every operation comes from.")
    shapes: bool = Field(default=False, description="The shapes of every operation's inputs.")

    @model_validator(mode="after")
    def _in_order(self) -> ProfileConfig:
        if self.steps[0] > self.steps[1]:
            raise config_error("steps", f"{list(self.steps)} ends before it begins: give [first, last]")
        return self


class TrainConfig(Section):
    """How long, in which batches and how."""

    alternatives = (("steps", "epochs", "tokens"),)

    steps: int | None = Field(default=None, ge=1, description="Length of the run in optimizer steps.")
    epochs: float | None = Field(
        default=None, gt=0, description="Or in passes over the data, fractions too; without any of the three, 1."
    )
    tokens: int | None = Field(default=None, ge=1, description="Or in tokens.")
    batch: BatchConfig = Field(
        default=BatchConfig(conversations=16), description="One optimizer step; 16 conversations if absent."
    )
    start_step: int = Field(
        default=0,
        ge=0,
        description="Begin after so many steps of the plan, as if they were done: their conversations are passed over, "
        "schedule and counts go on from there. For weights that have learned from them already (model.path: RUN).",
    )
    row_length: int | None = Field(default=None, ge=2, description="Tokens of a packed row; data.max_length if absent.")
    micro_rows: int = Field(
        default=1, ge=1, description="Rows in memory at a time on each device; changes speed and memory, not the loss."
    )
    optimizer: OptimizerConfig = Field(default=OptimizerConfig())
    schedule: ScheduleConfig = Field(default=ScheduleConfig())
    precision: Literal["auto", "fp64", "fp32", "bf16", "fp16", "fp8"] = Field(
        default="auto",
        description="Of the arithmetic: bf16 on CUDA, otherwise fp32; fp16 is for cards without bf16, fp64 for proofs. "
        "fp8 multiplies large matrices in 8 bits.",
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=1, description="This part of each target is spread over all tokens; not part of `loss`."
    )
    z_loss: float = Field(
        default=0.0, ge=0, description="Weight of the squared log of the softmax's denominator, which keeps logits "
        "small; not part of `loss`.",
    )  # fmt: skip
    on_nonfinite: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="What to do when a loss or gradient is not finite or nothing is supervised: end the run, leave the "
        "step out, or return to the newest checkpoint and pass over the steps since.",
    )
    on_spike: Literal["warn", "stop", "skip", "rollback"] = Field(
        default="warn", description="What to do when the loss jumps far above its recent values; warn takes the step."
    )
    clip_norm: float = Field(default=1.0, gt=0, description="Gradients are scaled down to at most this norm.")
    deterministic: bool = Field(default=False, description="On GPUs: bit-equal repetition, at some cost in speed.")

    @model_validator(mode="before")
    @classmethod
    def _reject_removed_precision(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("precision") == "fp8-rowwise":
            raise config_error(
                "precision",
                "fp8-rowwise was removed: it was never faster than fp8 and learned the same. Set train.precision=fp8",
            )
        return given
