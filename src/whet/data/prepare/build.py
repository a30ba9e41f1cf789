"""Build the store of some sources, or find it.

A store is content-addressed: the same files, tokenizer, template and options give the same key, and the store is built
once. It is built in chunks by all cores of one or many machines. Chunk borders depend on the sources alone, and
finished chunks are kept until the store is complete, so that an interrupted preparation continues where it stopped.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.core.console import info, progress, warn
from whet.core.errors import WhetError, os_error
from whet.core.files import atomic_dir, cache_dir, file_lock, hash_json, require_disk_space, user_path
from whet.data.config import DataConfig, Source
from whet.data.prepare.chunks import Chunk, merge_chunks
from whet.data.prepare.store import MANIFEST, Store
from whet.data.prepare.tokenize import tokenize_records
from whet.data.prepare.workers import WorkerPool, WorkItemError, WorkQueue, notify_waiting
from whet.data.read.containers.container import RawRecord
from whet.data.read.containers.locate import locate_containers
from whet.data.read.sources import SourceReader, expected_records, source_bytes, source_fingerprint
from whet.data.render.chat_tokenizer import ConversationTokenizer, ItemRenderer
from whet.data.render.renderer import LayoutMismatchError

_FORMAT_VERSION = 10  # raise it when the same inputs would give other conversations, tokens, masks or files
_EARLIER_FORMATS = (3, 4, 6, 7, 8, 9)
"""3: a system prompt beside messages is not read, a token that straddles not supervised. 6: neither is the passage that
choices are about; a label is a mark of KTO even where it is the answer; cells of CSV files have CR LF. 7: a blank
answer may end with the marker that closes its reasoning; `loss: false` has no effect; tools keep `input_schema`; marks
in Windows-1252 become letters. 8: numbers of workbooks have no format, merged cells count once. 9:
without a known stop token, an answer may end with the part of a generation prompt that the template always appends;
templates get text parts as one text."""
_SMALL_CHUNK, _LARGE_CHUNK = 256, 1024  # records; large chunks for much data, to have fewer files
_LARGE_DATA_BYTES = 2**28
_SHARD_BYTES_PER_CORE = 2**26  # about 40 s of work; a job of fewer would mostly wait and start
_MAX_SHARDS = 64  # each reads all sources, and a site has other users
_NO_RENDER_CACHE = "uneven"  # its presence in the work folder disables the render cache


@dataclass(frozen=True, slots=True)
class PreparedStore:
    """A store and whether it existed already."""

    store: Store
    reused: bool


def prepare_store(
    config: DataConfig, sources: Sequence[Source], use: str, tokenizer: ConversationTokenizer,
    trained_on: Path | None = None,
) -> PreparedStore:  # fmt: skip
    """The store of `sources`, built if it does not exist. `use` is train or validation, for the ledger.

    Existing chunks, of other machines or of an interrupted preparation, are reused. So are a store that a resumed run
    was `trained_on`, and one in data.store, if an earlier version of whet made it of the same inputs.
    """
    folder, key = _store_folder_and_key(config, sources, use, tokenizer)
    named = trained_on if trained_on is not None else folder if config.store is not None else None
    if named is not None and (named / MANIFEST).exists():
        store, inputs = Store(named), _key_inputs(config, sources, tokenizer)
        if store.manifest["key"] in [hash_json({**inputs, "format": each})[:20] for each in _EARLIER_FORMATS]:
            if trained_on is None:
                warn(
                    f"data.store: {folder} was prepared by an earlier version of whet, which read some records and "
                    "made some loss masks differently. Delete the folder to prepare it again"
                )
            _update_source_names(store, sources, use)
            return PreparedStore(store, reused=True)
    try:
        reused = _is_complete(folder, key)
        if not reused:
            with file_lock(folder.with_name(f".{folder.name}.lock"), notify_waiting):
                reused = _is_complete(folder, key)
                if not reused:
                    _build_store(_make_job(folder, key, config, sources, tokenizer), folder, key, sources, use)
        elif (work := _work_folder(folder, key)).exists():  # of a process that was killed right after the merge
            shutil.rmtree(work, ignore_errors=True)
    except Exception as error:
        raise os_error(error, "preparing the data", folder) or error from None
    store = Store(folder)
    _update_source_names(store, sources, use)
    return PreparedStore(store, reused)


def prepare_shard(
    config: DataConfig, sources: Sequence[Source], use: str, tokenizer: ConversationTokenizer, number: int, count: int
) -> Path:
    """Make every count-th chunk, starting with `number`. Shards share no chunk, so no lock is needed, and a shard that
    is made twice is made once: chunks are whole or absent."""
    folder, key = _store_folder_and_key(config, sources, use, tokenizer)
    try:
        if not _is_complete(folder, key):
            _make_all_chunks(_make_job(folder, key, config, sources, tokenizer), number, count)
    except Exception as error:
        if _is_complete(folder, key):  # merged meanwhile, of chunks that another process had made
            return folder
        raise os_error(error, "preparing the data", folder) or error from None
    return folder


def choose_shard_count(sources: Sequence[Source], cores: int) -> int:
    """How many machines with so many cores are worth their start for these sources."""
    size = sum(source_bytes(source) for source in sources)
    chunks = sum(-(-expected_records(source) // _records_per_chunk(size)) for source in sources)
    return max(1, min(chunks, size // (cores * _SHARD_BYTES_PER_CORE), _MAX_SHARDS))


def require_all_shards(
    config: DataConfig, sources: Sequence[Source], use: str, tokenizer: ConversationTokenizer
) -> None:
    """Raise a WhetError if chunks of other shards are missing."""
    folder, key = _store_folder_and_key(config, sources, use, tokenizer)
    if _is_complete(folder, key):
        return
    missing, total = _make_job(folder, key, config, sources, tokenizer).missing_chunks()
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
        today = tokenizer.identity["today"]
        date = (
            f". The chat template prints a date: shards of another day than {today} need their --date" if today else ""
        )
        raise WhetError(
            f"{len(missing)} of {total} chunks of the {use} data are missing (chunk {shown}). "
            "`whet prepare --shard i/n` makes chunk c with i = c modulo n: wait for the missing shards, or omit "
            f"--merge to make the chunks here{date}"
        )


def _store_folder_and_key(
    config: DataConfig, sources: Sequence[Source], use: str, tokenizer: ConversationTokenizer
) -> tuple[Path, str]:
    """The store's folder, whether it exists or not, and the key of its content."""
    try:
        key = hash_json(_key_inputs(config, sources, tokenizer))[:20]
    except OSError as error:
        raise os_error(error, "reading the sources", ".") or error from None
    if config.store is None:
        return cache_dir() / "stores" / key, key
    own = user_path(config.store)
    if os.path.lexists(own) and not own.is_dir():  # also a link that leads nowhere
        raise WhetError(f"data.store: {config.store} is not a folder. Give a folder, or the path of one to be made")
    return own / use, key


