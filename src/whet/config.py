"""The whole configuration: the sections of every package in one tree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from whet.checkpoint.config import CheckpointConfig
from whet.core.config import Section, config_error, load_config
from whet.core.errors import WhetError
from whet.core.run_folder import check_run_format
from whet.core.yaml import dump_yaml
from whet.data.config import DataConfig
from whet.exporting.config import ExportConfig
from whet.inference.config import EvalConfig
from whet.launch.config import LaunchConfig
from whet.model.config import AdapterConfig, ModelConfig
from whet.parallel.config import ParallelConfig
from whet.training.config import ProfileConfig, Tracker, TrainConfig

_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst")


class RunConfig(Section):
    """The run itself."""

    name: str | None = Field(default=None, description="Name of the run; default: the recipe's file name.")
    dir: str | None = Field(default=None, description="Its folder; default: runs/NAME.")
    seed: int = Field(default=0, ge=0, description="Seed of data order, initial weights and dropout.")
    tags: list[str] = Field(default=[], description="Words to find the run by.")


class Config(Section):
    """Everything that decides a run."""

    run: RunConfig = Field(default=RunConfig())
    model: ModelConfig
    adapter: AdapterConfig | None = Field(default=None, description="Absent: every weight is trained.")
    quantize: Literal["nf4"] | None = Field(
        default=None,
        description="Keep the frozen weights beside an adapter in 4 bits (QLoRA), a quarter of their memory; absent: "
        "as model.dtype says.",
    )
    data: DataConfig
    train: TrainConfig = Field(default=TrainConfig())
    parallel: ParallelConfig = Field(default=ParallelConfig())
    eval: EvalConfig = Field(default=EvalConfig())
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig())
    export: ExportConfig = Field(default=ExportConfig())
    track: list[Tracker] | None = Field(
        default=None, description="Where curves go beside metrics.jsonl; absent: TensorBoard, if it is installed."
    )
    profile: ProfileConfig | None = Field(default=None, description="Absent: no step is profiled.")

    launch: LaunchConfig = Field(default=LaunchConfig())

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        if self.train.row_length is not None and self.train.row_length < self.data.max_length:
            raise config_error(
                "train.row_length",
                f"{self.train.row_length} is shorter than data.max_length = {self.data.max_length}, so the longest "
                "conversations would fit no row",
            )
        if self.train.batch.tokens is not None and self.train.batch.tokens < self.row_length:
            raise config_error(
                "train.batch.tokens", f"{self.train.batch.tokens} is less than one row of {self.row_length} tokens"
            )
        if self.export.at_end == "adapter" and self.adapter is None:
            raise config_error("export.at_end", "adapter, but without an adapter section every weight is trained")
        if self.checkpoint.keep_best:
            self._has_a_best()
        if self.quantize is not None:
            self._can_be_quantized(self.quantize)
        if self.parallel.tensor > 1:
            self._can_divide_layers()
        if self.parallel.offload == "weights":
            self._weights_can_wait()
        if self.shards_weights:
            self._adapter_can_be_divided()
        return self

    def _weights_can_wait(self) -> None:
        if self.parallel.shard is None:
            raise config_error(
                "parallel.offload",
                "weights, but only weights that are divided can wait in the host's memory. Set parallel.shard too; 1 "
                "is enough for one process",
            )
        if self.quantize is not None:
            raise config_error(
                "parallel.offload",
                f"weights, but those in {self.quantize} stay on the device, whole, and adapters are small: there is "
                "nothing to gain. Leave one of them out; parallel.offload=activations works",
            )

    @property
    def _beginning_with_weights(self) -> dict[str, Any]:
        """What of an adapter begins as a function of the model's weights."""
        if self.adapter is None:
            return {}
        asked = {
            "adapter.method": "dora" if self.adapter.method == "dora" else None,
            "adapter.also_train": self.adapter.also_train, "adapter.tokens": self.adapter.tokens,
            "model.add_tokens": self.model.add_tokens,
        }  # fmt: skip
        return {key: value for key, value in asked.items() if value}

    @property
    def adapter_needs_weights(self) -> bool:
        """Whether the adapter cannot be made where the weights are not at hand."""
        return bool(self._beginning_with_weights)

    def _adapter_can_be_divided(self) -> None:
        for key, value in self._beginning_with_weights.items():
            raise config_error(
                key,
                f"{value} beside an adapter starts from the model's weights, which parallel.shard divides before. "
                "Use lora or rslora alone, quantize=nf4 (which divides no weights), or leave parallel.shard out",
            )

    def _has_a_best(self) -> None:
        """Of checkpoints that are measured while training, by something that is measured."""
        best, task = self.eval.best, self.eval.best.removeprefix("task/")
        if self.eval.every is None:
            raise config_error(
                "checkpoint.keep_best",
                f"{self.checkpoint.keep_best}, but nothing is measured between start and end. Set eval.every too",
            )
        if best.startswith("task/") and task not in self.eval.task_names:
            raise config_error("eval.best", f"{best}, but eval.tasks does not have {task}. Add it")
        if best.startswith("val_") and self.data.validation is None:
            raise config_error("eval.best", f"{best}, but there is no validation data. Set data.validation")
        if not best.startswith(("task/", "val_")):
            raise config_error("eval.best", f"{best} is not measured. Use val_loss, val_accuracy, val_bpb or task/NAME")

    def _can_be_quantized(self, kind: str) -> None:
        if self.adapter is None:
            raise config_error(
                "quantize",
                f"{kind}, but weights in 4 bits cannot be trained. Add an adapter section, such as adapter.rank=16, or "
                "leave quantize out",
            )
        if self.train.precision == "fp64" or self.train.precision.startswith("fp8"):
            other = "fp32" if self.train.precision == "fp64" else "bf16"
            raise config_error(
                "quantize",
                f"{kind} does not compute in train.precision = {self.train.precision}. Set train.precision={other}, or "
                "leave quantize out",
            )
        if self.model.dtype != "auto":
            raise config_error(
                "model.dtype",
                f"{self.model.dtype}, but quantize = {kind} says too what weights are kept in. Leave one of them out: "
                "beside 4-bit weights the others are kept in train.precision",
            )

    def _can_divide_layers(self) -> None:
        """Plain fine-tuning of every weight is what parallel.tensor is for."""
        reasons = {
            "quantize": self.quantize and "weights in 4 bits are whole on every device",
            "adapter": self.adapter and "beside an adapter little is trained, and parallel.shard divides the rest",
            "train.precision": self.train.precision.startswith("fp8") and "8 bits need the whole layer for their scale",
            "parallel.context": self.parallel.context > 1 and "both would divide the heads",
            "train.optimizer.name": self.train.optimizer.name == "adamw8bit"
            and "its blocks of numbers that share a scale would be cut",
        }
        for key, reason in reasons.items():
            if reason:
                raise config_error(
                    "parallel.tensor",
                    f"{self.parallel.tensor} does not go with {key}: {reason}. Leave one of them out",
                )

    @property
    def row_length(self) -> int:
        return self.train.row_length or self.data.max_length

    @property
    def shards_weights(self) -> bool:
        """Whether each process reads its own part of the weights: those in 4 bits are whole everywhere."""
        return self.parallel.uses_fsdp and self.quantize is None

    def with_folder(self, folder: Path) -> Config:
        """The same run in another folder."""
        return self.model_copy(update={"run": self.run.model_copy(update={"dir": str(folder)})})

    @property
    def folder(self) -> Path:
        """The run directory."""
        return Path(self.run.dir or f"runs/{self.run.name}").expanduser()

    def dump(self) -> str:
        """As YAML, complete: repeating it with another run.dir repeats the run."""
        return dump_yaml(self.resolved())

    def resolved(self) -> dict[str, Any]:
        """As plain values, with files by their full path, so that it means the same from any folder."""
        tree = self.model_dump(exclude_none=True, mode="json")
        tree["model"]["path"] = self.model.resolved_path
        validation = tree["data"].get("validation") or {}
        named = [(owner, "path") for owner in (tree["model"], *tree["data"]["sources"], *validation.get("sources", []))]
        files = [owner for task, owner in zip(self.eval.tasks, tree["eval"]["tasks"], strict=True) if not task.builtin]
        named += [(owner, "path") for owner in files]
        named += [(owner, "schema_file") for owner in tree["eval"]["tasks"]]
        for owner, key in [
            *named,
            (tree["model"], "tokenizer"),
            (tree["data"], "template"),
            (tree["data"], "store"),
        ]:
            if key in owner and Path(owner[key]).expanduser().exists():
                owner[key] = str(Path(owner[key]).expanduser().resolve())
        return tree


def read_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """A recipe with its name and its paths settled."""
    if path.suffix in _DATA_SUFFIXES:
        raise WhetError(
            f"{path}: this is data, not a recipe. Write a recipe, a YAML file, that names it in data.sources; the "
            "README has one of ten lines"
        )
    if path.name == "config.yaml":  # of a run folder
        check_run_format(path.parent)
    config = load_config(Config, path, overrides)
    name = config.run.name or (path.parent.name if path.name == "config.yaml" else path.stem)
    run = config.run.model_copy(update={"name": name})
    return config.model_copy(update={"run": run})
