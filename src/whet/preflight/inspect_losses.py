"""`whet inspect RUN --step N` and `--losses`: what a step was trained on, and which conversations are hard to learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from whet.core.console import SafeConsole, info
from whet.core.display import escape_controls
from whet.core.errors import WhetError
from whet.evaluation.training_losses import LOSS_PATTERNS, LossPattern
from whet.run.loss_lists import ConversationLosses

_HIGH, _VERY_HIGH = 1.0, 3.0
"""−log p: a probability below 37 %, and below 5 %."""
_TITLES: dict[LossPattern, str] = {
    "never-learned": "never learned: the loss has hardly fallen since the conversation was first seen",
    "forgotten": "forgotten: the loss was lower before",
    "suspicious": "suspicious labels: the loss is far above that of others at the same time",
}


def show_step(run: Path, step: int, limit: int, pieces: bool, silent: bool) -> dict[str, Any]:
    """Print the conversations of a step with the loss of each token, the highest loss first, and return all of them."""
    from whet.run.step_losses import step_conversations

    require_run(run)
    found = step_conversations(run, step)
    if silent:
        return found.as_dict()
    console = SafeConsole()
    if not found.exact:
        after = f"after step {found.weights}" if found.weights else "before the first step"
        info(
            f"the losses are those of the weights {after}, the nearest checkpoint"
            + (f": a replay would take {found.replay_s:.0f} s" if found.replay_s is not None else "")
        )
    ranked = sorted(found.conversations, key=lambda each: -(each.loss if each.loss is not None else -1.0))
    for each in ranked[:limit]:
        place = f"{each.source}:{each.line}"
        title = f"step {step} · {place} · {sum(each.supervised)} supervised tokens · loss {_number(each.loss)}"
        console.print(Text(f"── {escape_controls(title)} ──", style="bold"))
        shown = Text()
        for position, (text, loss) in enumerate(zip(each.texts, each.losses, strict=True)):
            if pieces:
                line = (
                    f"{position:6}  {each.ids[position]:7}  {_number(loss):>7}  {escape_controls(repr(text)[1:-1])}\n"
                )
                shown.append(line, style=_style(loss))
            else:
                note = "" if loss is None or loss < _HIGH else f"⟨{loss:.1f}⟩"
                shown.append(escape_controls(text) + note, style=_style(loss))
        console.print(shown)
    if limit < len(ranked):
        info(f"{limit} of {len(ranked)} conversations, those with the highest loss; --limit shows more")
    return found.as_dict()


def show_losses(run: Path, limit: int, silent: bool) -> dict[str, Any]:
    """Print the conversations that were never learned, forgotten, or look mislabelled, and return them."""
    require_run(run)
    found = ConversationLosses.read(run)
    if silent:
        return found.as_dict(limit)
    console = SafeConsole()
    seen = len(found.histories)
    console.print(f"{seen:,} of {found.total:,} conversations seen")
    if seen and found.histories.visits.max() < 2:
        info("no conversation was seen twice yet, so none can be never learned or forgotten")
    for pattern in LOSS_PATTERNS:
        rows = found.histories.rows(pattern)
        console.print(Text(f"{_TITLES[pattern]} ({len(rows):,})", style="bold"))
        if not len(rows):
            continue
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("place", overflow="fold")
        for title in ("tokens", "losses, by step"):
            table.add_column(title, justify="right" if title == "tokens" else "left")
        for each in found.showing(pattern, limit):
            losses = "  ".join(f"{step}: {loss:.3g}" for step, loss in zip(each.steps, each.losses, strict=True))
            table.add_row(Text(escape_controls(f"{each.source}:{each.line}")), str(each.tokens), losses)
        console.print(table)
    return found.as_dict(limit)


def require_run(run: Path) -> None:
    """Refuse what has no steps."""
    if not (run / "config.yaml").exists():
        raise WhetError(f"{run}: not a run: it has no config.yaml. --step and --losses need the folder of a run")


def _style(loss: float | None) -> str:
    if loss is None:
        return "dim"
    return "bold red" if loss >= _VERY_HIGH else "yellow" if loss >= _HIGH else "green"


def _number(loss: float | None) -> str:
    return "—" if loss is None else f"{loss:.3f}"
