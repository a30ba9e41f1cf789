"""A tokenizer with a chat template: what turns conversations into tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.data.render import Renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER = "tokenizer.json"


class ChatLanguage:
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

    def rendering(self, cached: bool) -> Renderer:
        return Renderer(self.tokenizer, self._train_on, self._stop_ids(), self.identity["today"], cached=cached)

    def vocabulary(self) -> int:
        return len(self.tokenizer)

    def save(self, folder: Path) -> None:
        self.tokenizer.backend_tokenizer.save(str(folder / TOKENIZER))
