"""The data of a run: its tokenizer, its stores and its plan.

Nothing here imports torch, and finding a store that exists loads no tokenizer.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.config import Config
from whet.core import launch_env
from whet.core.checksums import read_hashed_json
from whet.core.console import silence_libraries
from whet.core.errors import WhetError
from whet.core.files import atomic_write, hash_json, read_json, read_text, user_path
from whet.core.resources import available_memory
from whet.data.config import DataConfig, Source
from whet.data.plan.mixture import make_mixture, train_validation_split
from whet.data.plan.planner import Plan, RunLength, plan_by_conversations, plan_by_rows, typical_length
from whet.data.prepare.build import (
    PreparedStore,
    choose_shard_count,
    prepare_shard,
    prepare_store,
    require_all_shards,
)
from whet.data.prepare.store import MANIFEST, Store, StoreCheck, find_overlap
from whet.data.prepare.workers import run_while_waiting
from whet.data.render.chat_tokenizer import ChatTokenizer, ConversationTokenizer, MarkedTextTokenizer
from whet.model.load.tokenizer import load_tokenizer, sentencepiece_file, stop_ids, tokenizer_files, tokenizer_hashes
from whet.tokenizer.named_templates import NAMED_TEMPLATES, TurnMarker, TurnMarkers, set_named_template

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class RunData:
    """The stores of a run and the documents to use."""

    conversation_tokenizer: ConversationTokenizer
    train: PreparedStore
    train_documents: NDArray[np.int64]
    validation: Store | None
    validation_documents: NDArray[np.int64]

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self.conversation_tokenizer.tokenizer

    @property
    def max_document_length(self) -> int:
        """Tokens of the longest document."""
        return max(int(store.lengths.max(initial=0)) for store in self.stores().values())

    @property
    def typical_length(self) -> float:
        """The length of the document that an average token is in, from a sample."""
        some = self.train_documents[:: max(1, len(self.train_documents) // 10_000)]
        return typical_length(self.train.store.lengths[some])

    def check(self) -> StoreCheck:
        """A check of the stores, to run in the background; the first process of a machine does it for all."""
        return StoreCheck(self.stores().values() if launch_env.local_rank() == 0 else ())

    def stores(self) -> dict[str, Store]:
        """Each store once, by use: validation conversations drawn from the training data have no store of their own."""
        if self.validation is None or self.validation is self.train.store:
            return {"train": self.train.store}
        return {"train": self.train.store, "validation": self.validation}

    def store_folders(self) -> dict[str, str]:
        """The folder of the store that each use reads."""
        held = {} if self.validation is None else {"validation": str(self.validation.folder)}
        return {"train": str(self.train.store.folder), **held}

    def overlap(self) -> list[str]:
        """The origins of validation conversations that are also in the training data."""
        if self.validation is None or self.validation is self.train.store:
            return []  # duplicates stay together when one store is split
        origins = (str(self.validation.origin(int(i))) for i in find_overlap(self.validation, self.train.store))
        return list(dict.fromkeys(origins))  # the documents of a split conversation have the same

    def write_ledger_lines(self, file: Path) -> None:
        """Write every line of the sources that was dropped or changed; nothing if a store of an earlier version does
        not know them."""
        stores = self.stores()
        if all(store.ledger_lines for store in stores.values()):
            lines = (store.iter_ledger_lines(use) for use, store in stores.items())
            atomic_write(file, itertools.chain.from_iterable(lines))

    def ledger(self) -> dict[str, Any]:
        """The content of ledger.json: the outcome of all conversations, and what a resumed run needs to find them."""
        accounts = [account for store in self.stores().values() for account in store.manifest["accounts"]]
        overlap = self.overlap()
        return {
            "sources": accounts,
            "held_out": len(self.validation_documents),
            "overlap": {"conversations": len(overlap), "first": overlap[:5]},
            "stores": self.store_folders(),
            "today": self.train.store.manifest["today"],
            "speech": _tokenizer_identity(self.train.store.manifest),
        }


def prepare_data(
    config: Config, today: str | None = None, trained_on: Mapping[str, str] = MappingProxyType({}),
    while_waiting: Callable[[], None] = lambda: None,
) -> RunData:  # fmt: skip
    """Build or find the stores of a configuration. `today`: the date for templates that print one. `trained_on`: the
    folders of a resumed run's stores, by use. `while_waiting`: see `run_while_waiting`; called once nothing but the
    training data is left to be prepared."""
    folders = {use: Path(folder) for use, folder in trained_on.items()}
    tokenizer = make_conversation_tokenizer(config, today)
    sources = config.data.validation.sources if config.data.validation else None
    validation = None
    if sources is not None:  # the smaller part first: its workers could not be forked while a thread is at work
        validation = prepare_store(config.data, sources, "validation", tokenizer, folders.get("validation")).store
    with run_while_waiting(while_waiting):
        train = prepare_store(config.data, config.data.sources, "train", tokenizer, folders.get("train"))
    if sources is not None and validation is not None:
        _require_disjoint_filters(config.data.sources, train.store, sources, validation)
    return _select_documents(config, tokenizer, train, validation)


def _require_disjoint_filters(
    train: Sequence[Source], train_store: Store, held: Sequence[Source], held_store: Store
) -> None:
    """Raise a WhetError if a record of a source with a filter (`where`) is in training and in validation. What sources
    without one share is known from the configuration, which refuses it."""
    for number, source in enumerate(held):
        for other, one in enumerate(train):
            if one.identity() != source.identity() or (one.where is None and source.where is None):
                continue
            lines = train_store.lines_of_source(other)
            for file, mine in held_store.lines_of_source(number).items():
                common = np.intersect1d(mine, lines.get(file, []))
                if len(common):
                    raise WhetError(
                        f"data.validation.sources.{number}: {len(common):,} records of {source.path} are in the "
                        f"training data too, first {file}:{int(common[0])}, so validation would measure memorization. "
                        "Change where, start, stop or step so that the two share no record"
                    )


def read_ledger(file: Path) -> dict[str, Any]:
    """The ledger of a run, if it is intact: which stores it was trained on, and how their text was made."""
    remedy = "Bring it back, or start a new run: run.dir=FOLDER"
    ledger = read_hashed_json(file, remedy, stores=dict, today=(str, NoneType), speech=(dict, NoneType))
    if not all(isinstance(store, str) for store in ledger["stores"].values()):
        raise WhetError(f"{file}: damaged: `stores` does not hold paths. {remedy}")
    return ledger


def load_ledger_data(config: Config, ledger: Path) -> RunData:
    """The stores that a run was trained on, from its ledger; the source files need not exist any more.

    A missing store is built again.
    """
    known = read_ledger(ledger) if ledger.exists() else {"stores": {}, "today": None}
    folders = {use: Path(folder) for use, folder in known["stores"].items()}
    held = config.data.validation
    expected = {"train"} if held is None else {"train", "validation"}
    if set(folders) != expected or not all((folder / MANIFEST).exists() for folder in folders.values()):
        return prepare_data(config, known["today"])
    tokenizer = make_conversation_tokenizer(config, known["today"])
    train = PreparedStore(Store(folders["train"]), reused=True)
    validation = None if held is None or held.fraction is not None else Store(folders["validation"])
    return _select_documents(config, tokenizer, train, validation)


def _select_documents(
    config: Config, tokenizer: ConversationTokenizer, train: PreparedStore, validation: Store | None
) -> RunData:
    """All documents of both stores; with data.validation.fraction, a split of the training store."""
    documents = np.arange(len(train.store), dtype=np.int64)
    if validation is not None:
        return RunData(tokenizer, train, documents, validation, np.arange(len(validation), dtype=np.int64))
    if config.data.validation is None:
        return RunData(tokenizer, train, documents, None, documents[:0])
    fraction = config.data.validation.fraction or 0.0
    documents, held_out = train_validation_split(train.store.hashes, fraction, config.run.seed)
    return RunData(tokenizer, train, documents, train.store, held_out)


def require_same_tokenizer(config: Config, ledger: Path) -> None:
    """Raise a WhetError if the tokenizer or chat template has changed since the run was trained: the model would still
    answer, but worse. Generation settings may change."""
    known = read_ledger(ledger) if ledger.exists() else {}
    then = known.get("speech")
    manifest = Path(known.get("stores", {}).get("train", "")) / MANIFEST
    if then is None and manifest.is_file():  # a run from before ledgers had it
        then = _tokenizer_identity(read_json(manifest))
    now = None if then is None else _tokenizer_identity(make_conversation_tokenizer(config).identity)
    if then is None or now is None or then == now:
        return
    template = then.get("template") != now["template"]
    key = f"data.template: {config.data.template}" if template else f"model.path: {config.model.path}: its tokenizer"
    raise WhetError(
        f"{key} has changed since {config.folder} was trained, so the model would be prompted with a different "
        "tokenizer or template. Restore the old file, or start a new run: run.dir=FOLDER"
    )


def _tokenizer_identity(identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The part of a store's identity that determines how conversations are rendered; None for pretokenized data."""
    if "tokenizer" not in identity or "template" not in identity:
        return None
    tokenizer = identity["tokenizer"]
    if isinstance(tokenizer, dict):
        tokenizer = {name: digest for name, digest in tokenizer.items() if name != "generation_config.json"}
    return {"tokenizer": tokenizer, "template": identity["template"]}


