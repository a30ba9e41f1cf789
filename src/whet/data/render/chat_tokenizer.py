"""A tokenizer with a chat template or turn markers, loaded on first use: what turns conversations into tokens."""

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
    """Loads the tokenizer only when something has to be rendered: finding a store that exists needs none."""

    def __init__(
        self,
        identity: dict[str, Any],
        load: Callable[[], PreTrainedTokenizerFast],
        stop_ids: Callable[[], Sequence[int]],
        train_on: str,
    ) -> None:
        """`identity` decides the tokens; its `today` is the date for templates that ask for one."""
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
        self.tokenizer.backend_tokenizer.save(str(folder / TOKENIZER_JSON), pretty=False)


class MarkedTextTokenizer:
    """Writes turns between markers. A SentencePiece file is used as it is; nothing else is loaded for it."""

    def __init__(
        self,
        identity: dict[str, Any],
        load: Callable[[], PreTrainedTokenizerFast],
        pieces: Path | None,
        markers: Markers,
        train_on: str,
    ) -> None:
        """`pieces` is the SentencePiece file, where there is one; `load` gives the fast tokenizer."""
        self.identity = identity
        self._load, self._pieces, self._markers, self._train_on = load, pieces, markers, train_on

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self._load()

    @cached_property
    def _encoder(self) -> Encoder:
        return make_encoder(self._load, self._pieces)

    def make_renderer(self, cached: bool) -> MarkedRenderer:
        return MarkedRenderer(self._encoder, self._markers, self._train_on)

    def vocabulary_size(self) -> int:
        return self._encoder.vocab_size

    def save(self, folder: Path) -> None:
        if self._pieces is not None:
            shutil.copyfile(self._pieces, folder / SENTENCEPIECE_MODEL)
        else:
            self.tokenizer.backend_tokenizer.save(str(folder / TOKENIZER_JSON), pretty=False)
