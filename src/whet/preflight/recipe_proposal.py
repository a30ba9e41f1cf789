"""A recipe for a data file: settings derived from the data, the model and this machine, each with its reason."""

from __future__ import annotations

import itertools
import json
import math
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
from whet.core.resources import available_memory, multiplies_bf16
from whet.core.yaml import dump_yaml_inline, parse_yaml
from whet.data.config import Source
from whet.data.conversation import BadRecord, Conversation, PlainText
from whet.data.prepare.store import Store
from whet.data.prepare.tokenize import DROPPED_BY_POLICY
from whet.data.read.sources import SourceReader, expected_records, propose_source
from whet.model.load.weight_files import locate_model
from whet.preflight.conflicting_answers import find_conflicting_answers
from whet.run.data import prepare_data
from whet.run.models.model_reference import exported_model

DEFAULT_MODEL = "builtin:smollm2"
_SAMPLED_RECORDS = 2000
_LONGEST_CONTEXT = 32_768
"""The most tokens that a proposal allows for a conversation; a longer max_length is a decision of the user's."""
_MANY_DUPLICATES = 0.01
_CPU_TOKENS = 1024
"""At once. 16 conversations of 100 tokens take SmolLM2 on one core 27 s one by one and 22 s in eights in fp32, 25 s and
16 s in bf16."""
_SMALL_BILLIONS = 2
"""What is trained on a CPU. The export of a mixture of experts that a CPU trains in bf16 can differ too much."""
_CHARACTERS_PER_TOKEN = 2.0  # cautious: English has about 4
_GIB, _LINE_LENGTH = 2**30, 110


class ProposedSetting(NamedTuple):
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
    records: int
    """An estimate where only the first were read."""
    sampled: int
    """How many were read."""
    kept: int
    """Of those, the ones that can be trained on."""
    lengths: tuple[int, ...]
    """Tokens of each sampled conversation, ascending."""
    lengths_note: str
    """How they were counted, where not by the model's tokenizer."""
    is_text: bool
    bad: tuple[str, ...]
    """Place and explanation of those that cannot be used."""
    duplicates: int
    """Of those that were kept, the ones that equal an earlier one."""
    drops_duplicates: bool

    @property
    def conversations(self) -> int:
        """What is left to train on, and to hold out."""
        left = self.kept - (self.duplicates if self.drops_duplicates else 0)
        return round(self.records * left / max(1, self.sampled))

    @property
    def of_sampled(self) -> str:
        """The end of `3 of …`."""
        return f"{self.sampled:,}" if self.sampled == self.records else f"the first {self.sampled:,}"


