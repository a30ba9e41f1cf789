"""Files: atomic writes, retries, content hashes, locks, disk space. A file is either complete or absent."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import hashlib
import itertools
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from whet.core.errors import WhetError, os_error

T = TypeVar("T")


def cache_dir() -> Path:
    """The folder of prepared data and converted models: $WHET_CACHE, else ~/.cache/whet."""
    return Path(os.environ.get("WHET_CACHE") or Path.home() / ".cache" / "whet")


def user_path(text: str | Path) -> Path:
    """A path as a user writes it, with ~ replaced. One of a user who does not exist stays as it is: it is not found."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises RuntimeError for such a user


def resolve_path(path: Path) -> Path:
    """The absolute path without symbolic links, as far as they lead anywhere."""
    return Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for links that lead in a circle


def atomic_write(path: Path, content: str | bytes | Iterator[bytes]) -> None:
    """Write `path` atomically: a reader, or a crash, sees the old content or the new one, never a part.

    No views: one of BytesIO.getbuffer() that the traceback of an error keeps crashes the garbage collector of Python
    3.12.1."""
    data = content.encode() if isinstance(content, str) else content
    temporary = temporary_path(path)
    try:
        with temporary.open("wb") as file:
            file.writelines(data if isinstance(data, Iterator) else (data,))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def require_file_place(option: str, path: Path) -> None:
    """Refuse a place where no file can be written, before the work for it; `option`: by which the user gave it."""
    folder = path.absolute().parent
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises OSError for a name that is too long
        raise WhetError(f"{option} {path}: it is a folder. Add the name of a file")
    if not os.path.isdir(folder):  # noqa: PTH112
        raise WhetError(f"{option} {path}: no such folder: {folder}. Create it first")


def write_named_file(option: str, path: Path, content: str | bytes) -> None:
    """Write a file where the user wants it, atomically."""
    try:
        atomic_write(path, content)
    except OSError as error:
        unknown = WhetError(f"{option} {path}: cannot be written: {error.strerror}. Give another place")
        raise os_error(error, "writing it", path) or unknown from None