def prepare_data_shard(config: Config, number: int, count: int, today: str | None = None) -> dict[str, str]:
    """Make one shard of every store of the configuration; return the folders where the stores will be."""
    tokenizer = make_conversation_tokenizer(config, today)
    return {
        use: str(prepare_shard(config.data, sources, use, tokenizer, number, count))
        for use, sources in _sources_by_use(config.data).items()
    }


def require_data_shards(config: Config, today: str | None = None) -> None:
    """Raise a WhetError if chunks of any shard are missing."""
    tokenizer = make_conversation_tokenizer(config, today)
    for use, sources in _sources_by_use(config.data).items():
        require_all_shards(config.data, sources, use, tokenizer)


def choose_data_shards(config: Config, cores: int) -> int:
    """How many jobs, each with so many cores, should prepare the data of the configuration."""
    every = [source for sources in _sources_by_use(config.data).values() for source in sources]
    return choose_shard_count(every, cores)


def _sources_by_use(data: DataConfig) -> dict[str, list[Source]]:
    held = data.validation.sources if data.validation else None
    return {"train": data.sources, **({"validation": held} if held else {})}


def make_conversation_tokenizer(config: Config, today: str | None = None) -> ConversationTokenizer:
    """The tokenizer of a configuration with its chat template or markers; not loaded unless its model is on a hub."""
    data, model = config.data, config.model

    def load() -> PreTrainedTokenizerFast:
        return load_run_tokenizer(config)

    hashes, template = tokenizer_hashes(model), _read_template(data)
    identity: dict[str, Any] = {"tokenizer": hashes, "template": template or data.template, "today": None}
    if hashes is None:  # on a hub: there are no local files to hash
        tokenizer = load()
        identity["tokenizer"] = hash_json([tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template])
        prints_date = "strftime_now" in str(tokenizer.chat_template)
    else:
        files = tokenizer_files(model) or {}
        texts = [
            path.read_bytes() for name, path in files.items() if "template" in name or name.endswith("config.json")
        ]
        prints_date = any(b"strftime_now" in text for text in [(template or "").encode(), *texts])
    if data.markers is not None:
        identity["markers"] = data.markers.model_dump()
        sentencepiece = None if model.add_tokens else sentencepiece_file(model)  # which has no added tokens
        return MarkedTextTokenizer(identity, load, sentencepiece, data.markers, data.train_on)
    if prints_date:
        identity["today"] = today or datetime.date.today().isoformat()
    return ChatTokenizer(identity, load, lambda: stop_ids(model), data.train_on)


