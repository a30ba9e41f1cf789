"""A recipe for a data file: settings from what the data and this machine are like, each with its reason."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet.config import Config, name_config
from whet.core.config import apply_overrides, validate_config
from whet.core.console import info, warn
from whet.core.errors import WhetError, first_line
from whet.core.files import resolve_path
from whet.core.resources import available_memory
from whet.core.yaml import dump_yaml_inline, parse_yaml
from whet.data.config import Source
from whet.data.conversation import BadRecord, Conversation, PlainText
from whet.data.read.sources import SourceReader, expected_records, propose_source
from whet.model.load.weight_files import locate_model
from whet.preflight.known_models import KnownModel, find_known
from whet.run.data import prepare_data

DEFAULT_MODEL = "builtin:smollm2"
_SAMPLED_RECORDS = 2000
_LONGEST_CONTEXT = 32_768
"""The most tokens that a proposal allows for a conversation; a longer max_length is a decision of the user's."""
_CHARACTERS_PER_TOKEN = 2.0  # cautious: English has about 4
_GIB, _LINE_LENGTH = 2**30, 110


class Setting(NamedTuple):
    """A line of a recipe."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class DataSummary:
    """What a source holds, from its first records."""

    source: Source
    is_guessed: bool
    """Whether format and fields were guessed from the names of the columns."""
    note: str
    """The line about the format, without the path."""
    conversations: int
    lengths: tuple[int, ...]
    """Tokens of each sampled conversation, ascending."""
    lengths_note: str
    """How they were counted, where not by the model's tokenizer."""
    is_text: bool
    bad: tuple[BadRecord, ...] = ()
    """Those that cannot be read."""


def propose_recipe(path: str, model: str, guess: bool = True) -> list[Setting]:
    """The settings for a data file or dataset. `guess`: take columns whose names mean a question and an answer; else
    they are an error with the line to add."""
    known = find_known(model)
    model_path = known.path if known else model
    source, is_guessed = propose_source(path, guess)
    data = _summarize(source, is_guessed, model_path)
    return [
        Setting("model.path", model_path, f"{known.billions:g} billion parameters" if known else ""),
        *_adapter_settings(model_path, known, data),
        *_source_settings(data),
        *(_bad_record_settings(data) if guess else []),
        *_validation_settings(data),
        *_length_settings(data),
        *_training_settings(data, known, is_adapter=_uses_adapter(model_path, known, data)),
    ]


def propose_config(file: Path, overrides: Sequence[str]) -> Config:
    """The configuration that `whet init` would write for a data file; columns are not guessed."""
    given = dict(text.partition("=")[::2] for text in overrides)
    settings = propose_recipe(str(file), given.get("model.path", DEFAULT_MODEL), guess=False)
    text = render_recipe(settings, f"Proposed for {file}; `whet init {file}` writes it to a file that you can edit.")
    info(text)
    tree = apply_overrides(Config, parse_yaml(text, f"whet init {file}", numbered=False), overrides)
    return name_config(validate_config(Config, tree), recipe_name(str(file)))


def recipe_name(data: str) -> str:
    """The name of a recipe, and of its run, for data: `fragen` for daten/fragen.csv.gz."""
    name = Path(data.rstrip("/").rpartition(":")[2] or "data").name
    return name.split(".")[0] or "data"


def nest_settings(settings: Sequence[Setting]) -> dict[str, Any]:
    """The settings as a recipe."""
    recipe: dict[str, Any] = {}
    for setting in settings:
        *parents, key = setting.key.split(".")
        section = recipe
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = setting.value
    return recipe


def render_recipe(settings: Sequence[Setting], heading: str) -> str:
    """The settings as YAML, each with its reason as a comment."""
    lines, opened = [f"# {heading}", ""], list[str]()
    for setting in settings:
        *parents, key = setting.key.split(".")
        shared = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(opened, parents, strict=False))
        )
        for depth in range(shared, len(parents)):
            if depth == 0 and lines[-1]:
                lines.append("")
            lines.append(f"{'  ' * depth}{parents[depth]}:")
        opened = parents
        lines += _commented(f"{'  ' * len(parents)}{key}: {dump_yaml_inline(setting.value)}", setting.reason)
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def _commented(line: str, reason: str) -> list[str]:
    """The line with its reason behind it, or above it if that is too long."""
    beside = f"{line:<44}  # {reason}"
    if not reason or len(beside) <= _LINE_LENGTH:
        return [beside if reason else line]
    indent = " " * (len(line) - len(line.lstrip()))
    return [*(f"{indent}# {part}" for part in textwrap.wrap(reason, _LINE_LENGTH - len(indent) - 2)), line]


# What the data is like.


def _summarize(source: Source, is_guessed: bool, model: str) -> DataSummary:
    reader = SourceReader(source)
    note = (reader.description or "").removeprefix(f"{source.path}: ")
    items = [reader.parse(raw) for raw in itertools.islice(reader.records(), _SAMPLED_RECORDS)]
    is_text = any(isinstance(item, PlainText) for item in items)
    good = [item for item in items if isinstance(item, (Conversation, PlainText))]
    bad = tuple(item for item in items if isinstance(item, BadRecord))
    lengths, lengths_note = _count_tokens(source, model), ""
    if lengths is None:
        lengths = [int(_characters(item) / _CHARACTERS_PER_TOKEN) + 16 for item in good]
        lengths_note = ". Estimated from characters, as the tokenizer cannot be loaded here: check it"
    total = expected_records(source)
    return DataSummary(source, is_guessed, note, total, tuple(sorted(lengths) or [1]), lengths_note, is_text, bad)


