"""whet from Python: what `import whet` offers.

A recipe is the path of a YAML file, the path of a data file (as `whet train my.csv` takes it), or a dict with the same
keys. Errors are exceptions (`WhetError`); results are objects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from whet.config import Config, is_data_file, name_config, read_config
from whet.core.config import validate_config
from whet.core.errors import WhetError
from whet.core.run_folder import move_run_aside
from whet.core.yaml import dump_yaml, parse_yaml
from whet.report.run_view import RunView

if TYPE_CHECKING:
    import pandas as pd

    from whet.preflight.data_checks import Finding

__all__ = [
    "Chat", "Export", "Run", "WhetError", "chat", "check", "evaluate", "export", "generate", "load_run", "prepare",
    "propose", "train",
]  # fmt: skip

Recipe = str | os.PathLike[str] | Mapping[str, Any] | Config


@dataclass(frozen=True)
class Run:
    """A run folder: what was trained, how it went, and what came of it."""

    path: Path

    def __post_init__(self) -> None:
        RunView.read(self.path)  # a WhetError if it is not a run

    @property
    def name(self) -> str:
        return RunView.read(self.path).name

    @property
    def state(self) -> str:
        """running, finished, stopped or failed."""
        return RunView.read(self.path).status.state

    @property
    def config(self) -> dict[str, Any]:
        """The complete configuration."""
        return RunView.read(self.path).config

    def metrics(self) -> pd.DataFrame:
        """metrics.jsonl as a table: a row for each step, and one for each evaluation."""
        return _table(list(RunView.read(self.path).metrics))

    def samples(self) -> pd.DataFrame:
        """The answers to the tasks' prompts, before training and at each evaluation."""
        return _table([asdict(sample) for sample in RunView.read(self.path).samples])

    def chat(self, **options: Any) -> Chat:
        """`whet.chat` with this run."""
        return chat(self, **options)

    def export(self, to: str = "merged", **options: Any) -> Export:
        """`whet.export` of this run."""
        return export(self, to, **options)

    def evaluate(self, **options: Any) -> dict[str, Any]:
        """`whet.evaluate` of this run."""
        return evaluate(self, **options)


@dataclass(frozen=True)
class Export:
    """An export and its certificate."""

    path: Path
    certificate: dict[str, Any]

    @property
    def verified(self) -> bool:
        """Whether the export was loaded back and equals the trained model."""
        return bool(self.certificate["verified"])


Model = str | os.PathLike[str] | Run
"""A run, a model folder, a hub id, builtin:NAME or models:NAME."""


def load_run(path: str | os.PathLike[str]) -> Run:
    """The run in a folder; `RUN@STEP` is for `chat`, `evaluate` and `export`."""
    return Run(Path(path))


def propose(data: str | os.PathLike[str], model: Model = "builtin:smollm2") -> dict[str, Any]:
    """A recipe for a data file, as `whet init` writes it."""
    from whet.preflight.recipe_proposal import nest_settings, propose_recipe

    return nest_settings(propose_recipe(str(data), _reference(model)))


def prepare(recipe: Recipe, *overrides: str) -> dict[str, Any]:
    """Tokenize the data; the ledger: what became of every conversation. `overrides`: such as "data.max_length=512"."""
    from whet.run.data import prepare_data

    return prepare_data(_read(recipe, overrides)).ledger()


def check(recipe: Recipe, *overrides: str) -> list[Finding]:
    """Check data, chat template, masks and model. A finding's `level` is ok, warning or fault."""
    from whet.preflight.run_checks import run_checks

    return list(run_checks(_read(recipe, overrides)))


def train(recipe: Recipe, *overrides: str, resume: bool = False, fresh: bool = False, until: int | None = None) -> Run:
    """Train. `resume`: continue the run in its folder; `fresh`: move an earlier run aside; `until`: pause after a step.

    Ctrl-C, or Jupyter's stop button, saves a checkpoint and raises a WhetError: `resume=True` continues.
    """
    from whet.report.run_reports import write_report
    from whet.run.lifecycle import run_training

    if fresh and resume:
        raise WhetError("fresh starts anew and resume continues: give one of them")
    config = _read(recipe, overrides)
    if fresh:
        move_run_aside(config.folder)
    run_training(config, resume=resume, until=until)
    write_report(config.folder)
    return Run(config.folder)