def propose_recipe(path: str, model: str, guess: bool = True) -> list[ProposedSetting]:
    """The settings for a data file or dataset. `guess`: take columns whose names mean a question and an answer; else
    they are an error with the line to add."""
    known = find_known(model)
    model_path = known.path if known else model
    source, is_guessed = propose_source(path, guess)
    model = exported_model(model_path)  # of a run; the recipe names the run
    data = _summarize(source, is_guessed, model, guess)
    return [
        ProposedSetting("model.path", model_path, f"{known.billions:g} billion parameters" if known else ""),
        *_adapter_settings(model, known, data),
        *_source_settings(data),
        *([*_bad_record_settings(data), *_duplicate_settings(data)] if guess else []),
        *_validation_settings(data),
        *_length_settings(data),
        *_training_settings(data, known, is_adapter=_uses_adapter(model, known, data)),
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


def nest_settings(settings: Sequence[ProposedSetting]) -> dict[str, Any]:
    """The settings as a recipe."""
    recipe: dict[str, Any] = {}
    for setting in settings:
        *parents, key = setting.key.split(".")
        section = recipe
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = setting.value
    return recipe


def render_recipe(settings: Sequence[ProposedSetting], heading: str) -> str:
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


def _summarize(source: Source, is_guessed: bool, model: str, may_drop: bool) -> DataSummary:
    """`may_drop`: the recipe may drop duplicates."""
    reader = SourceReader(source)
    note = (reader.description or "").removeprefix(f"{source.path}: ")
    items = [reader.parse(raw) for raw in itertools.islice(reader.records(), _SAMPLED_RECORDS)]
    is_whole = len(items) < _SAMPLED_RECORDS
    is_text = any(isinstance(item, PlainText) for item in items)
    good = [item for item in items if isinstance(item, (Conversation, PlainText))]
    bad = [f"{item.origin}: {item.explanation}" for item in items if isinstance(item, BadRecord)]
    if bad and not good:
        raise WhetError(
            f"{source.path}: none of {'its' if is_whole else 'the first'} {len(bad):,} records can be used; the first: "
            f"{bad[0]}"
        )
    kept, duplicates, lengths_note = len(good), len(good) - len({_content(item) for item in good}), ""
    store = _prepare_sample(source, model)
    if store is None:
        lengths = [int(_characters(item) / _CHARACTERS_PER_TOKEN) + 16 for item in good]
        lengths_note = ". Estimated from characters, because the tokenizer cannot be loaded here: check it"
    else:  # count as `whet check` does: a record that can be read may still be no conversation
        [account] = store.manifest["accounts"]
        lengths, kept, duplicates = store.lengths.tolist(), account["conversations"]["kept"], account["duplicates"]
        bad = _bad_lines(store) if store.ledger_lines else bad
    if is_whole and (blank := reader.describe_blank()):
        info(f"{source.path}: {blank}")
    if conflicts := find_conflicting_answers(items):
        number = sum(map(len, conflicts))
        warn(f"{number:,} of {kept:,} conversations answer nearly the same question differently; whet check names them")
    return DataSummary(
        source, is_guessed, note, len(items) if is_whole else expected_records(source), len(items), kept,
        tuple(sorted(lengths) or [1]), lengths_note, is_text, tuple(bad), duplicates,
        may_drop and duplicates >= max(1, _MANY_DUPLICATES * len(items)),
    )  # fmt: skip


def _bad_lines(store: Store) -> list[str]:
    """Place and explanation of the records at which train would stop."""
    entries = (json.loads(line) for line in store.iter_ledger_lines("train"))
    return [
        f"{entry['file']}:{entry['line']}: {entry['detail']}"
        for entry in entries
        if entry["outcome"] == "dropped" and entry["reason"] not in DROPPED_BY_POLICY
    ]


def _content(item: Conversation | PlainText) -> str:
    return item.text if isinstance(item, PlainText) else json.dumps([message.as_dict() for message in item.messages])


def _characters(item: Conversation | PlainText) -> int:
    if isinstance(item, PlainText):
        return len(item.text)
    return sum(len(message.content) + len(message.reasoning) + 10 for message in item.messages)


def _prepare_sample(source: Source, model: str) -> Store | None:
    """The store of the first records; None where the model's tokenizer is out of reach."""
    locate_model(model)  # a wrong path is an error of its own
    sample = source.model_dump(exclude_none=True) | {"max_samples": _SAMPLED_RECORDS}
    tree = {"model": {"path": model}, "data": {"sources": [sample], "max_length": _LONGEST_CONTEXT, "on_bad": "skip"}}
    config = Config.model_validate(tree)
    try:
        return prepare_data(config).train.store
    except WhetError as error:
        if "/" not in model or Path(model).exists():
            raise
        info(f"{model}: {first_line(error)}")
        return None


# What follows from it.


def _source_settings(data: DataSummary) -> list[ProposedSetting]:
    source = {"path": data.source.path} | ({"split": data.source.split} if data.source.split else {})
    reason = f"{data.note}; {data.records:,} records"
    if not data.is_guessed:
        return [ProposedSetting("data.sources", [source], reason)]
    guessed = {**source, "format": data.source.format, "fields": dict(data.source.fields or {})}
    return [ProposedSetting("data.sources", [guessed], f"guessed from the names of the columns: check them. {reason}")]


def _bad_record_settings(data: DataSummary) -> list[ProposedSetting]:
    """Only in a file that the user reads: by itself, whet stops at the first bad record."""
    if not data.bad:
        return []
    share = f"{len(data.bad):,} of {data.of_sampled} records cannot be used"
    warn(f"{share} and will be skipped; the first: {data.bad[0]}")
    return [ProposedSetting("data.on_bad", "skip", f"{share}; without this line, train stops at them")]


def _duplicate_settings(data: DataSummary) -> list[ProposedSetting]:
    """Where `whet check` would complain."""
    if not data.drops_duplicates:
        return []
    reason = f"{data.duplicates:,} of {data.of_sampled} records equal an earlier one: drop them"
    return [ProposedSetting("data.deduplicate", True, reason)]


def _validation_settings(data: DataSummary) -> list[ProposedSetting]:
    total, fraction = data.conversations, _held_out_fraction(data)
    if not fraction:
        return []
    reason = (
        f"about {max(1, round(total * fraction)):,} of {total:,} are held out, to see whether it learns or memorizes"
    )
    return [ProposedSetting("data.validation", {"fraction": fraction}, reason)]


def _held_out_fraction(data: DataSummary) -> float:
    total = data.conversations
    return 0.0 if total < 20 else 0.1 if total < 1000 else 0.05 if total < 20_000 else round(1000 / total, 4)


def _length_settings(data: DataSummary) -> list[ProposedSetting]:
    longest, usual = data.lengths[-1], int(np.quantile(data.lengths, 0.99))
    reason = f"the longest has {longest:,} tokens, 99 % have at most {usual:,}{data.lengths_note}"
    settings = [ProposedSetting("data.max_length", _max_length(data), reason)]
    if data.is_text:
        settings.append(ProposedSetting("data.too_long", "split", "longer texts become several"))
    return settings


def _max_length(data: DataSummary) -> int:
    return min(_LONGEST_CONTEXT, max(64, -(-data.lengths[-1] // 64) * 64))


def _adapter_settings(model: str, known: KnownModel | None, data: DataSummary) -> list[ProposedSetting]:
    if not _uses_adapter(model, known, data):
        return []
    rank = ProposedSetting(
        "adapter.rank", 16, "LoRA: few weights to train, little memory; remove it to train every weight"
    )
    memory, size = _device_memory(), _parameters(model, known)
    if memory is not None and size is not None and 2.2 * size > memory:
        reason = f"QLoRA: frozen weights in 4 bits, because {2 * size / _GIB:,.0f} GiB in bf16 do not fit into this GPU"
        return [rank, ProposedSetting("quantize", "nf4", reason)]
    return [rank]


def _uses_adapter(model: str, known: KnownModel | None, data: DataSummary) -> bool:
    """LoRA, unless there is much data and memory for every weight, its gradient and its optimizer state."""
    size, memory = _parameters(model, known), _device_memory() or available_memory()
    fits = size is not None and memory is not None and 18 * size < memory
    return data.conversations < 20_000 or not fits


def _training_settings(data: DataSummary, known: KnownModel | None, is_adapter: bool) -> list[ProposedSetting]:
    total = data.conversations
    epochs = 4 if total < 500 else 3 if total < 5000 else 2 if total < 50_000 else 1
    batch = 8 if total < 300 else 16 if total < 20_000 else 64
    rate = (known.lora_lr if known else 2e-4) if is_adapter else (known.full_lr if known else 2e-5)
    trained_on = total - round(total * _held_out_fraction(data))
    steps = max(1, math.ceil(trained_on * epochs / batch))
    usual = "LoRA" if is_adapter else "all weights"
    found = [
        ProposedSetting(
            "train.epochs",
            epochs,
            f"{total:,} conversations: {'few' if epochs > 2 else 'many'}, each seen {epochs} ×",
        ),
        ProposedSetting("train.batch", {"conversations": batch}, f"about {steps:,} steps"),
        ProposedSetting("train.optimizer", {"lr": rate}, f"usual for {usual}; `whet search RECIPE --lr` finds yours"),
    ]
    if _device_memory() is None and _max_length(data) <= _CPU_TOKENS // 2:
        rows = _CPU_TOKENS // _max_length(data)
        found.append(ProposedSetting("train.micro_rows", rows, "a CPU is faster with several short rows at once"))
    is_small = known is not None and known.billions <= _SMALL_BILLIONS
    if is_small and _device_memory() is None and multiplies_bf16():
        found.append(ProposedSetting("train.precision", "bf16", "this CPU has instructions for it: faster than fp32"))
    if total >= 20 and steps >= 20:
        found.append(
            ProposedSetting("eval.every", max(5, steps // 8), "steps between two evaluations on the validation data")
        )
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


# Common models by a short name, for `whet init --model NAME`: where they are, how large, and what suits them.


class KnownModel(NamedTuple):
    """A model that people fine-tune often."""

    name: str
    path: str
    """model.path: a hub id, or a built-in model."""
    billions: float
    """Of parameters."""
    architecture: str
    """model_type in config.json."""
    experts: bool = False
    lora_lr: float = 2e-4
    full_lr: float = 2e-5


KNOWN_MODELS = (
    KnownModel("smollm2-135m", "builtin:smollm2", 0.135, "llama", lora_lr=1e-3, full_lr=1e-4),
    KnownModel("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", 1.7, "llama"),
    KnownModel("smollm3-3b", "HuggingFaceTB/SmolLM3-3B", 3.1, "smollm3"),
    KnownModel("llama-3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", 1.2, "llama"),
    KnownModel("llama-3.2-3b", "meta-llama/Llama-3.2-3B-Instruct", 3.2, "llama"),
    KnownModel("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", 8.0, "llama", full_lr=1e-5),
    KnownModel("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", 70.6, "llama", lora_lr=1e-4, full_lr=5e-6),
    KnownModel("qwen3-0.6b", "Qwen/Qwen3-0.6B", 0.6, "qwen3"),
    KnownModel("qwen3-4b", "Qwen/Qwen3-4B-Instruct-2507", 4.0, "qwen3"),
    KnownModel("qwen3-8b", "Qwen/Qwen3-8B", 8.2, "qwen3", full_lr=1e-5),
    KnownModel("qwen3-32b", "Qwen/Qwen3-32B", 32.8, "qwen3", lora_lr=1e-4, full_lr=5e-6),
    KnownModel("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B-Instruct-2507", 30.5, "qwen3_moe", experts=True, lora_lr=1e-4),
    KnownModel("gemma-3-1b", "google/gemma-3-1b-it", 1.0, "gemma3_text"),
    KnownModel("gemma-3-4b", "google/gemma-3-4b-it", 4.3, "gemma3"),
    KnownModel("gemma-3-12b", "google/gemma-3-12b-it", 12.2, "gemma3", lora_lr=1e-4, full_lr=1e-5),
    KnownModel("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3", 7.2, "mistral", lora_lr=1e-4, full_lr=5e-6),
    KnownModel("mistral-small-24b", "mistralai/Mistral-Small-24B-Instruct-2501", 23.6, "mistral", lora_lr=1e-4),
    KnownModel("phi-4", "microsoft/phi-4", 14.7, "phi3", lora_lr=1e-4, full_lr=1e-5),
    KnownModel("phi-4-mini", "microsoft/Phi-4-mini-instruct", 3.8, "phi3"),
    KnownModel("gpt-oss-20b", "openai/gpt-oss-20b", 20.9, "gpt_oss", experts=True, lora_lr=1e-4),
)


def find_known(model: str) -> KnownModel | None:
    """The model by its short name or path."""
    return next((each for each in KNOWN_MODELS if model.lower() == each.name or model == each.path), None)
