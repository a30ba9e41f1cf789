"""`whet chat` in a terminal: input, slash commands, and streamed output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from whet.core.errors import WhetError
from whet.inference.chat import FINISH_INTERRUPTED, ChatModel, ChatSession, ExplainedToken, Reply, explain_tokens

_COLOURS = ("bold cyan", "bold magenta")
_HELP = """\
/reset           start over
/system TEXT     another system message, and start over
/save FILE       add the conversation to FILE, one line of JSON that whet can train on
/against MODEL   a second model beside it; none: alone again
/adapter NAME    another adapter; none: without
/quit, Ctrl-D    leave
Ctrl-C           stops an answer
A line that ends with \\ goes on; a text of several lines stands between \"\"\" and \"\"\"."""


@dataclass(slots=True)
class TerminalChat:
    """Who sits at it."""

    session: ChatSession
    beside: ChatSession | None = None
    adapters: dict[str, ChatModel] = field(default_factory=dict)
    load: Callable[[str], ChatModel] | None = None
    """Another model by its name."""
    explains: bool = False


class _QuitError(Exception):
    """The person has left."""


def run_terminal_chat(table: TerminalChat, console: Console | None = None) -> None:
    """Ask and answer until the person leaves."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - arrow keys and earlier lines, where the terminal has them
    console = console or Console(highlight=False)
    console.print("Type a message. /help shows more, /quit or Ctrl-D leaves.", style="dim")
    while True:
        try:
            text = read_message(lambda mark: console.input(f"[bold]{mark}[/bold] "))
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n(/quit or Ctrl-D leaves)", style="dim")
            continue
        try:
            if text.startswith("/"):
                _run_command(table, console, text)
            elif text.strip():
                for number, session in enumerate(filter(None, (table.session, table.beside))):
                    _answer_message(table, console, session, text, _COLOURS[number])
        except _QuitError:
            return
        except WhetError as error:
            console.print(f"{error}", style="red", markup=False)
        except KeyboardInterrupt:
            console.print("\n(stopped)", style="dim")


def read_message(ask: Callable[[str], str]) -> str:
    '''One message, of several lines where a line ends with a backslash or stands between """ and """.'''
    line = ask("you ›").rstrip()
    if line.lstrip().startswith('"""'):
        lines = [line.lstrip()[3:]]
        while not lines[-1].endswith('"""'):
            lines.append(ask("  ···"))
        lines[-1] = lines[-1][:-3]
        return "\n".join(lines).strip("\n")
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = ask("  ···").rstrip()
    return "\n".join([*lines, line])


def _answer_message(table: TerminalChat, console: Console, session: ChatSession, text: str, colour: str) -> None:
    def show(piece: str) -> None:
        console.print(Text(piece), end="", soft_wrap=True)

    name = session.speaker.name if table.beside else "model"
    console.print(Text(f"{name} › ", colour), end="")
    said = session.say(text, show)
    console.print()
    note = truncation_note(said, session.speaker)
    if note:
        console.print(Text(f"({note})", "dim"))
    if table.explains:
        with session.speaker.within():
            told = explain_tokens(session.speaker.model, said.prompt, said.ids, session.speaker.piece)
        print_explained_tokens(told, console)


def truncation_note(said: Reply, speaker: ChatModel) -> str | None:
    """What a person should know of how an answer ended."""
    if said.stopped == FINISH_INTERRUPTED:
        return "stopped"
    if said.stopped != "length":
        return None
    limit = speaker.sampling.max_new_tokens
    if len(said.ids) < limit:
        return "cut: the model's context is full; /reset starts over"
    return f"cut at {limit} tokens, the model did not stop by itself; --max-new-tokens sets the limit"


def print_explained_tokens(tokens: Iterable[ExplainedToken], console: Console) -> None:
    """One line a token: how likely it was, and the likeliest ones."""
    for each in tokens:
        style = "green" if each.probability >= 0.5 else "yellow" if each.probability >= 0.1 else "red"
        others = "  ".join(f"{choice.token!r} {choice.probability:.1%}" for choice in each.likeliest)
        line = Text.assemble((f"{each.probability:7.1%} ", style), (f"{each.token!r:<18} ", "bold"), (others, "dim"))
        console.print(line, soft_wrap=True)


def _run_command(table: TerminalChat, console: Console, text: str) -> None:
    name, _, rest = text.partition(" ")
    commands: dict[str, Callable[[TerminalChat, Console, str], None]] = {
        "/reset": _reset, "/new": _reset, "/system": _system, "/save": _save, "/against": _against,
        "/adapter": _adapter, "/help": _help, "/quit": _quit, "/exit": _quit,
    }  # fmt: skip
    if name not in commands:
        raise WhetError(f"{name}: no such command. /help shows all; begin with a space to say it to the model")
    commands[name](table, console, rest.strip())


def _reset(table: TerminalChat, console: Console, rest: str) -> None:
    for session in filter(None, (table.session, table.beside)):
        session.forget()
    console.print("(a new conversation)", style="dim")


def _system(table: TerminalChat, console: Console, rest: str) -> None:
    for session in filter(None, (table.session, table.beside)):
        session.forget(rest)
    console.print(f"({'system message set' if rest else 'no system message'}; a new conversation)", style="dim")


def _save(table: TerminalChat, console: Console, rest: str) -> None:
    if not rest:
        raise WhetError("/save: name a file: /save my.jsonl")
    path = Path(rest).expanduser()
    table.session.save(path)
    console.print(f"(added to {path})", style="dim", markup=False)


def _against(table: TerminalChat, console: Console, rest: str) -> None:
    if rest in ("", "none"):
        table.beside = None
        console.print("(alone)", style="dim")
        return
    if table.load is None:
        raise WhetError("/against: no other model can be loaded here")
    table.beside = ChatSession(table.load(rest), table.session.system)
    table.session.forget()
    console.print(f"(beside {rest}; a new conversation)", style="dim", markup=False)


def _adapter(table: TerminalChat, console: Console, rest: str) -> None:
    if rest not in table.adapters:
        known = ", ".join(table.adapters) or "none were given: whet chat BASE --adapter NAME=DIR"
        raise WhetError(f"/adapter: {rest or 'name one'}; there are: {known}")
    table.session.speaker = table.adapters[rest]
    console.print(f"({'without adapter' if rest == 'none' else rest})", style="dim", markup=False)


def _help(table: TerminalChat, console: Console, rest: str) -> None:
    console.print(_HELP, style="dim", markup=False)


def _quit(table: TerminalChat, console: Console, rest: str) -> None:
    raise _QuitError