def load_run_tokenizer(config: Config) -> PreTrainedTokenizerFast:
    """The tokenizer of a run with the chat template of data.template."""
    silence_libraries()
    tokenizer = load_tokenizer(config.model, turn_markers(config.data))
    own = _read_template(config.data)
    if own is not None:
        tokenizer.chat_template = own
    elif config.data.template in NAMED_TEMPLATES:
        set_named_template(tokenizer, config.data.template)
    elif config.data.template != "auto":
        templates = tokenizer.chat_template
        if not isinstance(templates, dict) or config.data.template not in templates:
            one = "one template, without a name" if templates else "none"
            known = ", ".join(templates) if isinstance(templates, dict) else one
            raise WhetError(
                f"data.template: {config.data.template} is neither a file nor a template of the tokenizer, which has "
                f"{known}. Use auto for the tokenizer's own, {', '.join(NAMED_TEMPLATES)}, or the path of a .jinja file"
            )
        tokenizer.chat_template = templates[config.data.template]
    return tokenizer


def _read_template(data: DataConfig) -> str | None:
    """The template if data.template is a file."""
    path = user_path(data.template)
    if data.template == "auto" or not (path.is_file() or path.suffix == ".jinja"):
        return None
    try:
        return read_text(path)
    except FileNotFoundError:
        raise WhetError(
            f"data.template: {path}: no such file (looked in {Path.cwd()}). Use auto for the tokenizer's own, or the "
            "path of a .jinja file"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise WhetError(f"data.template: {path} cannot be read: {error}") from None


def turn_markers(data: DataConfig) -> TurnMarkers | None:
    """data.markers in the form that the tokenizer takes."""
    if data.markers is None:
        return None
    named = {"user": data.markers.user, "assistant": data.markers.assistant, "system": data.markers.system}
    marks = {role: TurnMarker(marker.text, marker.id) for role, marker in named.items() if marker is not None}
    return TurnMarkers(marks, data.markers.append_eod)


_BYTES_PER_PLANNED_CONVERSATION = 48


def _require_memory_for_plan(config: Config, length: RunLength, lengths: NDArray[np.integer], epoch_size: int) -> None:
    """A plan lists every conversation of the run as often as it occurs: a run without end would fill the memory."""
    batch, tokens = config.train.batch, float(lengths.mean()) * epoch_size
    epochs = length.epochs or (length.tokens or 0) / tokens
    if length.steps is not None and batch.conversations is not None:
        epochs = length.steps * batch.conversations / epoch_size
    elif length.steps is not None:
        epochs = length.steps * (batch.tokens or (batch.rows or 0) * config.row_length) / tokens
    conversations, memory = max(1.0, epochs) * epoch_size, available_memory()
    if memory is not None and conversations * _BYTES_PER_PLANNED_CONVERSATION > memory:
        key, value = next((key, value) for key, value in asdict(length).items() if value is not None)
        raise WhetError(
            f"train.{key}: {value:,} means {conversations:,.0f} conversations; there are {len(lengths):,}. The plan "
            f"of such a run does not fit into {memory >> 30} GiB of memory. Lower train.{key}, or epochs of the sources"
        )


def make_plan(config: Config, data: RunData) -> Plan:
    """The plan of a run."""
    train = config.train
    length = RunLength(train.steps, train.epochs, train.tokens)
    if (train.steps, train.epochs, train.tokens) == (None, None, None):
        length = RunLength(epochs=1.0)
    store, numbers = data.train.store, data.train_documents
    mixture = make_mixture(numbers, store.sources[numbers], config.data.sources)
    _require_memory_for_plan(config, length, store.lengths[numbers], max(1, len(mixture)))
    common = (length, config.row_length, config.data.packing, config.data.bins, config.run.seed)
    if config.rows_per_step is None:
        plan = plan_by_conversations(store.lengths, mixture, train.batch.conversations or 0, *common)
    else:
        plan = plan_by_rows(store.lengths, mixture, config.rows_per_step, *common)
    return replace(plan, step_offset=train.step_offset)


def describe_step(config: Config, plan: Plan) -> str:
    """What a step holds: `4 rows of 512 tokens, together 1,985 tokens on average`."""
    count = config.rows_per_step or config.train.batch.conversations
    assert count is not None
    parts = "conversation" if config.rows_per_step is None else "row"
    length = "" if config.rows_per_step is None else f" of {config.row_length:,} tokens"
    mean = f"{plan.mean_step_tokens:,.0f} tokens on average"
    return f"1 {parts}{length}, {mean}" if count == 1 else f"{count} {parts}s{length}, together {mean}"
