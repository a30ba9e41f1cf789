"""Data sets of the hub, or a local folder or file, through the `datasets` library."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whet.core.errors import WhetError
from whet.data.containers.base import Container, Raw
from whet.data.containers.tables import rows_of

_BUILDERS = {
    ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".txt": "text", ".parquet": "parquet",
    ".arrow": "arrow",
}  # fmt: skip


class HubSet(Container):
    """`hub:OWNER/NAME`; the library keeps its own cache, so a set is fetched once."""

    kind = "hub"

    def __init__(self, path: str, subset: str | None, split: str | None) -> None:
        self._data, split = _load(path.removeprefix("hub:"), subset, split)
        super().__init__(f"{path}/{split}", Path(path))

    def records(self) -> Iterator[Raw]:
        yield from rows_of(self._data.with_format("arrow").iter(batch_size=1024), self.name)

    def count(self) -> int:
        return len(self._data)

    def size(self) -> int:
        return int(self._data.data.nbytes)

    def identity(self) -> list[str]:
        """The library's own name for the content."""
        return [self.kind, str(self._data._fingerprint)]


@functools.lru_cache(maxsize=8)
def _load(name: str, subset: str | None, split: str | None) -> tuple[Any, str]:
    try:
        import datasets
    except ImportError:
        raise WhetError(
            f"data.sources: hub:{name}: this needs the datasets library, which is not installed: "
            "pip install 'whet[data]'"
        ) from None
    path = Path(name).expanduser()
    try:
        if path.is_file():
            builder = _BUILDERS.get(path.suffix, "json")
            found = datasets.load_dataset(builder, data_files=str(path))
        else:
            found = datasets.load_dataset(str(path) if path.is_dir() else name, name=subset)
    except Exception as error:  # the library raises whatever its parts raise
        said = (str(error) or type(error).__name__).partition("\n")[0]
        raise WhetError(
            f"data.sources: hub:{name}: the data set cannot be loaded: {said}. Check its name, subset and the network; "
            "a folder that was downloaded can be given as a path"
        ) from None
    chosen = split or (next(iter(found)) if len(found) == 1 else "")
    if chosen not in found:
        given = f"no split {split!r}" if split else "more than one split"
        raise WhetError(f"data.sources: hub:{name}: it has {given}; set split to one of: {', '.join(found)}")
    return found[chosen], chosen
