"""The data of a run: its stores, made or found. Nothing here needs torch; a store that exists needs no tokenizer."""

from __future__ import annotations

import datetime
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.config import Config
from whet.core.errors import WhetError
from whet.core.files import hash_json, read_json
from whet.data.config import DataConfig, Source
from whet.data.language import ChatLanguage, MarkedLanguage
from whet.data.prepare import Prepared, prepare, prepare_shard, require_all_shards
from whet.data.split import split_off
from whet.data.store import MANIFEST, Store, overlap
from whet.model.tokenizer import load_tokenizer, sentencepiece_file, stop_ids, tokenizer_files, tokenizer_hashes
from whet.model.turns import Mark, Turns

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Data:
    """The stores of a run, and which of their documents are used."""

    language: ChatLanguage | MarkedLanguage
    train: Prepared
    train_documents: NDArray[np.int64]
    validation: Store | None
    validation_documents: NDArray[np.int64]

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self.language.tokenizer

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        stores = [self.train.store, *([] if self.validation is None else [self.validation])]
        return max(int(store.lengths.max(initial=0)) for store in stores)

    @property
    def typical(self) -> float:
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
        places = (str(self.validation.origin(int(i))) for i in overlap(self.validation, self.train.store))
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
            "speech": _speech(self.train.store.manifest),
        }


def prepare_data(config: Config, today: str | None = None) -> Data:
    """The stores that the configuration asks for, made or found. `today` is for templates that insert the date."""
    language = language_of(config, today)
    made = prepare(config.data, config.data.sources, "train", language)
    everything = np.arange(len(made.store), dtype=np.int64)
    wanted = config.data.validation
    if wanted is None:
        return Data(language, made, everything, None, everything[:0])
    if wanted.sources is not None:
        held = prepare(config.data, wanted.sources, "validation", language).store
        return Data(language, made, everything, held, np.arange(len(held), dtype=np.int64))
    return _held_out(language, made, wanted.fraction or 0.0, config.run.seed)


def recorded_data(config: Config, ledger: Path) -> Data:
    """The stores that a run was trained on, as its ledger names them: the files they came from may be gone by now.

    Where a store is gone, it is made again.
    """
    known = read_json(ledger) if ledger.exists() else {"stores": {}, "today": None}
    folders = {use: Path(folder) for use, folder in known["stores"].items()}
    held = config.data.validation
    wanted = {"train"} if held is None else {"train", "validation"}
    if set(folders) != wanted or not all((folder / MANIFEST).exists() for folder in folders.values()):
        return prepare_data(config, known["today"])
    language, train = language_of(config, known["today"]), Store(folders["train"])
    everything = np.arange(len(train), dtype=np.int64)
    if held is None:
        return Data(language, Prepared(train, reused=True), everything, None, everything[:0])
    if held.fraction is not None:
        return _held_out(language, Prepared(train, reused=True), held.fraction, config.run.seed)
    validation = Store(folders["validation"])
    numbers = np.arange(len(validation), dtype=np.int64)
    return Data(language, Prepared(train, reused=True), everything, validation, numbers)


def require_speech(config: Config, ledger: Path) -> None:
    """Refuse a run whose tokenizer or chat template was changed since: asked or shipped with others than it was trained
    with, a model answers, and worse. Settings for generating may change."""
    known = read_json(ledger) if ledger.exists() else {}
    then = known.get("speech")
    manifest = Path(known.get("stores", {}).get("train", "")) / MANIFEST
    if then is None and manifest.is_file():  # of a run before the ledger kept it
        then = _speech(read_json(manifest))
    now = None if then is None else _speech(language_of(config).identity)
    if then is None or now is None or then == now:
        return
    template = then["template"] != now["template"]
    key = f"data.template: {config.data.template}" if template else f"model.path: {config.model.path}: its tokenizer"
    raise WhetError(
        f"{key} is not what {config.folder} was trained with (the file was changed since), so the model would be "
        "spoken to in another way. Bring the old file back, or start a new run: run.dir=FOLDER"
    )


def _speech(identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """What of a store's identity decides how conversations are written; None of a store that came as tokens."""
    if "tokenizer" not in identity or "template" not in identity:
        return None
    tokenizer = identity["tokenizer"]
    if isinstance(tokenizer, dict):
        tokenizer = {name: digest for name, digest in tokenizer.items() if name != "generation_config.json"}
    return {"tokenizer": tokenizer, "template": identity["template"]}


def _held_out(language: ChatLanguage | MarkedLanguage, made: Prepared, fraction: float, seed: int) -> Data:
    train, held_out = split_off(made.store.hashes, fraction, seed)
    return Data(language, made, train, made.store, held_out)


def prepare_part(config: Config, number: int, count: int) -> dict[str, str]:
    """This machine's chunks of every store that the configuration asks for; where each will be."""
    language = language_of(config)
    return {
        use: str(prepare_shard(config.data, sources, use, language, number, count))
        for use, sources in _wanted(config.data).items()
    }


def require_parts(config: Config) -> None:
    """A WhetError if another machine's chunks are still missing."""
    language = language_of(config)
    for use, sources in _wanted(config.data).items():
        require_all_shards(config.data, sources, use, language)


def _wanted(data: DataConfig) -> dict[str, list[Source]]:
    held = data.validation.sources if data.validation else None
    return {"train": data.sources, **({"validation": held} if held else {})}


def language_of(config: Config, today: str | None = None) -> ChatLanguage | MarkedLanguage:
    """What turns this configuration's conversations into tokens."""
    data, model = config.data, config.model
    load = _loader(config)
    hashes, template = tokenizer_hashes(model), _template_file(data)
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
        return MarkedLanguage(identity, load, pieces, data.markers, data.train_on)
    if asks_for_date:
        identity["today"] = today or datetime.date.today().isoformat()
    return ChatLanguage(identity, load, lambda: stop_ids(model), data.train_on)


def _loader(config: Config) -> Callable[[], PreTrainedTokenizerFast]:
    def load() -> PreTrainedTokenizerFast:
        return tokenizer_of(config)

    return load


def tokenizer_of(config: Config) -> PreTrainedTokenizerFast:
    """The tokenizer of a run, with the chat template that its data asks for."""
    hush_libraries()
    tokenizer = load_tokenizer(config.model, turns_of(config.data))
    own = _template_file(config.data)
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


def _template_file(data: DataConfig) -> str | None:
    """The text of the template that data.template names as a file."""
    path = Path(data.template).expanduser()
    if data.template == "auto" or not (path.is_file() or path.suffix == ".jinja"):
        return None
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise WhetError(f"data.template: {path} cannot be read: {error}") from None


def turns_of(data: DataConfig) -> Turns | None:
    """The markers of data.markers as the tokenizer needs them."""
    if data.markers is None:
        return None
    named = {"user": data.markers.user, "assistant": data.markers.assistant, "system": data.markers.system}
    marks = {role: Mark(marker.text, marker.id) for role, marker in named.items() if marker is not None}
    return Turns(marks, data.markers.append_eod)


def hush_libraries() -> None:
    """Progress bars and advice of the libraries below would drown what whet has to say."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in ("torch.distributed", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch|transformers|peft")
