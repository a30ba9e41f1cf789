"""The data of a run: its tokenizer, its stores and its plan. Nothing here imports torch."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.config import Config
from whet.core.console import silence_libraries
from whet.core.errors import WhetError
from whet.core.files import hash_json, read_json
from whet.data.config import DataConfig, Source
from whet.data.plan.mixture import make_mixture, train_validation_split
from whet.data.plan.planner import Plan, RunLength, plan_by_conversations, plan_by_rows
from whet.data.prepare.build import PreparedStore, prepare_shard, prepare_store, require_all_shards
from whet.data.prepare.store import MANIFEST, Store, find_overlap
from whet.data.render.chat_tokenizer import ChatTokenizer, MarkedTextTokenizer
from whet.model.load.tokenizer import load_tokenizer, sentencepiece_file, stop_ids, tokenizer_files, tokenizer_hashes
from whet.tokenizer.turn_markers import TurnMarker, TurnMarkers

# The data of a run: its stores, made or found. Nothing here needs torch; a store that exists needs no tokenizer.

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class RunData:
    """The stores of a run, and which of their documents are used."""

    conversation_tokenizer: ChatTokenizer | MarkedTextTokenizer
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
        stores = [self.train.store, *([] if self.validation is None else [self.validation])]
        return max(int(store.lengths.max(initial=0)) for store in stores)

    @property
    def typical_length(self) -> float:
        """Tokens of the document in which the typical token stands, as far as some documents tell."""
        some = self.train_documents[:: max(1, len(self.train_documents) // 10_000)]
        lengths = self.train.store.lengths[some].astype(np.float64)
        return float((lengths**2).sum() / max(1.0, lengths.sum()))

    def stores(self) -> dict[str, str]:
        """Where the documents are, by use."""
        held = {} if self.validation is None else {"validation": str(self.validation.folder)}
        return {"train": str(self.train.store.folder), **held}

    def overlap(self) -> list[str]:
        """Where validation conversations stand that are in the training data too."""
        if self.validation is None or self.validation is self.train.store:
            return []  # what is held out of one store takes its copies with it
        places = (str(self.validation.origin(int(i))) for i in find_overlap(self.validation, self.train.store))
        return list(dict.fromkeys(places))  # pieces of one conversation have the same

    def ledger(self) -> dict[str, Any]:
        """What became of every conversation, and what a resumed run needs to find the same ones."""
        accounts = list(self.train.store.manifest["accounts"])
        if self.validation is not None and self.validation is not self.train.store:
            accounts += self.validation.manifest["accounts"]
        copies = self.overlap()
        return {
            "sources": accounts,
            "held_out": len(self.validation_documents),
            "overlap": {"conversations": len(copies), "first": copies[:5]},
            "stores": self.stores(),
            "today": self.train.store.manifest["today"],
            "speech": _tokenizer_identity(self.train.store.manifest),
        }


def prepare_data(config: Config, today: str | None = None) -> RunData:
    """The stores that the configuration asks for, made or found. `today` is for templates that insert the date."""
    conversation_tokenizer = make_conversation_tokenizer(config, today)
    made = prepare_store(config.data, config.data.sources, "train", conversation_tokenizer)
    everything = np.arange(len(made.store), dtype=np.int64)
    wanted = config.data.validation
    if wanted is None:
        return RunData(conversation_tokenizer, made, everything, None, everything[:0])
    if wanted.sources is not None:
        held = prepare_store(config.data, wanted.sources, "validation", conversation_tokenizer).store
        return RunData(conversation_tokenizer, made, everything, held, np.arange(len(held), dtype=np.int64))
    return _split_validation(conversation_tokenizer, made, wanted.fraction or 0.0, config.run.seed)


def load_recorded_data(config: Config, ledger: Path) -> RunData:
    """The stores that a run was trained on, as its ledger names them: the files they came from may be gone by now.

    Where a store is gone, it is made again.
    """
    known = read_json(ledger) if ledger.exists() else {"stores": {}, "today": None}
    folders = {use: Path(folder) for use, folder in known["stores"].items()}
    held = config.data.validation
    wanted = {"train"} if held is None else {"train", "validation"}
    if set(folders) != wanted or not all((folder / MANIFEST).exists() for folder in folders.values()):
        return prepare_data(config, known["today"])
    conversation_tokenizer, train = make_conversation_tokenizer(config, known["today"]), Store(folders["train"])
    everything = np.arange(len(train), dtype=np.int64)
    if held is None:
        return RunData(conversation_tokenizer, PreparedStore(train, reused=True), everything, None, everything[:0])
    if held.fraction is not None:
        return _split_validation(
            conversation_tokenizer, PreparedStore(train, reused=True), held.fraction, config.run.seed
        )
    validation = Store(folders["validation"])
    numbers = np.arange(len(validation), dtype=np.int64)
    return RunData(conversation_tokenizer, PreparedStore(train, reused=True), everything, validation, numbers)


def require_same_tokenizer(config: Config, ledger: Path) -> None:
    """Refuse a run whose tokenizer or chat template was changed since: asked or shipped with others than it was trained
    with, a model answers, and worse. Settings for generating may change."""
    known = read_json(ledger) if ledger.exists() else {}
    then = known.get("speech")
    manifest = Path(known.get("stores", {}).get("train", "")) / MANIFEST
    if then is None and manifest.is_file():  # of a run before the ledger kept it
        then = _tokenizer_identity(read_json(manifest))
    now = None if then is None else _tokenizer_identity(make_conversation_tokenizer(config).identity)
    if then is None or now is None or then == now:
        return
    template = then["template"] != now["template"]
    key = f"data.template: {config.data.template}" if template else f"model.path: {config.model.path}: its tokenizer"
    raise WhetError(
        f"{key} is not what {config.folder} was trained with (the file was changed since), so the model would be "
        "spoken to in another way. Bring the old file back, or start a new run: run.dir=FOLDER"
    )


def _tokenizer_identity(identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """What of a store's identity decides how conversations are written; None of a store that came as tokens."""
    if "tokenizer" not in identity or "template" not in identity:
        return None
    tokenizer = identity["tokenizer"]
    if isinstance(tokenizer, dict):
        tokenizer = {name: digest for name, digest in tokenizer.items() if name != "generation_config.json"}
    return {"tokenizer": tokenizer, "template": identity["template"]}


