"""Sources → store. Content-addressed: the same files, tokenizer, template and options give the same store, once."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from whet.core.console import say
from whet.core.errors import WhetError, disk_error
from whet.core.files import atomic_dir, cache_dir, hash_json, need_space, waiting_lock
from whet.data.chunks import Job, make
from whet.data.config import DataConfig, Source
from whet.data.containers.locate import locate
from whet.data.merge import merge
from whet.data.pool import now_waiting
from whet.data.render import UnevenTemplateError
from whet.data.settle import Rendering
from whet.data.sources import Reader, fingerprint, size_of
from whet.data.store import MANIFEST, Store

_FORMAT = 3  # raise it when the same inputs would give other tokens, masks or files


class Language(Protocol):
    """What turns conversations into tokens: a tokenizer and a way to write turns, loaded when they are needed."""

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the tokens, known without loading anything."""
        ...

    def rendering(self, cached: bool) -> Rendering: ...

    def vocabulary(self) -> int: ...

    def save(self, folder: Path) -> None:
        """Keep with the store what its ids mean."""
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A store and whether it was there already."""

    store: Store
    reused: bool


def prepare(config: DataConfig, sources: Sequence[Source], use: str, language: Language) -> Prepared:
    """The store for `sources`, made if it does not exist. `use` is train or validation, for the ledger.

    Chunks that are there already, from other machines or from a preparation that was killed, are taken as they are.
    """
    folder, key = _address(config, sources, use, language)
    try:
        reused = _is_complete(folder, key)
        if not reused:
            with waiting_lock(folder.with_name(f".{folder.name}.lock"), now_waiting):
                reused = _is_complete(folder, key)
                if not reused:
                    _make(_job(folder, key, config, sources, language), folder, key, sources, use)
    except Exception as error:
        raise disk_error(error, "preparing the data", folder) or error from None
    store = Store(folder)
    _use_current_names(store, sources, use)
    return Prepared(store, reused)


def prepare_shard(
    config: DataConfig, sources: Sequence[Source], use: str, language: Language, number: int, count: int
) -> Path:
    """Make every count-th chunk, from `number` on; needs no lock, because machines share no chunk."""
    folder, key = _address(config, sources, use, language)
    try:
        if not _is_complete(folder, key):
            _chunks(_job(folder, key, config, sources, language), number, count)
    except Exception as error:
        raise disk_error(error, "preparing the data", folder) or error from None
    return folder


def require_all_shards(config: DataConfig, sources: Sequence[Source], use: str, language: Language) -> None:
    """Refuse to merge while a machine is still at work, or never was."""
    folder, key = _address(config, sources, use, language)
    if _is_complete(folder, key):
        return
    missing, total = _job(folder, key, config, sources, language).missing()
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
        raise WhetError(
            f"{len(missing)} of {total} chunks of the {use} data are missing (chunk {shown}). Chunk c is made by "
            "`whet prepare --shard i/n` with i = c modulo n: let the missing shards finish, or leave --merge out to "
            "make them here"
        )


def _address(config: DataConfig, sources: Sequence[Source], use: str, language: Language) -> tuple[Path, str]:
    """Where the store is or will be, and the key of its content."""
    try:
        key = hash_json(_identity(config, sources, language))[:20]
    except OSError as error:
        raise disk_error(error, "reading the sources", ".") or error from None
    folder = cache_dir() / "stores" / key if config.store is None else Path(config.store).expanduser() / use
    return folder, key


def _is_complete(folder: Path, key: str) -> bool:
    if not (folder / MANIFEST).exists():
        return False
    return folder.name == key or Store(folder).manifest["key"] == key


def _use_current_names(store: Store, sources: Sequence[Source], use: str) -> None:
    """A store is found by content; the files may have been called otherwise when it was made."""
    files = store.manifest["files"]
    for number, (account, source) in enumerate(zip(store.manifest["accounts"], sources, strict=True)):
        account |= {"source": source.path, "use": use}
        mine = [i for i, owner in enumerate(files["source"]) if owner == number]
        now = [] if source.is_generated else [container.name for container in locate(source)]
        if len(now) != len(mine):  # some file gave nothing, and which is not known
            continue
        renamed = {files["name"][i]: name for i, name in zip(mine, now, strict=True)}
        for i in mine:
            files["name"][i] = renamed[files["name"][i]]
        account["first"] = {
            reason: [_at_new_place(place, renamed) for place in places] for reason, places in account["first"].items()
        }


def _at_new_place(place: str, renamed: dict[str, str]) -> str:
    file, _, line = place.rpartition(":")
    return f"{renamed.get(file, file)}:{line}"


def _identity(config: DataConfig, sources: Sequence[Source], language: Language) -> dict[str, Any]:
    options = config.model_dump(include={"train_on", "max_length", "too_long", "on_bad", "deduplicate"})
    return {
        "format": _FORMAT,
        "sources": [fingerprint(source) for source in sources],
        "language": language.identity,
        **options,
    }


def _job(folder: Path, key: str, config: DataConfig, sources: Sequence[Source], language: Language) -> Job:
    if (folder / MANIFEST).exists():
        raise WhetError(
            f"data.store: {folder} holds other data than this configuration asks for. Choose another folder, or "
            "delete it"
        )
    if config.store is not None and folder.exists() and any(folder.iterdir()):
        raise WhetError(
            f"data.store: {folder} is neither empty nor a complete store. Choose another folder, or move its files away"
        )
    size = sum(size_of(source) for source in sources)
    need_space(folder, 2 * size + 2**20, "the prepared data")
    work = folder.with_name(f".{key}.work")  # by content: what another preparation left behind is not taken for ours
    return Job(work, config, [Reader(source) for source in sources], size, language)


def _chunks(job: Job, first: int = 0, step: int = 1) -> list[Path]:
    """Make chunks and name all that the store consists of."""
    job.folder.mkdir(parents=True, exist_ok=True)
    for reader in job.readers:
        if reader.decision:
            say(reader.decision)
    try:
        total = make(job, first, step)
    except UnevenTemplateError:
        say("the chat template treats conversations of the same shape differently: each is rendered in full")
        job.render_in_full()
        total = make(job, first, step)
    return [job.file(number) for number in range(total)]


def _make(job: Job, folder: Path, key: str, sources: Sequence[Source], use: str) -> None:
    """After a crash or a full disk the finished chunks stay, to continue from; if the data is wrong, they go."""
    try:
        paths = _chunks(job)
        with atomic_dir(folder) as temporary:
            job.language.save(temporary)
            merge(paths, temporary, key, sources, use, job.config, job.language)
    except WhetError as error:
        if error.exit_code == WhetError.exit_code:
            shutil.rmtree(job.folder, ignore_errors=True)
        raise
    shutil.rmtree(job.folder, ignore_errors=True)
