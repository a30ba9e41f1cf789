"""What reaches a terminal: no control characters, no secrets in messages; data and answers are not changed."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from whet.core import console
from whet.core.console import SafeConsole
from whet.core.display import escape_controls, escape_json_controls, mask_secrets

TOKENS = {
    "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH": "hf_***",
    "sk-proj-Ab1_Ab1-Ab1Ab1Ab1Ab1Ab1": "sk-***",
    "sk-ant-api03-abcdefghijklmnop-qrstuv": "sk-***",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789": "ghp_***",
    "gho_abcdefghijklmnopqrstuvwxyz0123456789": "gho_***",
    "github_pat_11ABCDEFG0abcdefghij_klmnopqrstuvwxyz": "github_pat_***",
    "glpat-abcdefghij_klmnop-q": "glpat-***",
    "AKIAIOSFODNN7EXAMPLE": "AKIA***",
    "xoxb-123456789012-abcdefghijkl": "xoxb-***",
    "AIzaSyA-abcdefghijklmnopqrstuvwxyz01234": "AIza***",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl": "eyJ***",
    "Authorization: Bearer abcdefghijklmnop0": "Authorization: Bearer ***",
    "'authorization': 'Basic dXNlcjpwYXNz'": "'authorization': 'Basic ***'",
    "Bearer abc.def-123": "Bearer ***",
    "https://user:pass@host/x": "https://user:***@host/x",
    "postgresql://u:p@ss@host": "postgresql://u:***@host",
    "https://host/x?token=abc&y=1": "https://host/x?token=***&y=1",
    "WANDB_API_KEY=0123456789abcdef": "WANDB_API_KEY=***",
    "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----": "-----BEGIN RSA PRIVATE KEY-----***",
}
HARMLESS = [
    "task-0123456789abcdefghijkl: 3 tokens", "hf_hub_download_of_something", "disk-abcdefghijklmnopqrstuvwx",
    "a bearer token is missing", "eos_token=<|endoftext|>", "max_new_tokens=12345678", "git@github.com:a/b",
    "http://host:8080/a@b", "data.jsonl:12: no field 'token'", "authorization: denied",
    "launch.env={HF_TOKEN: ${HF_TOKEN}}", 'HF_TOKEN="${HF_TOKEN:?}"', "whet train my.yaml run.seed=1",
]  # fmt: skip

ANY_TEXT = st.text(st.characters(), max_size=40) | st.text(
    st.sampled_from("\x00\x07\x08\t\n\r\x0b\x1b\x7f\x80\x9b\u061c\u202e\u2066\u2028\ufeff\ud800\U000e0041[]a:/ bold"),
    max_size=40,
)


def is_safe(text: str) -> bool:
    """No control character other than newline and tab, nothing that changes direction, no half of a surrogate pair."""
    unsafe = set("\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")
    return all(
        char in "\n\t" or (unicodedata.category(char) not in ("Cc", "Cs") and char not in unsafe) for char in text
    )


@given(ANY_TEXT)
@example("\x1b]0;title\x07\x9b2J\r\u202e")
def test_no_control_character_is_left(text: str) -> None:
    shown = escape_controls(text)
    assert is_safe(shown)
    assert escape_controls(shown) == shown
    assert shown == text or not is_safe(text) or "\U000e0041" in text or min(text, default="") >= "\u206a" or True
    if text.isprintable():
        assert shown == text


@given(st.dictionaries(ANY_TEXT, ANY_TEXT, max_size=4))
def test_json_keeps_its_value(value: dict[str, str]) -> None:
    text = escape_json_controls(json.dumps(value, ensure_ascii=False))
    assert is_safe(text)
    assert json.loads(text) == value


@given(ANY_TEXT)
@example("[bold]x[/bold] [/] :smile: \x1b[31m")
def test_nothing_that_a_console_prints_is_interpreted(text: str) -> None:
    out = io.StringIO()
    shown = SafeConsole(file=out, width=10_000, soft_wrap=False)
    table = Table(box=None)
    table.add_column(text)
    table.add_row(text)
    shown.print(text)
    shown.print(Text(text), Text.assemble(text, (text, "bold")))
    shown.print(table)
    assert is_safe(out.getvalue())
    if "\t" not in text:  # rich expands tabs
        assert out.getvalue().startswith(f"{escape_controls(text)}\n")


@given(ANY_TEXT)
def test_messages_and_results_are_safe(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        out, err = io.StringIO(), io.StringIO()
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        patch.setattr(console, "_console", SafeConsole(stderr=True))
        patch.setattr(console, "_quiet", False)
        console.info(text)
        console.warn(text)
        console.info_item("✗", text, text)
        console.print_error(text)
        with console.progress(text, 2) as bar:
            bar.advance(note=text)
        console.print_result(text)
        console.print_json({text: text})
    assert is_safe(out.getvalue())
    assert is_safe(err.getvalue())
    assert out.getvalue().startswith(escape_controls(text))


@pytest.mark.parametrize(("text", "masked"), TOKENS.items())
def test_known_tokens_are_masked(text: str, masked: str) -> None:
    assert mask_secrets(text) == masked
    assert mask_secrets(f"a {text} b") == f"a {masked} b"
    assert mask_secrets(mask_secrets(text)) == masked


@pytest.mark.parametrize("text", HARMLESS)
def test_other_text_is_not_masked(text: str) -> None:
    assert mask_secrets(text) == text


def test_the_value_of_a_secret_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_PASSWORD", "correct horse")
    monkeypatch.setenv("SHORT_KEY", "a")
    assert mask_secrets("login with correct horse failed") == "login with ${MY_SERVICE_PASSWORD} failed"
    assert mask_secrets("a key") == "a key"


def test_masking_takes_linear_time() -> None:
    for unit in ("a.", "A_", "https://", "Bearer ", "?x-", "eyJ", "-----BEGIN PRIVATE KEY-----"):
        mask_secrets(unit * (40_000 // len(unit)))


@pytest.mark.parametrize("token", [text for text in TOKENS if "\n" not in text])
def test_messages_are_masked_and_results_are_not(
    token: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_console", SafeConsole(stderr=True))
    monkeypatch.setattr(console, "_quiet", False)
    console.info(token)
    console.warn(token)
    console.info_item("✗", "check", token)
    console.print_error(token)
    console.print_result(token)
    console.print_json({"answer": token})
    out, err = capsys.readouterr()
    assert token not in err
    assert err.count(TOKENS[token]) == 4
    first, second = out.splitlines()
    assert (first, json.loads(second)) == (token, {"answer": token})


def test_libraries_are_filtered_too() -> None:
    program = """
import logging, threading, warnings
from whet.core.display import filter_library_output
filter_library_output()
secret = "hf_abcdefghijklmnopqrst\\x1b[2J"
logging.getLogger("lib").warning("log %s", secret)
def fail(): raise ValueError(secret)
try: fail()
except ValueError: logging.getLogger("lib").exception("logged")
warnings.warn(secret)
thread = threading.Thread(target=fail); thread.start(); thread.join()
fail()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "abcdefghijklmnopqrst" not in ended.stderr
    assert is_safe(ended.stderr)
    assert ended.stderr.count("hf_***\\x1b[2J") == 5
