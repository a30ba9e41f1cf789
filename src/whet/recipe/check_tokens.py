"""Checks of the tokens: are they what was written, what transformers gives, and what the template should make?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from whet.config import Config
from whet.data.config import Source
from whet.data.conversation import BadRecordError, Conversation, Message, Origin
from whet.data.language import ChatLanguage, MarkedLanguage
from whet.data.store import Store
from whet.data.verify import changed, verify
from whet.recipe.data import Data
from whet.recipe.finding import Finding

_PROBE = Conversation(
    (Message("user", "How are you today?"), Message("assistant", "Very well, thank you.")), Origin("probe", 1)
)
_LOOKED_AT = 1000


def check_store(config: Config, data: Data) -> Iterator[Finding]:
    """The ids trained on are those that transformers gives for the whole conversation, with the same mask."""
    held = config.data.validation
    yield from _one_store("training", data.train.store, config.data.sources, config, data)
    if data.validation is not None and held is not None and held.sources is not None:
        yield from _one_store("validation", data.validation, held.sources, config, data)


def _one_store(use: str, store: Store, sources: Sequence[Source], config: Config, data: Data) -> Iterator[Finding]:
    looked, damaged = changed(store)
    if damaged:
        text = (
            f"{use}: {len(damaged):,} of {looked:,} conversations are not as they were prepared, first "
            f"{', '.join(damaged[:3])}: somebody wrote into tokens.bin or loss.bin, or the disk is failing. Delete the "
            f"folder {store.folder}, and it will be made again"
        )
        yield Finding("store", "fault", text)
    else:
        yield Finding("store", "ok", f"{use}: {looked:,} conversations are on disk as they were prepared")
    found = verify(store, sources, data.language.rendering(cached=False), config.data)
    remedy = (
        f"The data or the tokenizer's library changed since they were prepared. Delete the folder {store.folder}, and "
        "it will be made again; if that does not help, please report it"
    )
    for check, places, what in (
        ("ids", found.ids_differ, "have other ids than transformers gives for them"),
        ("mask", found.loss_differs, "have another loss mask when they are rendered again"),
    ):
        if places:
            text = f"{use}: {len(places):,} of {found.compared:,} conversations {what}, first {', '.join(places[:3])}."
            yield Finding(check, "fault", f"{text} {remedy}")
    if found.compared and not found.ids_differ and not found.loss_differs:
        text = f"{use}: {found.compared:,} conversations, rendered again, have the ids that transformers gives"
        yield Finding("ids", "ok", f"{text}, and the same mask")
    elif not found.compared and found.ready:
        yield Finding("ids", "ok", f"{use}: the data came as tokens; there is no text to compare them with")
    elif not found.compared:
        text = f"{use}: no conversation was found to be rendered again and compared. All are split, or the files moved"
        yield Finding("ids", "warning", text)


def check_template(language: ChatLanguage | MarkedLanguage, data: Data | None) -> Iterator[Finding]:
    """Traps of chat templates. Where the data could be prepared, what a template cannot do was not needed."""
    if not isinstance(language, ChatLanguage):
        return
    if language.identity["today"]:
        text = f"it inserts the date: all conversations say {language.identity['today']}, and prompts will say another"
        yield Finding("template", "warning", text)
    if data is not None:
        yield from _begins_twice(data)
    rendering = language.rendering(cached=False)
    probe, end = rendering.render_items([_PROBE])[0], rendering.end_of_turn()
    remedy = "Use the template that belongs to the model, or mend it: data.template=FILE.jinja"
    if isinstance(probe, BadRecordError):
        text = f"a plain question and answer cannot be learned with it: {probe}. {remedy}"
        yield Finding("template", "fault" if data is None else "warning", text)
    elif end is None or not probe.ends:
        ends = f" with {' or '.join(rendering.stops)}" if rendering.stops else ""
        yield Finding("template", "warning", f"it does not end an answer{ends}. {remedy}")
    else:
        token = language.tokenizer.convert_ids_to_tokens(end)
        yield Finding("template", "ok", f"an answer ends with {token}, which is learned")


def _begins_twice(data: Data) -> Iterator[Finding]:
    store, tokenizer = data.train.store, data.tokenizer
    some = np.unique(np.linspace(0, len(store) - 1, _LOOKED_AT).astype(np.int64))
    twice = [i for i in some if (store.ids(i)[:2] == tokenizer.bos_token_id).sum() == 2]
    if twice and tokenizer.bos_token_id is not None:
        text = (
            f"{len(twice):,} of {len(some):,} conversations begin with {tokenizer.bos_token} twice, first "
            f"{store.origin(int(twice[0]))}: the template writes it, and so does the text or the template "
            "again. Remove one of the two"
        )
        yield Finding("template", "fault", text)
