"""Parquet and Arrow tables, a few rows at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from whet.core.errors import WhetError
from whet.data.containers.base import Container, Raw
from whet.data.containers.streams import need_pyarrow
from whet.data.conversation import BadRecordError

_ROWS = 128
_ARROW_FILE, _STREAM_END = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"


class Batch:
    """Some rows of a table, made into Python values together and only if one of them is asked for."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    @cached_property
    def rows(self) -> list[Any]:
        try:
            return list(self._batch.to_pylist())
        except UnicodeDecodeError:
            return [self._row(number) for number in range(self._batch.num_rows)]

    def _row(self, number: int) -> object:
        try:
            return self._batch.slice(number, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            return BadRecordError("not UTF-8", f"a text in this row is not valid UTF-8: {error}")


class Row(NamedTuple):
    """A row of a table. A column exists for every row, so where a value is missing there is a null."""

    batch: Batch
    number: int

    def record(self) -> object:
        row = self.batch.rows[self.number]
        if isinstance(row, BadRecordError):
            raise row
        return row


def rows_of(batches: Iterator[Any], name: str) -> Iterator[Raw]:
    """Raw records of Arrow batches (or tables) of any length."""
    line = 0
    for whole in batches:
        for start in range(0, whole.num_rows, _ROWS):
            batch = Batch(whole.slice(start, _ROWS))
            for number in range(min(_ROWS, whole.num_rows - start)):
                line += 1
                yield Raw(line, Row(batch, number), name)


def without_nulls(value: Any) -> Any:
    """A table's value as JSON would have it: a null in an object is a field that is not there."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


class Parquet(Container):
    """Read in batches, so that a row group of any size fits."""

    kind = "parquet"

    def records(self) -> Iterator[Raw]:
        with self._open() as file:
            yield from rows_of(file.iter_batches(batch_size=8 * _ROWS), self.name)

    def count(self) -> int:
        with self._open() as file:
            return int(file.metadata.num_rows)

    def size(self) -> int:
        with self._open() as file:
            metadata = file.metadata
            return sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        need_pyarrow(self.name)
        from pyarrow import parquet

        with _damage_is_named(self.name, "Parquet"), parquet.ParquetFile(self.path, pre_buffer=False) as file:
            yield file


class Arrow(Container):
    """Arrow's file format (also called Feather) and its stream format, which `datasets` writes."""

    kind = "arrow"

    def records(self) -> Iterator[Raw]:
        with _damage_is_named(self.name, "Arrow"):
            yield from rows_of(self._batches(), self.name)

    def count(self) -> int:
        with _damage_is_named(self.name, "Arrow"):
            return sum(batch.num_rows for batch in self._batches())

    def _batches(self) -> Iterator[Any]:
        pyarrow = need_pyarrow(self.name)
        with self.path.open("rb") as file:
            is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
            file.seek(max(0, self.path.stat().st_size - len(_STREAM_END)))
            ends = is_file or file.read() == _STREAM_END
        with pyarrow.memory_map(str(self.path)) as mapped:
            if is_file:
                reader = pyarrow.ipc.open_file(mapped)
                yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                yield from pyarrow.ipc.open_stream(mapped)
        if not ends:
            raise EOFError("its end is missing")


@contextlib.contextmanager
def _damage_is_named(name: str, kind: str) -> Iterator[None]:
    pyarrow = need_pyarrow(name)
    try:
        yield
    except (pyarrow.ArrowException, OSError, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        said = str(error).partition("\n")[0]
        raise WhetError(
            f"data.sources: {name}: no {kind} file, or one that is cut off or damaged ({said}). "
            "Copy or download it again"
        ) from None