def _characters(item: Conversation | PlainText) -> int:
    if isinstance(item, PlainText):
        return len(item.text)
    return sum(len(message.content) + len(message.reasoning) + 10 for message in item.messages)


def _count_tokens(source: Source, model: str) -> list[int] | None:
    """Tokens of each sampled conversation; None where the model's tokenizer is out of reach."""
    locate_model(model)  # a wrong path is an error of its own
    sample = source.model_dump(exclude_none=True) | {"max_samples": _SAMPLED_RECORDS}
    tree = {"model": {"path": model}, "data": {"sources": [sample], "max_length": _LONGEST_CONTEXT, "on_bad": "skip"}}
    config = Config.model_validate(tree)
    try:
        store = prepare_data(config).train.store
    except WhetError as error:
        if "/" not in model or Path(model).exists():
            raise
        info(f"{model}: {first_line(error)}")
        return None
    return [int(length) for length in store.lengths]


# What follows from it.


def _source_settings(data: DataSummary) -> list[Setting]:
    source = {"path": data.source.path}
    reason = f"{data.note}; {data.conversations:,} records"
    if not data.is_guessed:
        return [Setting("data.sources", [source], reason)]
    guessed = {**source, "format": data.source.format, "fields": dict(data.source.fields or {})}
    return [Setting("data.sources", [guessed], f"guessed from the names of the columns: check them. {reason}")]


def _bad_record_settings(data: DataSummary) -> list[Setting]:
    """Only in a file that the user reads: by itself, whet stops at the first bad record."""
    if not data.bad:
        return []
    first, seen = data.bad[0], min(data.conversations, _SAMPLED_RECORDS)
    warn(
        f"{len(data.bad):,} of the first {seen:,} records cannot be read and will be skipped; the first: "
        f"{first.origin}: {first.explanation}"
    )
    reason = f"{len(data.bad):,} of the first {seen:,} records cannot be read; without this line, train stops at them"
    return [Setting("data.on_bad", "skip", reason)]


def _validation_settings(data: DataSummary) -> list[Setting]:
    total = data.conversations
    if total < 20:
        return []
    fraction = 0.1 if total < 1000 else 0.05 if total < 20_000 else round(1000 / total, 4)
    reason = (
        f"about {max(1, round(total * fraction)):,} of {total:,} are held out, to see whether it learns or memorizes"
    )
    return [Setting("data.validation", {"fraction": fraction}, reason)]


def _length_settings(data: DataSummary) -> list[Setting]:
    longest, usual = data.lengths[-1], int(np.quantile(data.lengths, 0.99))
    limit = min(_LONGEST_CONTEXT, max(64, -(-longest // 64) * 64))
    reason = f"the longest has {longest:,} tokens, 99 % have at most {usual:,}{data.lengths_note}"
    settings = [Setting("data.max_length", limit, reason)]
    if data.is_text:
        settings.append(Setting("data.too_long", "split", "longer texts become several"))
    return settings


def _adapter_settings(model: str, known: KnownModel | None, data: DataSummary) -> list[Setting]:
    if not _uses_adapter(model, known, data):
        return []
    rank = Setting("adapter.rank", 16, "LoRA: few weights to train, little memory; remove it to train every weight")
    memory, size = _device_memory(), _parameters(model, known)
    if memory is not None and size is not None and 2.2 * size > memory:
        reason = f"QLoRA: frozen weights in 4 bits, as {2 * size / _GIB:,.0f} GiB in bf16 do not fit into this GPU"
        return [rank, Setting("quantize", "nf4", reason)]
    return [rank]


def _uses_adapter(model: str, known: KnownModel | None, data: DataSummary) -> bool:
    """LoRA, unless there is much data and memory for every weight, its gradient and its optimizer state."""
    size, memory = _parameters(model, known), _device_memory() or available_memory()
    fits = size is not None and memory is not None and 18 * size < memory
    return data.conversations < 20_000 or not fits


def _training_settings(data: DataSummary, known: KnownModel | None, is_adapter: bool) -> list[Setting]:
    total = data.conversations
    epochs = 4 if total < 500 else 3 if total < 5000 else 2 if total < 50_000 else 1
    batch = 8 if total < 300 else 16 if total < 20_000 else 64
    rate = (known.lora_lr if known else 2e-4) if is_adapter else (known.full_lr if known else 2e-5)
    steps = max(1, -(-total // batch) * epochs)
    usual = "LoRA" if is_adapter else "all weights"
    found = [
        Setting(
            "train.epochs", epochs, f"{total:,} records: {'few' if epochs > 2 else 'many'}, so each is seen {epochs} ×"
        ),
        Setting("train.batch", {"conversations": batch}, f"about {steps:,} steps"),
        Setting("train.optimizer", {"lr": rate}, f"usual for {usual}; `whet search RECIPE --lr` finds yours"),
    ]
    if total >= 20 and steps >= 20:
        found.append(Setting("eval.every", max(5, steps // 8), "steps between two looks at the validation data"))
    return found


def _device_memory() -> int | None:
    """Of the first GPU; None without one."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def _parameters(model: str, known: KnownModel | None) -> int | None:
    """The number of weights; None if it cannot be known without a download."""
    if known is not None:
        return int(known.billions * 1e9)
    folder = resolve_path(Path(locate_model(model)))
    files = list(folder.glob("*.safetensors")) if folder.is_dir() else []
    config = folder / "config.json"
    if not files or not config.exists():
        return None
    dtype = json.loads(config.read_text()).get("dtype") or "bfloat16"
    return sum(file.stat().st_size for file in files) // (4 if "32" in str(dtype) else 2)
