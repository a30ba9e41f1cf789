"""The check of a run's stores: in the background while the run starts, because a large store takes minutes to read."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from types import TracebackType

from whet.core.checksums import find_damage
from whet.core.errors import WhetError, describe_error
from whet.data.prepare.store import Store


class StoreCheck:
    """Compares the files of stores with the checksums in their manifests, in a thread of low priority.

    An error inside the `with` block may come from damage that is not found yet, such as a token that the model does not
    know: the check is then completed, and damage is raised instead of the error.
    """

    def __init__(self, stores: Iterable[Store]) -> None:
        self._stores = {store.folder: store for store in stores}
        self._damage: WhetError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="check the stores", daemon=True)

    def __enter__(self) -> StoreCheck:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self._thread.join()
            if self._damage is not None and error is not self._damage:
                raise self._damage from error
        self._stop.set()
        self._thread.join()

    @property
    def has_failed(self) -> bool:
        """Whether damage has been found so far."""
        return self._damage is not None

    def result(self) -> WhetError | None:
        """The damage that was found. Blocks until the check is complete."""
        self._thread.join()
        return self._damage

    def require_intact(self) -> None:
        """Raise the damage that was found. Blocks until the check is complete."""
        if (damage := self.result()) is not None:
            raise damage

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # of this thread and those it starts
        try:
            for folder, store in self._stores.items():
                for message in find_damage(folder, store.checksums, stop=self._stop):
                    raise WhetError(
                        f"{message}. Delete the folder {folder} and start again (whet train: with --resume): the data "
                        "is then prepared again"
                    )
        except WhetError as error:
            self._damage = error
        except Exception as error:
            self._damage = WhetError(f"{folder}: checking the prepared data failed: {describe_error(error)}")
