"""Containers for Parquet, Arrow and Hugging Face datasets."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from whet.core.errors import BadRecordError, WhetError
from whet.core.files import user_path
from whet.core.hub import is_hub_name, reach_hub
from whet.core.limits import limited
from whet.data.read.containers.container import Container, RawRecord, choose_split, require_pyarrow

_BATCH_ROWS, _BATCH_BYTES = 128, 2**28
_BATCH_SECONDS = 60.0
_ARROW_FILE_MAGIC, _ARROW_STREAM_END = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"


class RowBatch:
    """Rows of a table, converted to Python values together, when the first of them is decoded."""

    def __init__(self, batch: Any, place: str) -> None:
        self._batch, self._place = batch, place

    @cached_property
    def rows(self) -> list[Any]:
        with _batch_limits(self._place):
            try:
                return list(self._batch.to_pylist())
            except UnicodeDecodeError:
                return [self._row(number) for number in range(self._batch.num_rows)]

    def _row(self, number: int) -> object:
        try:
            return self._batch.slice(number, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            return BadRecordError("not UTF-8", f"a string in this row is not valid UTF-8: {error}")


class TableRow(NamedTuple):
    """A row of a table."""

    batch: RowBatch
    number: int

    def decode(self) -> Any:
        """The row as JSON would have it. A table has every column in every row, so a null means an absent field."""
        return drop_nulls(self.decode_with_nulls())

    def decode_with_nulls(self) -> Any:
        row = self.batch.rows[self.number]
        if isinstance(row, BadRecordError):
            raise row
        return row


def iter_rows(batches: Iterator[Any], name: str) -> Iterator[RawRecord]:
    """The records of Arrow batches (or tables) of any length."""
    line = 0
    while True:
        with _batch_limits(f"{name}:{line + 1}"):
            whole = next(batches, None)
        if whole is None:
            break
        if twice := [column for column in whole.schema.names if whole.schema.names.count(column) > 1]:
            raise WhetError(f"data.sources: {name}: two columns have the name {twice[0]!r}; rename one of them")
        for start in range(0, whole.num_rows, _BATCH_ROWS):
            batch = RowBatch(whole.slice(start, _BATCH_ROWS), f"{name}:{line + 1}")
            for number in range(min(_BATCH_ROWS, whole.num_rows - start)):
                line += 1
                yield RawRecord(line, TableRow(batch, number), name)


def _batch_limits(place: str) -> limited:
    """A few KB of a compressed or dictionary-encoded column may stand for gigabytes."""

    def unreadable(reason: str) -> WhetError:
        return WhetError(
            f"data.sources: {place}: the rows from here cannot be read: {reason}. Make the rows smaller, or write them "
            "as JSON Lines (.jsonl)"
        )

    return limited(_BATCH_SECONDS, unreadable)


def drop_nulls(value: Any) -> Any:
    """Without the fields whose value is null, at any depth."""
    if isinstance(value, dict):
        return {key: drop_nulls(inner) for key, inner in value.items() if inner is not None}
    return [drop_nulls(inner) for inner in value] if isinstance(value, list) else value


class ParquetTable(Container):
    """A Parquet file, read in batches, so that row groups may have any size."""

    kind = "parquet"

    def records(self) -> Iterator[RawRecord]:
        with self._open() as file:
            row_bytes = self.size() // max(1, file.metadata.num_rows)
            rows = max(1, min(8 * _BATCH_ROWS, _BATCH_BYTES // max(1, row_bytes)))
            yield from iter_rows(file.iter_batches(batch_size=rows), self.name)

    def count(self) -> int:
        with self._open() as file:
            return int(file.metadata.num_rows)

    def size(self) -> int:
        with self._open() as file:
            metadata = file.metadata
            return sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        require_pyarrow(self.name)
        from pyarrow import parquet

        with _report_damage(self.name, "Parquet"), parquet.ParquetFile(self.path, pre_buffer=False) as file:
            yield file


class ArrowTable(Container):
    """Arrow's file format (also called Feather) and its stream format, which `datasets` writes."""

    kind = "arrow"

    def records(self) -> Iterator[RawRecord]:
        with _report_damage(self.name, "Arrow"):
            yield from iter_rows(self._batches(), self.name)

    def count(self) -> int:
        with _report_damage(self.name, "Arrow"):
            return sum(batch.num_rows for batch in self._batches())

    def _batches(self) -> Iterator[Any]:
        pyarrow = require_pyarrow(self.name)
        with self.path.open("rb") as file:
            is_file = file.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
            file.seek(max(0, self.path.stat().st_size - len(_ARROW_STREAM_END)))
            ends = is_file or file.read() == _ARROW_STREAM_END
        with pyarrow.memory_map(str(self.path)) as mapped:
            if is_file:
                reader = pyarrow.ipc.open_file(mapped)
                yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                yield from pyarrow.ipc.open_stream(mapped)
        if not ends:
            raise EOFError("the end-of-stream marker is missing")


@contextlib.contextmanager
def _report_damage(name: str, kind: str) -> Iterator[None]:
    pyarrow = require_pyarrow(name)
    try:
        yield
    except (pyarrow.ArrowException, OSError, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        first_line = str(error).partition("\n")[0]
        raise WhetError(
            f"data.sources: {name}: not {kind} data, or truncated or corrupt ({first_line}). Copy or download it again"
        ) from None


# hub:OWNER/NAME, or hub:PATH of a local folder or file, through the `datasets` library.

_BUILDER_OF_SUFFIX = {
    ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".txt": "text", ".parquet": "parquet",
    ".arrow": "arrow",
}  # fmt: skip


class HubDataset(Container):
    """`hub:OWNER/NAME`; the library caches downloads."""

    kind = "hub"

    def __init__(self, path: str, subset: str | None, split: str | None) -> None:
        self._data, split = _load_dataset(path.removeprefix("hub:"), subset, split)
        super().__init__(f"{path}/{split}", Path(path))

    def records(self) -> Iterator[RawRecord]:
        yield from iter_rows(self._data.with_format("arrow").iter(batch_size=1024), self.name)

    def count(self) -> int:
        return len(self._data)

    def size(self) -> int:
        return int(self._data.data.nbytes)

    def content_key(self) -> list[str]:
        """The library's fingerprint of the content."""
        return [self.kind, str(self._data._fingerprint)]


@functools.lru_cache(maxsize=8)
def _load_dataset(name: str, subset: str | None, split: str | None) -> tuple[Any, str]:
    try:
        import datasets
    except ImportError:
        raise WhetError(
            f"data.sources: hub:{name}: the datasets library is not installed: pip install 'whet[data]'"
        ) from None
    path = user_path(name)
    if not path.exists() and is_hub_name(name):
        reach_hub(name, "datasets")
    try:
        if path.is_file():
            builder = _BUILDER_OF_SUFFIX.get(path.suffix, "json")
            found = datasets.load_dataset(builder, data_files=str(path))
        else:
            found = datasets.load_dataset(str(path) if path.is_dir() else name, name=subset)
    except Exception as error:  # the library raises exceptions of many kinds
        first_line = (str(error) or type(error).__name__).partition("\n")[0]
        raise WhetError(
            f"data.sources: hub:{name}: cannot load the dataset: {first_line}. Check its name, its subset and the "
            "network; for a downloaded folder, give its path"
        ) from None
    chosen = choose_split(f"hub:{name}", list(found), split)
    return found[chosen], chosen
