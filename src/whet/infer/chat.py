"""A conversation with a model."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text
from torch import nn

from whet.core.errors import WhetError
from whet.data.conversation import BadRecordError
from whet.data.render import Renderer
from whet.infer.generate import Sampling, generate


class ChatSession:
    """Remembers what was said; renders with the renderer that training used."""

    def __init__(
        self,
        model: nn.Module,
        renderer: Renderer,
        stops: Sequence[int],
        sampling: Sampling,
        system: str | None = None,
    ) -> None:
        self._model, self._renderer, self._stops, self._sampling = model, renderer, list(stops), sampling
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._system)

    def say(self, text: str) -> str:
        """The model's answer to `text`, given all that was said before."""
        said = [*self.messages, {"role": "user", "content": text}]
        try:
            prompt = self._renderer.prompt_ids(said)
        except BadRecordError as error:
            raise WhetError(f"the model cannot be asked this: {error}") from None
        pad = self._renderer.tokenizer.pad_token_id
        ids = generate(self._model, [prompt], self._stops, pad if pad is not None else 0, self._sampling)[0]
        answer = self._renderer.tokenizer.decode(ids, skip_special_tokens=True)
        self.messages = [*said, {"role": "assistant", "content": answer}]
        return str(answer)

    def forget(self) -> None:
        """Start over."""
        self.messages = list(self._system)


def converse(session: ChatSession) -> None:
    """Ask and answer until the person leaves."""
    console = Console()
    console.print("Type a message. /new starts over, /quit or Ctrl-D leaves.", style="dim")
    while True:
        try:
            text = console.input("[bold]you ›[/bold] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text in ("/quit", "/exit"):
            return
        if text == "/new":
            session.forget()
        elif text:
            try:
                console.print(Text.assemble(("model › ", "bold cyan"), session.say(text)))
            except KeyboardInterrupt:
                console.print("(interrupted)", style="dim")
