"""Build the store of some sources, or find it: content-addressed, in chunks, resumable, on one or many machines."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from whet.core.console import info, progress
from whet.core.errors import WhetError, disk_error
from whet.core.files import atomic_dir, cache_dir, file_lock, hash_json, require_disk_space
from whet.data.config import DataConfig, Source
from whet.data.prepare.chunk import Chunk, merge_chunks
from whet.data.prepare.store import MANIFEST, Store
from whet.data.prepare.tokenize import ItemRenderer, tokenize_records
from whet.data.prepare.workers import WorkerPool, WorkItemError, WorkQueue, notify_waiting
from whet.data.read.container import RawRecord
from whet.data.read.locate import locate_containers
from whet.data.read.sources import SourceReader, expected_records, source_bytes, source_fingerprint
from whet.data.render.renderer import LayoutMismatchError

# Making the chunks of a preparation, on all cores.

if TYPE_CHECKING:
    pass

_SMALL_CHUNK, _LARGE_CHUNK = 256, 1024  # records of a chunk; large ones where there is much data, to have fewer files
_LARGE_DATA_BYTES = 2**28
_NO_RENDER_CACHE = "uneven"


@dataclass(frozen=True, slots=True)
class PrepareJob:
    """What is to be done, the same for every process and machine that takes part."""

    folder: Path
    config: DataConfig
    readers: Sequence[SourceReader]
    size: int
    tokenizer: ConversationTokenizer

    @property
    def records(self) -> int:
        """Records of a chunk."""
        return _LARGE_CHUNK if self.size > _LARGE_DATA_BYTES else _SMALL_CHUNK

    @property
    def uses_render_cache(self) -> bool:
        """Whether skeletons may be used; not if the template was found to treat one shape in several ways."""
        return not (self.folder / _NO_RENDER_CACHE).exists()

    def disable_render_cache(self) -> None:
        """From now on every conversation is rendered by itself; chunks that were made otherwise do not count."""
        (self.folder / _NO_RENDER_CACHE).touch()

    def file(self, number: int, cached: bool | None = None) -> Path:
        """Of a chunk; those that were made with skeletons and those without have names of their own."""
        cached = self.uses_render_cache if cached is None else cached
        return self.folder / f"{number:08d}{'' if cached else '-full'}.npz"

    def missing(self) -> tuple[list[int], int]:
        """Numbers of chunks that are not made yet, and how many there are in all."""
        total = sum(1 for _ in self.chunks())
        return [number for number in range(total) if not self.file(number).exists()], total

    def chunks(self) -> Iterator[tuple[int, int, list[RawRecord]]]:
        """(number, source, records) of all chunks, in order; nothing is parsed."""
        numbers = itertools.count()
        for source, reader in enumerate(self.readers):
            records = reader.records()
            while batch := list(itertools.islice(records, self.records)):
                yield next(numbers), source, batch


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What every process works with."""

    rendering: ItemRenderer
    vocabulary: int
    cached: bool