def _work_folder(folder: Path, key: str) -> Path:
    """Where the chunks of a store are kept until it is complete. By key: those of other preparations are not reused."""
    return folder.with_name(f".{key}.work")


def _is_complete(folder: Path, key: str) -> bool:
    if not (folder / MANIFEST).exists():
        return False
    return folder.name == key or Store(folder).manifest["key"] == key


def _update_source_names(store: Store, sources: Sequence[Source], use: str) -> None:
    """A store is found by content, so its files may have had other names when it was built."""
    files = store.manifest["files"]
    for number, (account, source) in enumerate(zip(store.manifest["accounts"], sources, strict=True)):
        account |= {"source": source.path, "use": use}
        mine = [i for i, owner in enumerate(files["source"]) if owner == number]
        now = [] if source.is_builtin else [container.name for container in locate_containers(source)]
        if len(now) != len(mine):  # a file without records has no entry, and which one is unknown
            continue
        renamed = {files["name"][i]: name for i, name in zip(mine, now, strict=True)}
        store.renamed |= {(number, old): new for old, new in renamed.items() if old != new}
        for i in mine:
            files["name"][i] = renamed[files["name"][i]]
        account["first"] = {
            reason: [_update_origin(origin, renamed) for origin in origins]
            for reason, origins in account["first"].items()
        }


def _update_origin(origin: str, renamed: dict[str, str]) -> str:
    file, _, line = origin.rpartition(":")
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
            f"data.store: {folder} was prepared from other data, with other settings or by an earlier version of whet. "
            "Choose another folder, or delete it"
        )
    if config.store is not None and folder.exists() and any(folder.iterdir()):
        raise WhetError(
            f"data.store: {folder} is neither empty nor a complete store. Choose another folder, or move its files away"
        )
    size = sum(source_bytes(source) for source in sources)
    require_disk_space(folder, 2 * size + 2**20, "the prepared data")
    return PrepareJob(_work_folder(folder, key), config, [SourceReader(source) for source in sources], size, tokenizer)


def _make_all_chunks(job: PrepareJob, first: int = 0, step: int = 1) -> list[Path]:
    """Make the chunks first, first + step, … and return the paths of all chunks of the store."""
    job.folder.mkdir(parents=True, exist_ok=True)
    for reader in job.readers:
        if reader.description:
            info(reader.description)
    while True:
        cached = job.uses_render_cache
        try:
            total = make_chunks(job, first, step, cached)
        except LayoutMismatchError:
            info("render cache disabled: the chat template branches on message content")
            job.disable_render_cache()
        if job.uses_render_cache == cached:  # neither this process nor another machine has disabled it meanwhile
            return [job.chunk_path(number, cached) for number in range(total)]


