"""The configuration: the sections of all packages in one tree."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from whet.checkpoint.config import CheckpointConfig
from whet.core.config import ConfigPath, Section, config_error, read_tree, validate_config, value_at
from whet.core.errors import WhetError
from whet.core.files import resolve_path, user_path
from whet.core.run_folder import check_run_format
from whet.core.yaml import Expand, Node, Template, dump_yaml
from whet.data.config import DataConfig
from whet.exporting.config import ExportConfig
from whet.inference.config import EvalConfig, parse_task_text
from whet.launch.config import LaunchConfig
from whet.model.config import AdapterConfig, ModelConfig
from whet.parallel.config import ParallelConfig
from whet.search.config import SearchConfig
from whet.tokenizer.named_templates import NAMED_TEMPLATES
from whet.training.config import ProfileConfig, Tracker, TrainConfig

_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".tab", ".xlsx", ".parquet", ".arrow", ".txt", ".gz", ".zst")


class RunConfig(Section):
    """The run itself."""

    name: str | None = Field(default=None, description="Name of the run; default: the recipe's file name.")
    dir: str | None = Field(default=None, description="Its folder; default: runs/NAME.")
    seed: int = Field(default=0, ge=0, description="Seed of data order, initial weights and dropout.")
    project: str | None = Field(default=None, description="Groups runs: `whet runs --project NAME` lists them.")
    tags: list[str] = Field(default=[], description="Tags to find the run by.")
    notify: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[],
        description="Where to send a message when the run finishes, fails or stalls: URLs receive a JSON object by "
        "POST, shell commands on stdin, with WHET_RUN, WHET_EVENT and WHET_TEXT set.",
    )
    device: Literal["auto", "cpu", "cuda", "mps", "xpu", "npu"] = Field(
        default="auto",
        description="Kind of device to run on. auto: this machine's accelerator, or else the CPU. AMD's GPUs are cuda, "
        "as in torch.",
    )
    price: float | None = Field(
        default=None,
        gt=0,
        description="Price of a device hour, in any currency; the cost of the run is predicted and counted.",
    )

    @field_validator("name")
    @classmethod
    def _name_is_a_folder(cls, name: str | None) -> str | None:
        if name is not None and {".", ".."} & set(name.split("/")):
            raise ValueError("the run would be in another folder than runs/NAME. Leave out . and .., or give run.dir")
        return name

    @field_validator("notify", mode="before")
    @classmethod
    def _notify_one(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given


class Config(Section):
    """Everything that determines a run."""

    run: RunConfig = Field(default=RunConfig())
    model: ModelConfig
    adapter: AdapterConfig | None = Field(default=None, description="Absent: every weight is trained.")
    quantize: Literal["nf4"] | None = Field(
        default=None,
        description="Keep the frozen weights of an adapter run in 4 bits (QLoRA), a quarter of their memory; default: "
        "model.dtype.",
    )
    data: DataConfig
    train: TrainConfig = Field(default=TrainConfig())
    parallel: ParallelConfig = Field(default=ParallelConfig())
    eval: EvalConfig = Field(default=EvalConfig())
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig())
    export: ExportConfig = Field(default=ExportConfig())
    track: list[Tracker] | None = Field(
        default=None,
        description="Where metrics go besides metrics.jsonl (docs/tracking.md); default: TensorBoard, if it is "
        "installed.",
    )
    profile: ProfileConfig | None = Field(default=None, description="Absent: no step is profiled.")
    launch: LaunchConfig = Field(default=LaunchConfig())
    search: SearchConfig | None = Field(
        default=None, description="How `whet search` searches the settings that are ranges (docs/search.md)."
    )

    @model_validator(mode="before")
    @classmethod
    def _add_template_tokens(cls, given: Any) -> Any:
        """The markers of a named chat template become tokens of the model."""
        data, model = (given.get(name) if isinstance(given, dict) else None for name in ("data", "model"))
        name = data.get("template") if isinstance(data, dict) else None
        if not isinstance(model, dict) or not isinstance(name, str) or name not in NAMED_TEMPLATES:
            return given
        added = model.get("add_tokens", [])
        if not isinstance(added, list):  # an error of its own
            return given
        missing = [token for token in NAMED_TEMPLATES[name].tokens if token not in added]
        return {**given, "model": {**model, "add_tokens": [*added, *missing]}}

    @model_validator(mode="before")
    @classmethod
    def _keep_best_if_stopping_early(cls, given: Any) -> Any:
        """A run that may end early keeps its best checkpoint."""
        measured, saved = (given.get(name) if isinstance(given, dict) else None for name in ("eval", "checkpoint"))
        if not isinstance(measured, dict) or measured.get("patience") is None or not isinstance(saved, dict | None):
            return given
        return {**given, "checkpoint": {"keep_best": 1, **(saved or {})}}

    @model_validator(mode="after")
    def _check_sections(self) -> Config:
        """Values that are valid in their section and invalid together."""
        if self.train.row_length is not None and self.train.row_length < self.data.max_length:
            raise config_error(
                "train.row_length",
                f"{self.train.row_length} is shorter than data.max_length = {self.data.max_length}: the longest "
                "conversations would not fit into a row",
            )
        if self.train.batch.tokens is not None and self.train.batch.tokens < self.row_length:
            raise config_error(
                "train.batch.tokens",
                f"{self.train.batch.tokens} is less than one row of {self.row_length} tokens. "
                "Raise it, or lower train.row_length and data.max_length",
            )
        if self.export.at_end == "adapter" and self.adapter is None:
            raise config_error("export.at_end", "adapter, but without an adapter section every weight is trained")
        if self.eval.patience is not None and not self.checkpoint.keep_best:
            raise config_error(
                "checkpoint.keep_best",
                f"0, but eval.patience = {self.eval.patience} ends the run after its best checkpoint. Set it to 1",
            )
        if self.checkpoint.keep_best:
            self._check_keep_best()
        if self.quantize is not None:
            self._check_quantize(self.quantize)
        if self.parallel.tensor > 1:
            self._check_tensor_parallel()
        if self.parallel.expert > 1:
            self._check_expert_parallel()
        if self.parallel.offload == "weights":
            self._check_weight_offload()
        if self.shards_weights:
            self._check_sharded_adapter()
        return self

    def _check_keep_best(self) -> None:
        best = self.eval.best
        kind, _, name = best.partition("/")
        if self.eval.every is None:
            raise config_error(
                "checkpoint.keep_best" if self.eval.patience is None else "eval.patience",
                f"{self.eval.patience or self.checkpoint.keep_best}, but nothing is measured between start and end. "
                "Set eval.every too",
            )
        if kind == "task" and name not in self.eval.task_names:
            raise config_error("eval.best", f"{best}, but eval.tasks does not have {name}. Add it")
        if kind == "metric" and name not in self.eval.metrics:
            raise config_error("eval.best", f"{best}, but eval.metrics does not have {name}. Add it")
        if kind in ("task", "metric"):
            return
        if kind != "val_loss" and best not in ("val_accuracy", "val_bpb"):  # val_loss/SOURCE: of several
            raise config_error(
                "eval.best", f"{best} is not measured. Use val_loss, val_accuracy, val_bpb, task/NAME or metric/NAME"
            )
        if self.data.validation is None:
            raise config_error("eval.best", f"{best}, but there is no validation data. Set data.validation")

    def _check_quantize(self, kind: str) -> None:
        if self.adapter is None:
            raise config_error(
                "quantize",
                f"{kind}, but 4-bit weights cannot be trained. Add an adapter section, such as adapter.rank=16, or "
                "remove quantize",
            )
        if self.train.precision == "fp64" or self.train.precision.startswith("fp8"):
            other = "fp32" if self.train.precision == "fp64" else "bf16"
            raise config_error(
                "quantize",
                f"{kind} does not support train.precision = {self.train.precision}. Set train.precision={other}, or "
                "remove quantize",
            )
        if self.model.dtype != "auto":
            raise config_error(
                "model.dtype",
                f"{self.model.dtype}, but quantize = {kind} sets the dtype of the weights, too. Remove one of them: "
                "weights that are not quantized are kept in train.precision",
            )

    def _check_tensor_parallel(self) -> None:
        """Tensor parallelism is for training every weight of a model, without adapters or quantization."""
        reasons = {
            "quantize": self.quantize and "4-bit weights are not sharded",
            "adapter": self.adapter and "adapters are small, and parallel.shard shards the frozen weights",
            "train.precision": self.train.precision.startswith("fp8") and "fp8 scales need the whole layer",
            "parallel.context": self.parallel.context > 1 and "both split the attention heads",
            "train.optimizer.name": self.train.optimizer.name == "adamw8bit"
            and "blocks of values that share a scale would be split",
        }
        self._reject_combination("parallel.tensor", self.parallel.tensor, reasons)

    def _check_expert_parallel(self) -> None:
        reasons = {
            "quantize": self.quantize and "4-bit weights are not sharded",
            "parallel.context": self.parallel.context > 1 and "both exchange tokens between processes",
            "parallel.tensor": self.parallel.tensor > 1 and "its plan splits each expert",
            "train.optimizer.name": self.train.optimizer.name == "adamw8bit"
            and "blocks of values that share a scale would be split",
        }
        self._reject_combination("parallel.expert", self.parallel.expert, reasons)

    @staticmethod
    def _reject_combination(key: str, value: int, reasons: dict[str, Any]) -> None:
        for other, reason in reasons.items():
            if reason:
                raise config_error(key, f"{value} cannot be combined with {other}: {reason}. Remove one of them")

    def _check_weight_offload(self) -> None:
        if self.parallel.shard is None:
            raise config_error(
                "parallel.offload",
                "weights, but only sharded weights can be offloaded. Set parallel.shard too; for one process, 1 is "
                "enough",
            )
        if self.quantize is not None:
            raise config_error(
                "parallel.offload",
                f"weights, but {self.quantize} weights stay on the device, unsharded, and adapters are small: there is "
                "nothing to gain. Remove one of them; parallel.offload=activations works",
            )

    def _check_sharded_adapter(self) -> None:
        for key, value in self._adapter_keys_needing_weights.items():
            raise config_error(
                key,
                f"{value} initializes the adapter from the model's weights, which parallel.shard has sharded by then. "
                "Use lora or rslora alone, quantize=nf4 (which shards no weights), or remove parallel.shard",
            )

    @property
    def _adapter_keys_needing_weights(self) -> dict[str, Any]:
        """The settings, with their values, that initialize the adapter from the model's weights."""
        if self.adapter is None:
            return {}
        settings = {
            "adapter.method": "dora" if self.adapter.method == "dora" else None,
            "adapter.also_train": self.adapter.also_train, "adapter.tokens": self.adapter.tokens,
            "model.add_tokens": self.model.add_tokens,
        }  # fmt: skip
        return {key: value for key, value in settings.items() if value}

    @property
    def adapter_needs_weights(self) -> bool:
        """Whether the adapter can only be created with the model's weights loaded."""
        return bool(self._adapter_keys_needing_weights)

    @property
    def row_length(self) -> int:
        return self.train.row_length or self.data.max_length

    @property
    def rows_per_step(self) -> int | None:
        """None: a step has a number of conversations, in as many rows as they need."""
        batch = self.train.batch
        return batch.tokens // self.row_length if batch.tokens is not None else batch.rows

    @property
    def validation_rows(self) -> int | None:
        """The most rows of an evaluation; None: all."""
        tokens = self.eval.tokens
        return max(1, tokens // self.row_length) if tokens is not None else self.eval.rows

    @property
    def shards_weights(self) -> bool:
        """Whether FSDP2 shards the model's weights: 4-bit weights are replicated."""
        return self.parallel.uses_fsdp and self.quantize is None

    def with_folder(self, folder: Path) -> Config:
        """The same configuration with another run folder."""
        return self.model_copy(update={"run": self.run.model_copy(update={"dir": str(folder)})})

    @property
    def folder(self) -> Path:
        """The run folder."""
        return user_path(self.run.dir or f"runs/{self.run.name}")

    def dump(self, absolute_paths: bool = True) -> str:
        """The complete configuration as YAML: repeating it with another run.dir repeats the run. Without absolute
        paths it is valid in this folder only, and stores name the files as this configuration does."""
        return dump_yaml(self.unexpanded(absolute_paths))

    def unexpanded(self, absolute_paths: bool = True) -> dict[str, Any]:
        """As `resolved`, for files: values from environment variables as `${NAME}`, launch.env as names."""
        tree = self.resolved() if absolute_paths else self.model_dump(exclude_none=True, mode="json")
        for path, text in self._used_templates():
            before, now = self._templates[path][1], value_at(tree, path)
            value_at(tree, path[:-1])[path[-1]] = _as_absolute(text, before, now)
        tree["launch"]["env"] = list(self.launch.env) or {}
        return tree

    def portable(self) -> dict[str, Any]:
        """As `unexpanded`, with paths as they were given: for a machine with other folders."""
        tree = self.model_dump(exclude_none=True, mode="json")
        for path, text in self._used_templates():
            value_at(tree, path[:-1])[path[-1]] = text
        tree["launch"]["env"] = list(self.launch.env) or {}
        return tree

    def variable_names(self) -> list[str]:
        """The environment variables that the configuration needs where it runs."""
        used = (name for _, text in self._used_templates() for name in text.names)
        return list(dict.fromkeys([*self.launch.env, *used]))

    def variables(self) -> dict[str, Any]:
        """The resolved values that come from environment variables, by key."""
        tree = self.resolved()
        found = {".".join(map(str, path)): value_at(tree, path) for path, _ in self._used_templates()}
        given = {f"launch.env.{name}": value for name, value in self.launch.variables().items() if value is not None}
        return {key: value for key, value in found.items() if not key.startswith("launch.env")} | given

    def _used_templates(self) -> Iterator[tuple[ConfigPath, Template]]:
        """Without those whose value was replaced since, such as that of model.path: RUN."""
        tree = self.model_dump(exclude_none=True, mode="json")
        for path, (text, value) in self._templates.items():
            if path and value is not None and value_at(tree, path) == value:
                yield path, text

    def resolved(self) -> dict[str, Any]:
        """The configuration as plain values with absolute paths, so that it is valid from any folder."""
        tree = self.model_dump(exclude_none=True, mode="json")
        tree["model"]["path"] = self.model.resolved_path
        validation = tree["data"].get("validation") or {}
        tasks = tree["eval"]["tasks"]
        task_files = [record for task, record in zip(self.eval.tasks, tasks, strict=True) if not task.builtin]
        with_path = [tree["model"], *tree["data"]["sources"], *validation.get("sources", []), *task_files]
        for section, key in [
            *((section, "path") for section in with_path),
            *((section, "schema_file") for section in tasks),
            (tree["model"], "tokenizer"),
            (tree["data"], "template"),
            (tree["data"], "store"),
        ]:
            if key in section and any(user_path(f"{section[key]}{end}").exists() for end in ("", ".bin")):
                section[key] = str(resolve_path(user_path(section[key])))
        return tree


def _as_absolute(text: Template, before: Any, now: Any) -> Template:
    """The template of a value that was `before` and is `now` resolved: a relative path is made absolute."""
    if isinstance(now, dict):  # the short form of a task
        before, now = before["path"], now["path"]
    made_absolute = isinstance(now, str) and before != now and not Path(before).expanduser().is_absolute()
    folder = Path(str(Path.cwd()).replace("${", "$${"))
    template = Template(folder / text if made_absolute and Path(now) == Path(before).resolve() else text)
    template.is_text = isinstance(now, str)
    return template


def is_data_file(path: Path) -> bool:
    """Whether a file that stands where a recipe should is a data file."""
    return path.suffix.lower() in _DATA_SUFFIXES


def _require_recipe(path: Path) -> None:
    """A WhetError for a folder, and for a name that only resembles that of a recipe."""
    if path.is_dir():
        if (path / "config.yaml").is_file():
            raise WhetError(
                f"{path}: this is the folder of a run. To continue it: whet train {path}/config.yaml --resume"
            )
        raise WhetError(
            f"{path}: this is a folder. Give the path of a recipe, a YAML file such as recipes/tiny.yaml; for the data "
            f"in a folder, make one: whet init {path}"
        )
    shipped = Path(__file__).parent / "recipes" / path.name
    if not path.exists() and shipped.is_file():
        raise WhetError(f"{path}: no such file. whet comes with a recipe of this name: cp {shipped} .")
    if not path.exists() and path.parent.is_dir():
        recipes = [file.name for file in sorted(path.parent.glob("*.y*ml"))]
        similar = difflib.get_close_matches(path.name, [*recipes, *(Path(name).stem for name in recipes)], n=1)
        if similar:
            meant = path.parent / next(name for name in recipes if similar[0] in (name, Path(name).stem))
            raise WhetError(f"{path}: no such file. Did you mean {meant}?")


def read_config(path: Path, overrides: Sequence[str] = (), expand: Expand = "all") -> Config:
    """Read a recipe and set run.name."""
    if is_data_file(path):
        raise WhetError(f"{path}: this is a data file, not a recipe. Make a recipe for it: whet init {path}")
    _require_recipe(path)
    if path.name == "config.yaml":  # of a run folder
        check_run_format(path.parent)
    tree = read_tree(Config, path, overrides, expand)
    config = validate_config(Config, _resolve_recipe_paths(tree, ()))
    return name_config(config, path.parent.name if path.name == "config.yaml" else path.stem)


_PATHS = (
    ("model", "path"), ("model", "tokenizer"), ("data", "template"), ("data", "sources", "path"), ("eval", "tasks"),
    ("eval", "tasks", "path"), ("eval", "tasks", "schema_file"),
)  # fmt: skip
"""Settings that name files, without the numbers of lists; those under data.validation count as those under data."""


def _resolve_recipe_paths(tree: Node, key: tuple[str, ...]) -> Node:
    """The tree with each path that exists relative to its recipe's folder as that one; others are relative to the
    working directory, like those on the command line."""
    if isinstance(tree.value, dict):
        inside = {
            name: _resolve_recipe_paths(each, key if name == "validation" else (*key, name))
            for name, each in tree.value.items()
        }
        return replace(tree, value=inside)
    if isinstance(tree.value, list):
        return replace(tree, value=[_resolve_recipe_paths(each, key) for each in tree.value])
    recipe = Path(tree.place.rpartition(":")[0])  # or the text of an override, which is longer than a path may be
    if key not in _PATHS or not isinstance(tree.value, str) or recipe.name == "config.yaml":
        return tree
    if not os.path.isfile(recipe):  # noqa: PTH113 - Path.is_file raises OSError for such a text
        return tree
    is_task = key == ("eval", "tasks")  # FILE or FILE:SCORER, or the name of a built-in one
    if is_task and not any(sign in tree.value for sign in "/."):
        return tree
    found = recipe.parent / (parse_task_text(tree.value)["path"] if is_task else tree.value)
    is_here = resolve_path(recipe.parent) == Path.cwd()
    is_found = os.path.lexists(found) or os.path.lexists(f"{found}.bin")  # token files may be named without suffix
    if is_here or user_path(tree.value).is_absolute() or not is_found:
        return tree
    template = None if tree.template is None else Template(recipe.parent / tree.template)
    return replace(tree, value=str(recipe.parent / tree.value), template=template)


def name_config(config: Config, name: str) -> Config:
    """The configuration with run.name, if it has none."""
    return config.model_copy(update={"run": config.run.model_copy(update={"name": config.run.name or name})})
