"""The model, loaded in a thread while the data is prepared: neither needs the other.

The thread loads and does nothing else. transformers sets torch's default type while it builds a model, so the process's
main thread computes nothing with torch until it has asked for the result; preparing data does not, and a test sees to
it. What depends on random numbers, as an adapter's start, comes after.
"""

from __future__ import annotations

import threading

import torch
from torch import nn

from whet.config import Config
from whet.core.ranks import my_device
from whet.core.threads import give_up
from whet.data.pool import no_fork
from whet.model.hollow import Source, load_hollow
from whet.model.load import load_model
from whet.parallel.compile import compiles, import_compiler
from whet.recipe.parts import arithmetic_of, place_of_weights


class Loading:
    """A model on its way to the device."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._thread: threading.Thread | None = None
        self._model: nn.Module | None = None
        self._error: BaseException | None = None
        self.source: Source | None = None
        """Where the weights are, if each process is to read its own part of them."""

    def begin(self) -> None:
        """Start, once. Code that comes with a model may do anything: such a model is loaded in the main thread."""
        if self._thread is None and not self._config.model.trust_remote_code:
            # The main thread reads the tokenizer meanwhile. What both import is there before, because two threads that
            # import modules which need each other can see half of one.
            from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: F401

            self._thread = threading.Thread(target=self._load, name="load the model", daemon=True)
            self._thread.start()

    def model(self) -> nn.Module:
        """The model, loaded now if it was not begun. Raises here what went wrong in the thread."""
        if self._thread is None:
            self._load()
        else:
            self._thread.join()
        error, model = self._error, self._model
        self._error = self._model = None
        if error is not None:
            raise error
        assert model is not None, "asked for twice"
        return model

    def give_up(self) -> None:
        """Nobody will ask for the model: the thread goes on alone and does not hold the process open."""
        if self._thread is not None:
            give_up(self._thread)

    def _load(self) -> None:
        try:
            with no_fork:
                device = my_device()
                arithmetic = arithmetic_of(self._config, device)
                if compiles(self._config.model.compile, device, arithmetic.compute):
                    import_compiler()
                self._model = self._loaded(arithmetic.weights, device)
        except BaseException as error:
            self._error = error

    def _loaded(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        if not self._config.divides_weights:
            return load_model(self._config.model, dtype, place_of_weights(self._config, device))
        model, self.source = load_hollow(self._config.model, dtype)
        return model