def make_chunks(job: PrepareJob, first: int, step: int) -> int:
    """Make the chunks first, first + step, …, but for those that are there; returns how many there are in all."""
    total = sum(expected_records(reader.source) for reader in job.readers)
    cached = job.uses_render_cache  # another machine may change it at any time
    kit = WorkerContext(job.tokenizer.make_renderer(cached), job.tokenizer.vocabulary_size(), cached)
    workers = max(1, min(len(os.sched_getaffinity(0)), -(-total // (step * job.records))))
    share = WorkQueue(first, step, workers)
    began, seen = time.monotonic(), 0

    def work(worker: int, share: WorkQueue) -> None:
        _run_worker(job, kit, worker, share, (lambda: None) if share.is_shared else tell)

    def tell() -> None:
        nonlocal seen
        done, tokens = sum(share.done), sum(share.tokens)
        if done > seen:
            bar.advance(done - seen, f"{tokens:,} tokens, {tokens / (time.monotonic() - began):,.0f}/s")
            seen = done

    team = WorkerPool(work, workers, share) if share.is_shared else None
    with progress("preparing", total // step) as bar:
        if team is not None:
            team.wait(tell)
        else:
            try:
                work(0, share)
            except WorkItemError as failure:
                raise failure.error from None
    return share.last + 1


def _run_worker(job: PrepareJob, kit: WorkerContext, worker: int, share: WorkQueue, tell: Callable[[], None]) -> None:
    """Walk through all chunks and make those whose turn it is."""
    numbers = share.numbers()
    wanted, highest = next(numbers, None), -1
    for highest, source, records in job.chunks():
        if wanted is None:
            return
        if highest != wanted:
            continue
        path = job.file(wanted, kit.cached)
        if not path.exists():
            chunk = Chunk(source, kit.vocabulary)
            try:
                tokenize_records(map(job.readers[source].parse, records), chunk, kit.rendering, job.config)
            except (WhetError, LayoutMismatchError) as error:
                raise WorkItemError(wanted, error) from None
            chunk.save(path)
            share.tokens[worker] += chunk.account.tokens
        share.done[worker] += len(records)
        tell()
        wanted = next(numbers, None)
    share.stop_after(highest)


# Sources → store. Content-addressed: the same files, tokenizer, template and options give the same store, once.

_FORMAT_VERSION = 3  # raise it when the same inputs would give other tokens, masks or files


class ConversationTokenizer(Protocol):
    """What turns conversations into tokens: a tokenizer and a way to write turns, loaded when they are needed."""

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the tokens, known without loading anything."""
        ...

    def make_renderer(self, cached: bool) -> ItemRenderer: ...

    def vocabulary_size(self) -> int: ...

    def save(self, folder: Path) -> None:
        """Keep with the store what its ids mean."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedStore:
    """A store and whether it was there already."""

    store: Store
    reused: bool


def prepare_store(
    config: DataConfig, sources: Sequence[Source], use: str, tokenizer: ConversationTokenizer
) -> PreparedStore:
    """The store for `sources`, made if it does not exist. `use` is train or validation, for the ledger.

    Chunks that are there already, from other machines or from a preparation that was killed, are taken as they are.
    """
    folder, key = _store_folder_and_key(config, sources, use, tokenizer)
    try:
        reused = _is_complete(folder, key)
        if not reused:
            with file_lock(folder.with_name(f".{folder.name}.lock"), notify_waiting):
                reused = _is_complete(folder, key)
                if not reused:
                    _build_store(_make_job(folder, key, config, sources, tokenizer), folder, key, sources, use)
    except Exception as error:
        raise disk_error(error, "preparing the data", folder) or error from None
    store = Store(folder)
    _update_source_names(store, sources, use)
    return PreparedStore(store, reused)


def prepare_shard(
    config: DataConfig, sources: Sequence[Source], use: str, tokenizer: ConversationTokenizer, number: int, count: int
) -> Path:
    """Make every count-th chunk, from `number` on; needs no lock, because machines share no chunk."""
    folder, key = _store_folder_and_key(config, sources, use, tokenizer)
    try:
        if not _is_complete(folder, key):
            _make_all_chunks(_make_job(folder, key, config, sources, tokenizer), number, count)
    except Exception as error:
        raise disk_error(error, "preparing the data", folder) or error from None
    return folder


def require_all_shards(
    config: DataConfig, sources: Sequence[Source], use: str, tokenizer: ConversationTokenizer
) -> None:
    """Refuse to merge while a machine is still at work, or never was."""
    folder, key = _store_folder_and_key(config, sources, use, tokenizer)
    if _is_complete(folder, key):
        return
    missing, total = _make_job(folder, key, config, sources, tokenizer).missing()
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
        raise WhetError(
            f"{len(missing)} of {total} chunks of the {use} data are missing (chunk {shown}). Chunk c is made by "
            "`whet prepare --shard i/n` with i = c modulo n: let the missing shards finish, or leave --merge out to "
            "make them here"
        )


def _store_folder_and_key(
    config: DataConfig, sources: Sequence[Source], use: str, tokenizer: ConversationTokenizer
) -> tuple[Path, str]:
    """Where the store is or will be, and the key of its content."""
    try:
        key = hash_json(_key_inputs(config, sources, tokenizer))[:20]
    except OSError as error:
        raise disk_error(error, "reading the sources", ".") or error from None
    folder = cache_dir() / "stores" / key if config.store is None else Path(config.store).expanduser() / use
    return folder, key


def _is_complete(folder: Path, key: str) -> bool:
    if not (folder / MANIFEST).exists():
        return False
    return folder.name == key or Store(folder).manifest["key"] == key


def _update_source_names(store: Store, sources: Sequence[Source], use: str) -> None:
    """A store is found by content; the files may have been called otherwise when it was made."""
    files = store.manifest["files"]
    for number, (account, source) in enumerate(zip(store.manifest["accounts"], sources, strict=True)):
        account |= {"source": source.path, "use": use}
        mine = [i for i, owner in enumerate(files["source"]) if owner == number]
        now = [] if source.is_generated else [container.name for container in locate_containers(source)]
        if len(now) != len(mine):  # some file gave nothing, and which is not known
            continue
        renamed = {files["name"][i]: name for i, name in zip(mine, now, strict=True)}
        for i in mine:
            files["name"][i] = renamed[files["name"][i]]
        account["first"] = {
            reason: [_update_place(place, renamed) for place in places] for reason, places in account["first"].items()
        }


def _update_place(place: str, renamed: dict[str, str]) -> str:
    file, _, line = place.rpartition(":")
    return f"{renamed.get(file, file)}:{line}"


def _key_inputs(config: DataConfig, sources: Sequence[Source], tokenizer: ConversationTokenizer) -> dict[str, Any]:
    options = config.model_dump(include={"train_on", "max_length", "too_long", "on_bad", "deduplicate"})
    return {
        "format": _FORMAT_VERSION,
        "sources": [source_fingerprint(source) for source in sources],
        "language": tokenizer.identity,
        **options,
    }


def _make_job(
    folder: Path, key: str, config: DataConfig, sources: Sequence[Source], tokenizer: ConversationTokenizer
) -> PrepareJob:
    if (folder / MANIFEST).exists():
        raise WhetError(
            f"data.store: {folder} holds other data than this configuration asks for. Choose another folder, or "
            "delete it"
        )
    if config.store is not None and folder.exists() and any(folder.iterdir()):
        raise WhetError(
            f"data.store: {folder} is neither empty nor a complete store. Choose another folder, or move its files away"
        )
    size = sum(source_bytes(source) for source in sources)
    require_disk_space(folder, 2 * size + 2**20, "the prepared data")
    work = folder.with_name(f".{key}.work")  # by content: what another preparation left behind is not taken for ours
    return PrepareJob(work, config, [SourceReader(source) for source in sources], size, tokenizer)


def _make_all_chunks(job: PrepareJob, first: int = 0, step: int = 1) -> list[Path]:
    """Make chunks and name all that the store consists of."""
    job.folder.mkdir(parents=True, exist_ok=True)
    for reader in job.readers:
        if reader.description:
            info(reader.description)
    try:
        total = make_chunks(job, first, step)
    except LayoutMismatchError:
        info("the chat template treats conversations of the same shape differently: each is rendered in full")
        job.disable_render_cache()
        total = make_chunks(job, first, step)
    return [job.file(number) for number in range(total)]


def _build_store(job: PrepareJob, folder: Path, key: str, sources: Sequence[Source], use: str) -> None:
    """After a crash or a full disk the finished chunks stay, to continue from; if the data is wrong, they go."""
    try:
        paths = _make_all_chunks(job)
        with atomic_dir(folder) as temporary:
            job.tokenizer.save(temporary)
            merge_chunks(paths, temporary, key, sources, use, job.config, job.tokenizer)
    except WhetError as error:
        if error.exit_code == WhetError.exit_code:
            shutil.rmtree(job.folder, ignore_errors=True)
        raise
    shutil.rmtree(job.folder, ignore_errors=True)
