"""What turns conversations into tokens: a tokenizer with a chat template or with turn markers, loaded on first use."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.data.config import Markers
from whet.data.render.marked_text import MarkedRenderer
from whet.data.render.renderer import Renderer
from whet.tokenizer.encoders import Encoder, make_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER_JSON, SENTENCEPIECE_MODEL = "tokenizer.json", "tokenizer.model"


class ChatTokenizer:
    """A tokenizer with a chat template. It is loaded when something has to be rendered: finding a store needs none."""

    def __init__(
        self,
        identity: dict[str, Any],
        load: Callable[[], PreTrainedTokenizerFast],
        stop_ids: Callable[[], Sequence[int]],
        train_on: str,
    ) -> None:
        """`identity`: all that determines the ids. Its `today` is the date for templates that print one."""
        self.identity = identity
        self._load, self._stop_ids, self._train_on = load, stop_ids, train_on

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self._load()

    def make_renderer(self, cached: bool) -> Renderer:
        return Renderer(self.tokenizer, self._train_on, self._stop_ids(), self.identity["today"], cached=cached)

    def vocabulary_size(self) -> int:
        return len(self.tokenizer)

    def save(self, folder: Path) -> None:
        """Save what the ids mean."""
        self.tokenizer.backend_tokenizer.save(str(folder / TOKENIZER_JSON), pretty=False)


class MarkedTextTokenizer:
    """A tokenizer with turn markers (data.markers). With a SentencePiece file, only that is loaded."""

    def __init__(
        self,
        identity: dict[str, Any],
        load: Callable[[], PreTrainedTokenizerFast],
        sentencepiece: Path | None,
        markers: Markers,
        train_on: str,
    ) -> None:
        """`identity`: all that determines the ids. `load` gives the fast tokenizer."""
        self.identity = identity
        self._load, self._sentencepiece, self._markers, self._train_on = load, sentencepiece, markers, train_on

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self._load()

    @cached_property
    def _encoder(self) -> Encoder:
        return make_encoder(self._load, self._sentencepiece)

    def make_renderer(self, cached: bool) -> MarkedRenderer:
        return MarkedRenderer(self._encoder, self._markers, self._train_on)

    def vocabulary_size(self) -> int:
        return self._encoder.vocab_size

    def save(self, folder: Path) -> None:
        """Save what the ids mean."""
        if self._sentencepiece is not None:
            shutil.copyfile(self._sentencepiece, folder / SENTENCEPIECE_MODEL)
        else:
            self.tokenizer.backend_tokenizer.save(str(folder / TOKENIZER_JSON), pretty=False)


ConversationTokenizer = ChatTokenizer | MarkedTextTokenizer
ItemRenderer = Renderer | MarkedRenderer
"""Both have `render_items`."""