def evaluate(
    model: Model, *overrides: str, tasks: str | None = None, data: str | None = None, against: Model | None = None,
    base: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Loss, perplexity and task scores with intervals, as `whet eval --json` prints them."""
    from whet.run.eval_command import EvaluationRequest
    from whet.run.eval_command import evaluate as evaluate_request

    other = None if against is None else _reference(against)
    return evaluate_request(EvaluationRequest(_reference(model), [*overrides], tasks, data, other, base, None))


class Chat:
    """A conversation with a model."""

    def __init__(self, model: Model, system: str | None = None, **sampling: Any) -> None:
        """`sampling`: temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens, stop, seed."""
        from whet.inference.chat import ChatSession
        from whet.inference.sampling import Sampling
        from whet.run.models.load_models import load_chat_models

        if isinstance(stop := sampling.get("stop", ()), str):
            sampling["stop"] = (stop,)
        self._models = load_chat_models(_reference(model), Sampling(**sampling), system=system)
        self._session = ChatSession(self._models.model, system)

    def send(self, text: str) -> str:
        """The model's reply; both become part of the conversation."""
        return self._session.send(text).text

    def reset(self) -> None:
        """Start a new conversation."""
        self._session.reset()

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [message.as_dict() for message in self._session.messages]

    def explain(self, text: str) -> list[dict[str, Any]]:
        """The tokens of the reply to a prompt, each with its probability and the most likely alternatives."""
        from whet.inference.chat import answer_message

        tokens: list[dict[str, Any]] = answer_message(self._models, text, explain=True)["explain"]
        return tokens

    def generate(self, prompts: Sequence[str]) -> list[str]:
        """The replies to several prompts, each a conversation of its own, computed together."""
        from whet.data.conversation import Conversation, Message, Origin
        from whet.inference.chat import answer_conversations

        asked = [Conversation((Message("user", text),), Origin("prompts", n)) for n, text in enumerate(prompts, 1)]
        return [record["answer"] for record in answer_conversations(self._models, asked)]


def chat(model: Model, system: str | None = None, **sampling: Any) -> Chat:
    """Load a model to talk to: `whet.chat("runs/my").send("Hi")`."""
    return Chat(model, system, **sampling)


@overload
def generate(model: Model, prompts: str, system: str | None = None, **sampling: Any) -> str: ...
@overload
def generate(model: Model, prompts: Sequence[str], system: str | None = None, **sampling: Any) -> list[str]: ...
def generate(model: Model, prompts: str | Sequence[str], system: str | None = None, **sampling: Any) -> str | list[str]:
    """The reply to a prompt, or the replies to several."""
    several = [prompts] if isinstance(prompts, str) else list(prompts)
    replies = Chat(model, system, **sampling).generate(several)
    return replies[0] if isinstance(prompts, str) else replies


def export(
    run: Model, to: str = "merged", dtype: str | None = None, out: str | os.PathLike[str] | None = None
) -> Export:
    """Export a run (merged, adapter, gguf, megatron, neox or nanochat), load the export back and compare it."""
    from whet.run.export_run import ExportRequest, export_run

    folder, certificate = export_run(_reference(run), ExportRequest(to, dtype, None if out is None else Path(out)))
    return Export(folder, certificate.as_dict())


def _read(recipe: Recipe, overrides: Sequence[str]) -> Config:
    from whet.data.read.containers.locate import forget_plugin_records
    from whet.run.models.model_reference import resolve_model_reference

    forget_plugin_records()
    for each in overrides:
        if not isinstance(each, str):
            raise WhetError(f'override {each!r}: give settings as text, such as "train.epochs=2"')
    if isinstance(recipe, Config):
        config = recipe
    elif isinstance(recipe, Mapping):
        from whet.core.config import apply_overrides

        try:
            text = dump_yaml(_plain(recipe, "the recipe"))
        except RecursionError:
            raise WhetError("the recipe: a value is nested too deeply, or contains itself") from None
        tree = parse_yaml(text, "the recipe", numbered=False)
        config = validate_config(Config, apply_overrides(Config, tree, overrides))
        config = name_config(config, _data_name(config))
    elif is_data_file(Path(recipe)):
        from whet.preflight.recipe_proposal import propose_config

        config = propose_config(Path(recipe), overrides)
    else:
        config = read_config(Path(recipe), overrides)
    return resolve_model_reference(config)


def _plain(value: Any, key: str) -> Any:
    """The value as YAML has it: paths as text, numbers of numpy as Python's."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each, str(name)) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, key) for each in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    if value is None or isinstance(value, str | int | float):
        return value
    raise WhetError(f"{key}: {value!r} is a {type(value).__name__}. Give text, a number, a list or a dict")


def _data_name(config: Config) -> str:
    from whet.preflight.recipe_proposal import recipe_name

    return recipe_name(config.data.sources[0].path)


def _reference(model: Model) -> str:
    return str(model.path if isinstance(model, Run) else model)


def _table(records: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame.from_records(records)
