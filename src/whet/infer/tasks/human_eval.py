"""HumanEval: the model completes a Python function, and tests decide. What it writes is run in the sandbox only."""

from __future__ import annotations

import re
import secrets
from functools import partial

from whet.infer.sandbox import Limits, Mode, require_sandbox, run_program
from whet.infer.scorers import fenced
from whet.infer.tasks.task import Example, Scorer

FIELDS = frozenset({"prompt", "test", "entry_point"})


def question(prompt: str) -> str:
    """The user's turn; how it is put is whet's own."""
    wish = "Complete this Python function. Answer with the whole function in one ```python block."
    return f"{wish}\n\n```python\n{prompt.rstrip()}\n```"


def tests_scorer(mode: Mode) -> Scorer:
    """Right is what passes the tests. A SandboxError at once where nothing can be run."""
    require_sandbox(mode)
    return Scorer("tests", partial(_passes, mode), empty=0.0, waits=True, verbatim=True)


def _passes(mode: Mode, answer: str, example: Example) -> float:
    """The last line must be a word that is printed after the tests: a program that ends early, with whatever exit code,
    has not passed them. One that sets out to deceive could read the word; models that were not made to do not."""
    word = secrets.token_hex(16)
    outcome = run_program(f"{program(answer, example)}\nprint()\nprint({word!r})\n", Limits(), mode)
    return float(outcome.code == 0 and outcome.out.rstrip("\n").rpartition("\n")[2] == word)


def program(answer: str, example: Example) -> str:
    """The function as answered, below what the prompt has above it, and its tests. An answer without the function's
    head is taken for its body."""
    prompt, name = example.more["prompt"], example.more["entry_point"]
    code, head = fenced(answer) if "```" in answer else answer, rf"^def\s+{re.escape(name)}\b"
    if re.search(head, code, re.MULTILINE):
        above = re.split(head, prompt, maxsplit=1, flags=re.MULTILINE)[0]
        code = f"{above}\n{code}"
    else:
        code = prompt + code
    return f"{code}\n\n{example.more['test']}\n\ncheck({name})"
