"""The knobs of the model and its adapter."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from whet.core.config import Section, config_error
from whet.model.load.random_models import resolve_random_path


class ModelConfig(Section):
    """Which model is trained."""

    path: str = Field(
        description="A model folder, a hub id, a run (RUN, RUN@STEP, RUN@best, RUN@latest: its weights alone), "
        "builtin:smollm2 (real, small) or builtin:tiny (random, for tests); or random:NAME, random:FOLDER, "
        "random:FILE.json: random weights of a shape, to measure speed (whet bench)."
    )
    revision: str | None = Field(default=None, description="Of a hub id: branch, tag or commit.")
    tokenizer: str | None = Field(
        default=None,
        description="A folder or a SentencePiece .model file with another tokenizer than the model's own.",
    )
    dtype: Literal["auto", "fp32", "bf16"] = Field(
        default="auto",
        description="What weights are kept in: trained ones in fp32 and frozen ones in train.precision, unless said; "
        "bf16 (with train.precision bf16 or fp8) halves their memory; updates are rounded at random, so that none is "
        "lost.",
    )
    attention: Literal["auto", "short", "varlen", "cudnn", "flex", "sdpa", "eager"] = Field(
        default="auto",
        description="How documents attend. On CUDA short, kernels of whet's own, the same bit by bit from run to run; "
        "cudnn where documents are long; flex for models with soft-caps or sinks; varlen is flash attention's. "
        "Elsewhere and in fp32 sdpa; eager is the reference.",
    )
    compile: Literal["auto"] | bool = Field(
        default="auto",
        description="Compile the model's layers, which takes a minute at the start and less time for each step: auto "
        "does on CUDA, except in fp64.",
    )
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model.")
    add_tokens: list[str] = Field(
        default=[],
        description="Texts that become tokens of their own. Each starts as the mean of the pieces that it was before, "
        "in the embedding and in the head; adapters train these rows.",
    )

    @model_validator(mode="after")
    def _validate_add_tokens(self) -> ModelConfig:
        twice = [token for token in self.add_tokens if self.add_tokens.count(token) > 1]
        if twice or not all(self.add_tokens):
            wrong = f"{twice[0]!r} stands there twice" if twice else "an empty text cannot be a token"
            raise config_error("add_tokens", f"{wrong}. Leave it out")
        return self

    @property
    def resolved_path(self) -> str:
        """`path`, where it names a shape by its folder or file, with the full path of that."""
        return resolve_random_path(self.path)


class AdapterConfig(Section):
    """Train small matrices beside the frozen weights instead of the weights."""

    method: Literal["lora", "rslora", "dora"] = Field(
        default="lora",
        description="lora; rslora scales by alpha / √rank, for large ranks; dora also learns the length of each row of "
        "the weight, which takes more time.",
    )
    rank: int = Field(default=16, ge=1, description="Size of the small matrices.")
    alpha: float = Field(default=32, gt=0, description="Their output is scaled by alpha / rank.")
    ranks: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default={},
        description="Other ranks for some layers, by name (q_proj, layers.3.mlp.up_proj) or regular expression.",
    )
    alphas: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={}, description="Other alphas for some layers, by name or regular expression."
    )
    targets: list[str] | str = Field(
        default="all-linear",
        description="Names of the layers that get one, or one regular expression for whole names; all-linear spares "
        "the output head.",
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Part of the adapter's inputs zeroed in training.")
    also_train: list[str] = Field(
        default=[],
        description="Names of modules that are trained whole beside the adapters and shipped with them, such as "
        "embed_tokens, lm_head or norm.",
    )
    tokens: list[str] = Field(
        default=[],
        description="Known tokens whose rows of embedding and head are trained too; those of model.add_tokens always "
        "are.",
    )
