"""Settings of training: batches, optimizer, schedule, profiling."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from whet.core.config import Section, config_error


class BatchConfig(Section):
    """The size of one optimizer step, over all devices."""

    alternatives = (("conversations", "rows", "tokens"),)

    conversations: int | None = Field(
        default=None, ge=1, description="Conversations per step; packing then affects speed only."
    )
    rows: int | None = Field(default=None, ge=1, description="Alternative: packed rows per step.")
    tokens: int | None = Field(
        default=None,
        ge=1,
        description="Alternative: room for tokens, in whole rows: 10000 with rows of 4096 is 2 rows. Rows are rarely "
        "full, so a step holds fewer tokens; `whet train` and `whet check` print the number.",
    )

    @model_validator(mode="after")
    def _require_one(self) -> BatchConfig:
        if self.conversations is None and self.rows is None and self.tokens is None:
            raise config_error("conversations", "give one of conversations, rows, tokens")
        return self


_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """The optimizer and its learning rates."""

    name: Literal["adamw", "adamw16bit", "adamw8bit", "muon"] = Field(
        default="adamw",
        description="AdamW, AdamW with 16-bit or 8-bit state to save memory, or Muon for matrices with AdamW for all "
        "other parameters.",
    )
    lr: float = Field(default=1e-4, gt=0, description="Peak learning rate; the schedule scales it.")
    embedding_lr: float | None = Field(
        default=None, gt=0, description="Learning rate of the input embedding, also when tied to the head; default: lr."
    )
    head_lr: float | None = Field(
        default=None, gt=0, description="Learning rate of an untied output head; default: lr."
    )
    matrix_lr: float | None = Field(default=None, gt=0, description="Learning rate of all other matrices; default: lr.")
    scalar_lr: float | None = Field(
        default=None, gt=0, description="Learning rate of vectors and scalars; default: lr."
    )
    scale: float = Field(default=1.0, gt=0, description="Multiplies the learning rate of every group.")
    betas: Annotated[tuple[_Beta, _Beta], Field(strict=False)] = Field(
        default=(0.9, 0.95), description="AdamW's decay rates of the moving averages of gradients and their squares."
    )
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon, added to the denominator.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay of matrices; vectors have none.")
    flavour: Literal["moonlight", "nanochat"] = Field(
        default="moonlight",
        description="The variant of Muon. moonlight scales updates so that AdamW's lr suits matrices too. nanochat "
        "takes that program's learning rates and groups, with Polar Express, NorMuon and cautious decay, only of "
        "matrices.",
    )
    momentum: _Beta = Field(default=0.95, description="Muon's momentum.")
    momentum_start: _Beta = Field(default=0.85, description="Muon's momentum at the first step.")
    momentum_warmup: int = Field(default=300, ge=0, description="Steps over which it changes linearly to `momentum`.")

    @model_validator(mode="after")
    def _check_momentum(self) -> OptimizerConfig:
        for key in ("flavour", "momentum", "momentum_start", "momentum_warmup"):
            if self.name != "muon" and getattr(self, key) != type(self).model_fields[key].default:
                raise config_error(key, f"only Muon uses it, and train.optimizer.name is {self.name}. Remove it")
        return self


class ScheduleConfig(Section):
    """The learning-rate schedule."""

    name: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="linear", description="The shape after the warm-up; wsd is constant, then decays over `decay`."
    )
    by: Literal["step", "epoch", "conversation", "token"] = Field(
        default="step", description="The unit of `warmup` and `decay`, and of progress through the run."
    )
    warmup: int | float = Field(
        default=0.03,
        ge=0,
        description="Length of the warm-up in that unit, or as a fraction of the run; with by: epoch, in epochs.",
    )
    decay: int | float = Field(default=0.2, ge=0, description="For wsd: length of the decay at the end, like warmup.")
    init_frac: float = Field(
        default=0.0, ge=0, le=1, description="Learning rate at the start of the warm-up, as a fraction of lr."
    )
    min_frac: float = Field(default=0.0, ge=0, le=1, description="Learning rate at the end, as a fraction of lr.")

    @model_validator(mode="after")
    def _check_fractions(self) -> ScheduleConfig:
        for key, given in (("warmup", self.warmup), ("decay", self.decay)):
            if isinstance(given, float) and given > 1 and self.by != "epoch":
                raise config_error(
                    key, f"{given} is neither an integer number of {self.by}s nor a fraction of the run, at most 1"
                )
        return self


Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
"""Experiment trackers."""

_Step = Annotated[int, Field(ge=1)]


class ProfileConfig(Section):
    """Profile some steps with torch.profiler into RUN/profile; profiled steps are slower."""

    steps: Annotated[tuple[_Step, _Step], Field(strict=False)] = Field(
        description="First and last step to profile, inclusive, counted from 1."
    )
    ranks: list[Annotated[int, Field(ge=0)]] = Field(default=[0], description="Ranks to profile.")
    memory: bool = Field(
        default=False, description="Profile memory; on CUDA with a snapshot for pytorch.org/memory_viz."
    )
    stack: bool = Field(default=False, description="Record the Python stack of every operation.")
    shapes: bool = Field(default=False, description="Record the input shapes of every operation.")

    @model_validator(mode="after")
    def _check_order(self) -> ProfileConfig:
        if self.steps[0] > self.steps[1]:
            raise config_error("steps", f"{list(self.steps)} ends before it begins: give [first, last]")
        return self


class TrainConfig(Section):
    """Length of the run, batches, optimizer and precision."""

    alternatives = (("steps", "epochs", "tokens"),)

    steps: int | None = Field(default=None, ge=1, le=10**9, description="Length of the run in optimizer steps.")
    epochs: float | None = Field(
        default=None, gt=0, le=10**6, description="Alternative: length in epochs, which may be a fraction; default 1."
    )
    tokens: int | None = Field(default=None, ge=1, le=10**15, description="Alternative: length in tokens.")
    batch: BatchConfig = Field(
        default=BatchConfig(conversations=16), description="The size of one optimizer step; default: 16 conversations."
    )
    start_step: int = Field(
        default=0,
        ge=0,
        description="Treat this many steps of the plan as done: their conversations are skipped, and schedule and "
        "counts continue from there. For weights that were already trained on them (model.path: RUN).",
    )
    step_offset: int = Field(
        default=0,
        ge=0,
        le=10**9,
        description="Added to the number of every step in metrics, logs, trackers and checkpoint names, so that a "
        "fine-tune continues the count of the checkpoint that it starts from: with 423858, the first step is 423859. "
        "Data, schedule and all settings in steps still begin at 0.",
    )
    row_length: int | None = Field(default=None, ge=2, description="Tokens per packed row; default: data.max_length.")
    micro_rows: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="Rows per micro-batch on each device; affects speed and memory, not the loss. auto: as many as "
        "are fast and fit, measured on the plan's worst batch before step 1 (see docs/fit.md); 1 on a CPU.",
    )
    optimizer: OptimizerConfig = Field(default=OptimizerConfig())
    schedule: ScheduleConfig = Field(default=ScheduleConfig())
    precision: Literal["auto", "fp64", "fp32", "bf16", "fp16", "fp8"] = Field(
        default="auto",
        description="The precision of the computation. auto: bf16 on CUDA, fp32 elsewhere. fp16 is for GPUs without "
        "bf16, fp64 for verification; fp8 multiplies large matrices in 8 bits.",
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=1, description="Label smoothing; not included in the logged loss."
    )
    z_loss: float = Field(
        default=0.0, ge=0, description="Weight of the z-loss (squared log of the softmax denominator), which keeps "
        "logits small; not included in the logged loss.",
    )  # fmt: skip
    router_aux_loss: float = Field(
        default=0.0, ge=0, description="Weight of the auxiliary loss that balances the load of a mixture's experts "
        "(router_aux_loss_coef in config.json); exact over the whole step, at the cost of one more forward pass. Not "
        "included in the logged loss.",
    )  # fmt: skip
    on_nonfinite: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="What to do when the loss or a gradient is not finite, or a step has no supervised token: stop the "
        "run, skip the step, or return to the newest checkpoint and skip the steps since.",
    )
    on_spike: Literal["warn", "stop", "skip", "rollback"] = Field(
        default="warn",
        description="What to do when the loss jumps far above its recent values; warn logs this and takes the step.",
    )
    clip_norm: float = Field(
        default=1.0, gt=0, description="Maximum gradient norm; larger gradients are scaled down to it."
    )
    deterministic: bool = Field(default=False, description="Bit-identical repetition on GPUs, at some cost in speed.")

    @property
    def first_step(self) -> int:
        """The number of the last step that counts as done when the run starts."""
        return self.step_offset + self.start_step

    @property
    def least_micro_rows(self) -> int:
        """The rows of a micro-batch as far as the configuration tells: `auto` is at least one."""
        return 1 if self.micro_rows == "auto" else self.micro_rows

    @model_validator(mode="before")
    @classmethod
    def _reject_removed_precision(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("precision") == "fp8-rowwise":
            raise config_error(
                "precision",
                "fp8-rowwise was removed: it was never faster than fp8 and learned the same. Set train.precision=fp8",
            )
        return given