def _build_store(job: PrepareJob, folder: Path, key: str, sources: Sequence[Source], use: str) -> None:
    """After a crash or a full disk the finished chunks stay, to continue from; after an error in the data they go."""
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


@dataclass(frozen=True, slots=True)
class PrepareJob:
    """A preparation: the same for every process and machine that takes part."""

    folder: Path
    """Where the chunks go."""
    config: DataConfig
    readers: Sequence[SourceReader]
    source_bytes: int
    tokenizer: ConversationTokenizer

    @property
    def records_per_chunk(self) -> int:
        return _records_per_chunk(self.source_bytes)

    @property
    def uses_render_cache(self) -> bool:
        return not (self.folder / _NO_RENDER_CACHE).exists()

    def disable_render_cache(self) -> None:
        """Render every conversation in full from now on; chunks made with the cache no longer count."""
        (self.folder / _NO_RENDER_CACHE).touch()

    def chunk_path(self, number: int, cached: bool) -> Path:
        """The file of a chunk. Chunks made with and without the render cache have different names."""
        return self.folder / f"{number:08d}{'' if cached else '-full'}.npz"

    def missing_chunks(self) -> tuple[list[int], int]:
        """The numbers of chunks that no shard has made yet, and the number of all chunks. Those made with the render
        cache count, also after another shard has disabled it: the merge makes them again."""
        total = sum(1 for _ in self.chunks())
        paths = ((number, cached) for number in range(total) for cached in (True, False))
        made = {number for number, cached in paths if self.chunk_path(number, cached).exists()}
        return [number for number in range(total) if number not in made], total

    def chunks(self) -> Iterator[tuple[int, int, list[RawRecord]]]:
        """(number, source, records) of all chunks, in order; records are not parsed."""
        numbers = itertools.count()
        for source, reader in enumerate(self.readers):
            records = reader.records()
            while batch := list(itertools.islice(records, self.records_per_chunk)):
                yield next(numbers), source, batch


def _records_per_chunk(size: int) -> int:
    """`size`: bytes of all sources."""
    return _LARGE_CHUNK if size > _LARGE_DATA_BYTES else _SMALL_CHUNK


def make_chunks(job: PrepareJob, first: int, step: int, cached: bool) -> int:
    """Make the chunks first, first + step, … that do not exist, with or without the render cache; return the number of
    all chunks."""
    total = sum(expected_records(reader.source) for reader in job.readers)
    renderer, vocabulary_size = job.tokenizer.make_renderer(cached), job.tokenizer.vocabulary_size()
    workers = max(1, min(len(os.sched_getaffinity(0)), -(-total // (step * job.records_per_chunk))))
    queue = WorkQueue(first, step, workers)
    began, seen = time.monotonic(), 0

    def update_progress() -> None:
        nonlocal seen
        done, tokens = sum(queue.done), sum(queue.tokens)
        if done > seen:
            bar.advance(done - seen, f"{tokens:,} tokens, {tokens / (time.monotonic() - began):,.0f}/s")
            seen = done

    def work(worker: int, queue: WorkQueue) -> None:
        after_chunk = (lambda: None) if queue.is_parallel else update_progress
        _run_worker(job, renderer, vocabulary_size, cached, worker, queue, after_chunk)

    pool = WorkerPool(work, workers, queue) if queue.is_parallel else None  # forks before the progress bar has threads
    with progress("preparing", total // step, ends_with_line=False) as bar:
        if pool is not None:
            pool.wait(update_progress)
        else:
            try:
                work(0, queue)
            except WorkItemError as failure:
                raise failure.error from None
        bar.finish()
    return queue.last + 1


def _run_worker(
    job: PrepareJob, renderer: ItemRenderer, vocabulary_size: int, cached: bool, worker: int, queue: WorkQueue,
    after_chunk: Callable[[], None],
) -> None:  # fmt: skip
    """Read all sources and make the chunks that this worker claims."""
    numbers = queue.claim()
    claimed, highest = next(numbers, None), -1
    for highest, source, records in job.chunks():
        if claimed is None:
            return
        if highest != claimed:
            continue
        path = job.chunk_path(claimed, cached)
        if not path.exists():
            chunk = Chunk(source, vocabulary_size)
            try:
                tokenize_records(map(job.readers[source].parse, records), chunk, renderer, job.config)
            except (WhetError, LayoutMismatchError) as error:
                raise WorkItemError(claimed, error) from None
            chunk.save(path)
            queue.tokens[worker] += chunk.account.tokens
        queue.done[worker] += len(records)
        after_chunk()
        claimed = next(numbers, None)
    queue.stop_after(highest)
