"""Settings of the model and its adapter."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from whet.core.config import Section, config_error
from whet.model.load.random_models import resolve_random_path


class ModelConfig(Section):
    """The model to train."""

    path: str = Field(
        description="A model folder, a hub id, a run (RUN, RUN@STEP, RUN@best, RUN@latest: its weights only), a "
        "registered model (models:NAME, models:NAME@VERSION, models:NAME@ALIAS), "
        "builtin:smollm2 (real, small) or builtin:tiny (random, for tests). random:NAME, random:FOLDER or "
        "random:FILE.json: random weights of that architecture, to measure speed (whet bench)."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub id.")
    tokenizer: str | None = Field(
        default=None,
        description="A folder or a SentencePiece .model file with another tokenizer; default: the model's own.",
    )
    dtype: Literal["auto", "fp32", "bf16"] = Field(
        default="auto",
        description="The dtype of the stored weights. auto: fp32 for trained weights, train.precision for frozen ones. "
        "bf16 (with train.precision bf16 or fp8) halves the memory of trained weights; updates use stochastic "
        "rounding.",
    )
    attention: Literal["auto", "short", "varlen", "fa4", "cudnn", "flex", "sdpa", "eager"] = Field(
        default="auto",
        description="The attention backend. auto on CUDA: short (whet's Triton kernels, deterministic), for long "
        "documents fa4 (flash attention 4, if installed) or cudnn, flex for models with soft-capping or sinks; sdpa "
        "elsewhere and in fp32. varlen is torch's flash attention, eager the reference implementation.",
    )
    compile: Literal["auto"] | bool = Field(
        default="auto",
        description="Compile the layers with torch.compile: takes about a minute at the start, and makes steps "
        "faster. auto: on CUDA, except in fp64.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Allow the Python code that comes with the model to run."
    )
    add_tokens: list[str] = Field(
        default=[],
        description="New tokens. The embedding and head rows of each start as the mean of the tokens it was split into "
        "before; adapters train these rows.",
    )

    @model_validator(mode="after")
    def _validate_add_tokens(self) -> ModelConfig:
        twice = [token for token in self.add_tokens if self.add_tokens.count(token) > 1]
        if twice or not all(self.add_tokens):
            wrong = f"{twice[0]!r} is listed twice" if twice else "an empty string cannot be a token"
            raise config_error("add_tokens", f"{wrong}. Remove it")
        return self

    @property
    def resolved_path(self) -> str:
        """`path`; of random:FOLDER and random:FILE with the absolute path."""
        return resolve_random_path(self.path)


_MAX_RANK = 65_536


class AdapterConfig(Section):
    """Low-rank adapters (LoRA) on frozen weights."""

    method: Literal["lora", "rslora", "dora"] = Field(
        default="lora",
        description="lora; rslora scales by alpha / √rank, for large ranks; dora also learns the magnitude of each "
        "weight row, and is slower.",
    )
    rank: int = Field(default=16, ge=1, le=_MAX_RANK, description="Rank of the adapter matrices.")
    alpha: float = Field(default=32, gt=0, description="The adapter's output is scaled by alpha / rank.")
    ranks: dict[str, Annotated[int, Field(ge=1, le=_MAX_RANK)]] = Field(
        default={},
        description="Ranks of single layers, by name (q_proj, layers.3.mlp.up_proj) or regular expression.",
    )
    alphas: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={}, description="Alphas of single layers, by name or regular expression."
    )
    targets: list[str] | str = Field(
        default="all-linear",
        description="Names of the layers with an adapter, or a regular expression that matches full names; "
        "all-linear: all linear layers and experts, except the output head and routers.",
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout probability of the adapter's inputs.")
    also_train: list[str] = Field(
        default=[],
        description="Modules whose weights are trained in full and saved with the adapter, such as embed_tokens, "
        "lm_head or norm.",
    )
    tokens: list[str] = Field(
        default=[],
        description="Existing tokens whose embedding and head rows are also trained, like those of model.add_tokens.",
    )