def write_json(path: Path, value: Any) -> None:
    """Write `value` atomically as indented JSON. Raises ValueError for NaN and infinity, which JSON does not have."""
    atomic_write(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


_MAX_TEXT_BYTES = 2**20


def read_text(path: Path) -> str:
    """The text of a small file that a user gave: a recipe, a template, a schema. It may be a pipe; one that nobody
    writes to counts as empty, because opening it would wait forever."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
        os.set_blocking(file.fileno(), True)
        raw = file.read(_MAX_TEXT_BYTES + 1)
    if len(raw) > _MAX_TEXT_BYTES:
        raise WhetError(f"{path}: the file has more than {_MAX_TEXT_BYTES >> 20} MiB, too much for a file of its kind")
    return raw.decode()


def read_required_text(path: Path, remedy: str) -> str:
    """read_text of a file that a command cannot do without. `remedy`: what to give instead."""
    try:
        return read_text(path)
    except FileNotFoundError:
        raise WhetError(f"{path}: no such file. {remedy}") from None
    except IsADirectoryError:
        raise WhetError(f"{path}: this is a folder. {remedy}") from None
    except UnicodeDecodeError as error:
        raise WhetError(f"{path}: not a text file ({error.reason} at byte {error.start}). {remedy}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise os_error(error, "reading it", path) or WhetError(f"{path}: cannot be read: {reason}") from None


def read_json(path: Path) -> Any:
    """The content of a JSON file, or a WhetError with the file and the line."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WhetError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise WhetError(f"{path}: this is a folder, not a file") from None
    except (ValueError, RecursionError) as error:  # also numbers of more than 4300 digits
        line = getattr(error, "lineno", 1)
        raise WhetError(f"{path}:{line}: not valid JSON ({error}). The file was damaged or edited by hand.") from None


RETRY_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""The pause before each further attempt."""

_MISSING_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_TRANSIENT_ERRNOS = (
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EREMOTEIO, errno.ENOTCONN, errno.ECONNRESET,
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOLINK, errno.ECOMM,
)  # fmt: skip

_RESOURCE_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Of this process or machine: they say nothing about the file."""


class UnreadableError(WhetError):
    """A file exists and cannot be read; its content may be intact."""


def read_with_retries(read: Callable[[], T], path: Path) -> T:
    """Call `read`, again after transient I/O errors, as network file systems have them; UnreadableError when they
    persist. A missing file is not retried: FileNotFoundError reaches the caller."""
    for wait_s in (*RETRY_DELAYS_S, None):
        try:
            return read()
        except _MISSING_ERRORS:
            raise
        except OSError as error:
            if wait_s is None or error.errno not in _TRANSIENT_ERRNOS:
                raise _make_unreadable_error(path, error, tries=1 if wait_s else 1 + len(RETRY_DELAYS_S)) from error
            time.sleep(wait_s)
    raise AssertionError


def _make_unreadable_error(path: Path, error: OSError, tries: int) -> UnreadableError:
    if error.errno in _RESOURCE_ERRNOS:
        return UnreadableError(str(os_error(error, "reading", path)))
    often = f" (tried {tries} times in {sum(RETRY_DELAYS_S):g} s)" if tries > 1 else ""
    return UnreadableError(
        f"{error.filename or path}: cannot be read: {error.strerror or error}{often}. It may be intact: check the "
        "disk, the network and the permissions, then start it again (whet train: with --resume)"
    )


def temporary_path(path: Path) -> Path:
    """A hidden name beside `path` with host and pid, after deleting those that killed processes of this host left."""
    _clear_leftovers(path.parent, glob.escape(path.name))
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")


def clear_leftovers(folder: Path) -> None:
    """Delete what killed processes of this host were writing in a folder that belongs to whet."""
    _clear_leftovers(folder, "*")


def _clear_leftovers(folder: Path, name: str) -> None:
    for left in folder.glob(f".{name}.{glob.escape(socket.gethostname())}-*"):
        if _is_of_dead_process(left):
            delete_path(left)


def _is_of_dead_process(temporary: Path) -> bool:
    pid = temporary.name.rpartition("-")[2]
    return pid.isdecimal() and int(pid) != os.getpid() and not Path(f"/proc/{pid}").exists()


def delete_path(path: Path) -> None:
    """Delete a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def delete_atomically(path: Path) -> None:
    """Delete a file or a folder. It is renamed first: a reader, or a crash, sees all of it or nothing."""
    temporary = temporary_path(path)
    delete_path(temporary)
    path.rename(temporary)
    delete_path(temporary)


def move_aside(path: Path) -> Path:
    """Rename a file or folder to the first free NAME.1, NAME.2, …; a file keeps its suffix. Return its new path."""
    for number in itertools.count(1):
        suffix = path.suffix if path.is_file() else ""
        other = path.with_name(f"{path.name.removesuffix(suffix)}.{number}{suffix}")
        if not os.path.lexists(other):
            path.rename(other)
            return other
    raise AssertionError("numbers do not end")


def _make_folder(folder: Path) -> None:
    """Create a folder and those above it. Something else in the place of one, such as a link to a file system that is
    not mounted, is ENOTDIR, which has a message."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from None


@contextlib.contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `path` if the block succeeds and deleted if it raises."""
    _make_folder(path.parent)
    put_back(path)
    temporary = temporary_path(path)
    delete_path(temporary)
    temporary.mkdir()
    try:
        yield temporary
        replace_folder(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def replace_folder(temporary: Path, path: Path) -> None:
    """Sync a complete folder to the disk and give it the name `path`. An older folder of that name is there until the
    new one is, whenever the process dies."""
    for file in temporary.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
    for folder in (*(entry for entry in temporary.rglob("*") if entry.is_dir()), temporary):
        fsync_folder(folder)
    if not path.exists():
        temporary.rename(path)
    else:
        old = temporary
        if not _exchange(temporary, path):
            old = path.with_name(f".{path.name}.old-{os.getpid()}")
            path.rename(old)  # after a kill right here, `put_back` undoes it
            temporary.rename(path)
        fsync_folder(path.parent)  # before the older one goes
        delete_path(old)
    fsync_folder(path.parent)


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically; False where the system or the file system cannot, such as NFS."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    code = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return bool(code == 0)


def put_back(path: Path) -> None:
    """If a process was killed while it replaced the folder `path` by two renames, give the older one its name back."""
    for old in path.parent.glob(f".{glob.escape(path.name)}.old-*"):
        if _is_of_dead_process(old):
            if path.exists():
                delete_path(old)
            else:
                old.rename(path)


def fsync_folder(path: Path) -> None:
    """Sync a folder's entries to the disk, so that a power cut cannot undo a rename; where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def fsync_file(path: Path) -> None:
    """Sync what any process has written to a file to the disk. A file that is gone has nothing to sync."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def file_lock(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold an exclusive lock on `path` inside the block. A process that has to wait calls `on_wait` first.

    Processes share one preparation of data this way without a collective.
    """
    _make_folder(path.parent)
    while True:
        file = path.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                break
        file.close()  # its last owner deleted it: lock the new file
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def require_disk_space(path: Path, size: int, doing: str) -> None:
    """Raise a WhetError if the disk under `path` has less than `size` bytes free."""
    existing = path
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < size:
        raise WhetError(
            f"{path}: the disk is too full for {doing}: {size / 2**20:.0f} MiB needed, {free / 2**20:.0f} MiB free. "
            "Free some space, or choose a folder on another disk (run.dir for runs, the environment variable "
            "WHET_CACHE for prepared data and models). Nothing half-written was left behind."
        )


def hash_file(path: Path, sha256: bool = False) -> str:
    """The BLAKE2 hash of a file. For large files, SHA-256: three times as fast on CPUs with instructions for it."""
    with path.open("rb") as file:
        if sha256:
            return hashlib.file_digest(file, "sha256").hexdigest()
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).hexdigest()


def hash_prefix(file: IO[bytes], size: int | None = None) -> hashlib.blake2b:
    """The BLAKE2 hash object of the next `size` bytes of a file, or of all."""
    digest = hashlib.blake2b(digest_size=20)
    left = math.inf if size is None else size
    while left > 0 and (block := file.read(int(min(left, 2**20)))):
        digest.update(block)
        left -= len(block)
    return digest


def hash_bytes(data: bytes) -> str:
    """The BLAKE2 hash of bytes."""
    return hashlib.blake2b(data, digest_size=20).hexdigest()


def hash_json(value: Any) -> str:
    """The hash of a JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hash_bytes(text.encode("utf-8", "surrogatepass"))  # JSON can name half a pair


def is_open_at(file: IO[Any], path: Path) -> bool:
    """Whether `path` is still the file that was opened there; also if the file system does not answer now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