def _split_validation(
    conversation_tokenizer: ChatTokenizer | MarkedTextTokenizer, made: PreparedStore, fraction: float, seed: int
) -> RunData:
    train, held_out = train_validation_split(made.store.hashes, fraction, seed)
    return RunData(conversation_tokenizer, made, train, made.store, held_out)


def prepare_data_shard(config: Config, number: int, count: int) -> dict[str, str]:
    """This machine's chunks of every store that the configuration asks for; where each will be."""
    conversation_tokenizer = make_conversation_tokenizer(config)
    return {
        use: str(prepare_shard(config.data, sources, use, conversation_tokenizer, number, count))
        for use, sources in _sources_by_use(config.data).items()
    }


def require_data_shards(config: Config) -> None:
    """A WhetError if another machine's chunks are still missing."""
    conversation_tokenizer = make_conversation_tokenizer(config)
    for use, sources in _sources_by_use(config.data).items():
        require_all_shards(config.data, sources, use, conversation_tokenizer)


def _sources_by_use(data: DataConfig) -> dict[str, list[Source]]:
    held = data.validation.sources if data.validation else None
    return {"train": data.sources, **({"validation": held} if held else {})}


def make_conversation_tokenizer(config: Config, today: str | None = None) -> ChatTokenizer | MarkedTextTokenizer:
    """What turns this configuration's conversations into tokens."""
    data, model = config.data, config.model
    load = _tokenizer_loader(config)
    hashes, template = tokenizer_hashes(model), _read_template(data)
    identity: dict[str, Any] = {"tokenizer": hashes, "template": template or data.template, "today": None}
    if hashes is None:  # on a hub: only the tokenizer itself can tell
        tokenizer = load()
        identity["tokenizer"] = hash_json([tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template])
        asks_for_date = "strftime_now" in str(tokenizer.chat_template)
    else:
        files = tokenizer_files(model) or {}
        texts = [
            path.read_bytes() for name, path in files.items() if "template" in name or name.endswith("config.json")
        ]
        asks_for_date = any(b"strftime_now" in text for text in [(template or "").encode(), *texts])
    if data.markers is not None:
        identity["markers"] = data.markers.model_dump()
        pieces = None if model.add_tokens else sentencepiece_file(model)  # such a file knows no tokens but its own
        return MarkedTextTokenizer(identity, load, pieces, data.markers, data.train_on)
    if asks_for_date:
        identity["today"] = today or datetime.date.today().isoformat()
    return ChatTokenizer(identity, load, lambda: stop_ids(model), data.train_on)


def _tokenizer_loader(config: Config) -> Callable[[], PreTrainedTokenizerFast]:
    def load() -> PreTrainedTokenizerFast:
        return load_run_tokenizer(config)

    return load


def load_run_tokenizer(config: Config) -> PreTrainedTokenizerFast:
    """The tokenizer of a run, with the chat template that its data asks for."""
    silence_libraries()
    tokenizer = load_tokenizer(config.model, turn_markers(config.data))
    own = _read_template(config.data)
    if own is not None:
        tokenizer.chat_template = own
    elif config.data.template != "auto":
        templates = tokenizer.chat_template
        if not isinstance(templates, dict) or config.data.template not in templates:
            known = ", ".join(templates) if isinstance(templates, dict) else "one template without a name"
            raise WhetError(
                f"data.template: there is no file and no template called {config.data.template}; the tokenizer has "
                f"{known}. Write auto for the tokenizer's own, or the path of a .jinja file"
            )
        tokenizer.chat_template = templates[config.data.template]
    return tokenizer


def _read_template(data: DataConfig) -> str | None:
    """The text of the template that data.template names as a file."""
    path = Path(data.template).expanduser()
    if data.template == "auto" or not (path.is_file() or path.suffix == ".jinja"):
        return None
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise WhetError(f"data.template: {path} cannot be read: {error}") from None


def turn_markers(data: DataConfig) -> TurnMarkers | None:
    """The markers of data.markers as the tokenizer needs them."""
    if data.markers is None:
        return None
    named = {"user": data.markers.user, "assistant": data.markers.assistant, "system": data.markers.system}
    marks = {role: TurnMarker(marker.text, marker.id) for role, marker in named.items() if marker is not None}
    return TurnMarkers(marks, data.markers.append_eod)


# The plan of a run, from its configuration.


def make_plan(config: Config, data: RunData) -> Plan:
    """Which conversations make which step."""
    train = config.train
    length = RunLength(train.steps, train.epochs, train.tokens)
    if (train.steps, train.epochs, train.tokens) == (None, None, None):
        length = RunLength(epochs=1.0)
    store, numbers = data.train.store, data.train_documents
    mixture = make_mixture(numbers, store.sources[numbers], config.data.sources)
    common = (length, config.row_length, config.data.packing, config.data.bins, config.run.seed)
    if train.batch.conversations is not None:
        return plan_by_conversations(store.lengths, mixture, train.batch.conversations, *common)
    rows = train.batch.rows or (train.batch.tokens or 0) // config.row_length
    return plan_by_rows(store.lengths, mixture, rows, *common)
