"""Sources → store. Content-addressed: the same files, tokenizer, template and options give the same store, once."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.core.console import progress
from whet.core.errors import WhetError, disk_error
from whet.core.files import atomic_dir, cache_dir, hash_json, need_space, waiting_lock
from whet.data.config import DataConfig, Source
from whet.data.conversation import BadLine, BadRecordError, Conversation, Origin
from whet.data.ledger import Account
from whet.data.render import Layout, Rendered, Renderer
from whet.data.sources import expected, fingerprint, read_source, size_of
from whet.data.store import MANIFEST, Store, StoreWriter, count_targets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FORMAT = 1  # raise it when the same inputs would give other tokens, masks or files
_BATCH = 256  # conversations encoded at a time; the tokenizer uses all cores within a batch


@dataclass(frozen=True, slots=True)
class Prepared:
    """A store and whether it was there already."""

    store: Store
    reused: bool


def prepare(
    config: DataConfig, sources: Sequence[Source], use: str, tokenizer: PreTrainedTokenizerFast,
    stop_ids: Sequence[int] = (), today: str | None = None,
) -> Prepared:  # fmt: skip
    """The store for `sources`, made if it does not exist. `use` is train or validation, for the ledger."""
    renderer = Renderer(tokenizer, config.train_on, stop_ids, today)
    folder = cache_dir() / "stores"
    try:
        folder /= hash_json(_identity(config, sources, renderer))[:20]
        reused = (folder / MANIFEST).exists()
        if not reused:
            with waiting_lock(folder.with_suffix(".lock")):
                reused = (folder / MANIFEST).exists()
                if not reused:
                    _make(folder, config, sources, use, renderer)
    except Exception as error:
        raise disk_error(error, "preparing the data", folder) or error from None
    store = Store(folder)
    _use_current_names(store, sources, use)
    return Prepared(store, reused)


def _use_current_names(store: Store, sources: Sequence[Source], use: str) -> None:
    """A store is found by content; the files may have been called otherwise when it was made."""
    store.manifest["sources"] = [source.path for source in sources]
    for account, source in zip(store.manifest["accounts"], sources, strict=True):
        account |= {"source": source.path, "use": use}
        if not source.path.startswith("builtin:"):
            account["first"] = {
                reason: [f"{source.path}:{place.rpartition(':')[2]}" for place in places]
                for reason, places in account["first"].items()
            }


def _make(folder: Path, config: DataConfig, sources: Sequence[Source], use: str, renderer: Renderer) -> None:
    need_space(folder, 2 * sum(size_of(source) for source in sources) + 2**20, "the prepared data")
    with atomic_dir(folder) as temporary:
        _fill(temporary, config, sources, use, renderer)


def _identity(config: DataConfig, sources: Sequence[Source], renderer: Renderer) -> dict[str, Any]:
    options = config.model_dump(include={"train_on", "max_length", "too_long", "on_bad"})
    return {
        "format": _FORMAT,
        "sources": [fingerprint(source) for source in sources],
        "tokenizer": renderer.tokenizer.backend_tokenizer.to_str(),
        "template": renderer.template,
        "stops": renderer.stops,
        "today": renderer.today,
        **options,
    }


def _fill(folder: Path, config: DataConfig, sources: Sequence[Source], use: str, renderer: Renderer) -> None:
    accounts = [Account(source.path, use) for source in sources]
    with contextlib.closing(StoreWriter(folder, len(renderer.tokenizer))) as writer:
        for number, (source, account) in enumerate(zip(sources, accounts, strict=True)):
            with progress(f"preparing {source.path}", expected(source)) as bar:
                for batch in _batches(read_source(source)):
                    account.read += len(batch)
                    for origin, result in _render(batch, renderer):
                        document = _settle(result, origin, config, account)
                        if document is not None:
                            writer.add(document, number, origin.line)
                    bar.advance(len(batch), f"{account.tokens:,} tokens")
        _require_something(accounts)
        writer.finish(
            {
                "format": _FORMAT,
                "sources": [source.path for source in sources],
                "accounts": [account.as_dict() for account in accounts],
                "today": renderer.today,
            }
        )


def _batches(items: Iterator[Conversation | BadLine]) -> Iterator[list[Conversation | BadLine]]:
    while batch := list(itertools.islice(items, _BATCH)):
        yield batch


def _render(
    batch: Sequence[Conversation | BadLine], renderer: Renderer
) -> Iterator[tuple[Origin, Rendered | BadRecordError]]:
    """Each item with its tokens or its reason, in order; the texts are encoded together."""
    laid: list[Layout | BadRecordError] = []
    for item in batch:
        if isinstance(item, BadLine):
            laid.append(BadRecordError(item.reason, item.explanation))
            continue
        try:
            laid.append(renderer.layout(item))
        except BadRecordError as error:
            laid.append(error)
    encoded = iter(renderer.render([layout for layout in laid if isinstance(layout, Layout)]))
    for item, layout in zip(batch, laid, strict=True):
        yield item.origin, next(encoded) if isinstance(layout, Layout) else layout


def _settle(result: Rendered | BadRecordError, origin: Origin, config: DataConfig, account: Account) -> Rendered | None:
    """The document to store, if it is to be; the ledger knows in any case."""
    if isinstance(result, BadRecordError):
        if config.on_bad == "error":
            raise WhetError(
                f"{origin}: {result}. Mend the line, or leave such lines out and count them: data.on_bad=skip"
            )
        account.drop(result.reason, origin)
        return None
    if len(result.ids) > config.max_length:
        if config.too_long == "error":
            raise WhetError(
                f"{origin}: {len(result.ids)} tokens, over data.max_length = {config.max_length}. "
                "Raise it, or choose data.too_long=drop or truncate"
            )
        if config.too_long == "drop":
            account.drop("too long", origin)
            return None
        account.truncate(origin)
        n = config.max_length  # a prefix as it is: no invented end of turn
        result = Rendered(result.ids[:n], result.loss[:n], ends=False)
    targets = count_targets(result)
    if targets == 0:
        account.drop("nothing to learn", origin)
        return None
    account.keep(len(result.ids), targets, result.ends)
    return result


def _require_something(accounts: Sequence[Account]) -> None:
    if any(account.kept for account in accounts):
        return
    reasons = "; ".join(
        f"{account.source}: "
        + (", ".join(f"{n} {reason}" for reason, n in account.reasons.items()) or "no conversation in it")
        for account in accounts
    )
    raise WhetError(f"no conversation is left to train on ({reasons}). Raise data.max_length or mend the data")
