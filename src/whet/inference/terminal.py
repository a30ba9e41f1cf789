"""`whet chat` in a terminal: input, slash commands and streamed replies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from rich.text import Text

from whet.core.console import SafeConsole
from whet.core.display import mask_secrets
from whet.core.errors import WhetError
from whet.core.files import user_path
from whet.inference.chat import ChatModels, ChatSession
from whet.inference.inference_model import FINISH_INTERRUPTED, ExplainedToken, InferenceModel, Reply

_COLOURS = ("bold cyan", "bold magenta")
_HELP = """\
/reset           start a new conversation
/system TEXT     set the system message and start a new conversation
/save FILE       append the conversation to FILE, in JSONL that whet can train on
/against MODEL   compare with a second model; /against none: stop comparing
/adapter NAME    switch to another adapter; /adapter none: the base model
/quit, Ctrl-D    quit
Ctrl-C           stop a reply
\\ at the end of a line continues it; \"\"\" starts and ends several lines."""


class _QuitError(Exception):
    """The user has quit."""


class TerminalChat:
    """An interactive chat with one model, or with two side by side."""

    def __init__(self, models: ChatModels, explain: bool = False, console: SafeConsole | None = None) -> None:
        self.session = ChatSession(models.model, models.system)
        self.against = None if models.against is None else ChatSession(models.against, models.system)
        self._adapters, self._load, self._explain = models.adapters, models.load, explain
        self._console = console or SafeConsole(soft_wrap=False)

    @property
    def sessions(self) -> list[ChatSession]:
        return [session for session in (self.session, self.against) if session is not None]

    def run(self) -> None:
        """Read messages and print replies until the user quits."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - arrow keys and history, where the terminal supports them
        self._note("Type a message. /help lists the commands; /quit or Ctrl-D quits.")
        while True:
            try:
                text = read_message(lambda prompt: self._console.input(Text(f"{prompt} ", "bold")))
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._note("\n(/quit or Ctrl-D quits)")
                continue
            try:
                if text.startswith("/"):
                    self._run_command(text)
                elif text.strip():
                    for session, colour in zip(self.sessions, _COLOURS, strict=False):
                        self._reply(session, text, colour)
            except _QuitError:
                return
            except WhetError as error:
                self._console.print(mask_secrets(str(error)), style="red")
            except KeyboardInterrupt:
                self._note("\n(stopped)")

    def _reply(self, session: ChatSession, text: str, colour: str) -> None:
        name = session.model.name if self.against else "model"
        self._console.print(f"{name} › ", style=colour, end="")
        reply = session.send(text, lambda part: self._console.print(part, end="", soft_wrap=True))
        self._console.print()
        note = truncation_note(reply, session.model)
        if note:
            self._note(f"({note})")
        if self._explain:
            print_explained_tokens(session.model.explain(reply), self._console)

    def _run_command(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/reset": self._reset, "/new": self._reset, "/system": self._set_system, "/save": self._save,
            "/against": self._compare, "/adapter": self._switch_adapter, "/help": self._help, "/quit": self._quit,
            "/exit": self._quit,
        }  # fmt: skip
        if name not in commands:
            raise WhetError(f"{name}: unknown command. /help lists the commands; start with a space to send it as text")
        commands[name](argument.strip())

    def _reset(self, _: str) -> None:
        for session in self.sessions:
            session.reset()
        self._note("(new conversation)")

    def _set_system(self, system: str) -> None:
        for session in self.sessions:
            session.reset(system)
        self._note(f"({'system message set' if system else 'no system message'}; new conversation)")

    def _save(self, file: str) -> None:
        if not file:
            raise WhetError("/save: a file is missing. Example: /save my.jsonl")
        path = user_path(file)
        self.session.save(path)
        self._note(f"(appended to {path})")

    def _compare(self, reference: str) -> None:
        if reference in ("", "none"):
            self.against = None
            self._note("(one model)")
            return
        if self._load is None:
            raise WhetError("/against: no other model can be loaded here")
        self.against = ChatSession(self._load(reference), self.session.system)
        self.session.reset()
        self._note(f"(comparing with {reference}; new conversation)")

    def _switch_adapter(self, name: str) -> None:
        if name not in self._adapters:
            known = ", ".join(self._adapters) or "none. Load some with: whet chat BASE --adapter NAME=DIR"
            raise WhetError(f"/adapter: {f'no adapter {name}' if name else 'a name is missing'}; available: {known}")
        self.session.model = self._adapters[name]
        self._note("(base model without adapter)" if name == "none" else f"(adapter {name})")

    def _help(self, _: str) -> None:
        self._note(_HELP)

    def _quit(self, _: str) -> None:
        raise _QuitError

    def _note(self, text: str) -> None:
        self._console.print(mask_secrets(text), style="dim")


def read_message(read_line: Callable[[str], str]) -> str:
    '''One message; it has several lines where a line ends with a backslash, or between """ and """.'''
    line = read_line("you ›").rstrip()
    if line.lstrip().startswith('"""'):
        lines = [line.lstrip()[3:]]
        while not lines[-1].endswith('"""'):
            lines.append(read_line("  ···"))
        lines[-1] = lines[-1][:-3]
        return "\n".join(lines).strip("\n")
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = read_line("  ···").rstrip()
    return "\n".join([*lines, line])


def truncation_note(reply: Reply, model: InferenceModel) -> str | None:
    """Why a reply is incomplete; None if it is complete."""
    if reply.finish_reason == FINISH_INTERRUPTED:
        return "stopped"
    if reply.finish_reason != "length":
        return None
    limit = model.sampling.max_new_tokens
    if len(reply.ids) < limit:
        return "truncated: the model's context is full; /reset starts a new conversation"
    return f"truncated after {limit} tokens; --max-new-tokens sets the limit"


def print_explained_tokens(tokens: Iterable[ExplainedToken], console: SafeConsole) -> None:
    """One line per token: its probability, the token, and the most likely candidates."""
    for token in tokens:
        style = "green" if token.probability >= 0.5 else "yellow" if token.probability >= 0.1 else "red"
        others = "  ".join(f"{other.token!r} {other.probability:.1%}" for other in token.likeliest)
        line = Text.assemble((f"{token.probability:7.1%} ", style), (f"{token.token!r:<18} ", "bold"), (others, "dim"))
        console.print(line, soft_wrap=True)
