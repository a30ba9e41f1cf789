"""`whet serve` as a process: it starts, answers, stops, and refuses what it should."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from web_servers import http_client

TOKEN = "0123456789abcdef0123"


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of builtin:tiny that needs a token, and its URL."""
    log = tmp_path / "log"
    with log.open("w") as file:
        started = subprocess.Popen(
            [sys.executable, "-m", "whet", "serve", "builtin:tiny", "--port", "0", "--host", "0.0.0.0"],
            stderr=subprocess.PIPE, stdout=file, text=True, env={**os.environ, "WHET_TOKEN": TOKEN},
        )  # fmt: skip
    assert started.stderr is not None
    lines = []
    for line in started.stderr:
        lines.append(line)
        if found := re.search(r"http://\S+/", line):
            break
    assert found, lines
    yield started, found[0]
    started.kill()
    started.wait()


def test_sigterm_lets_an_answer_finish_and_nothing_shows_the_token(process: tuple[Any, str]) -> None:
    server, url = process
    mine = {"authorization": f"Bearer {TOKEN}"}
    body = {
        "model": "builtin:tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300, "stream": True,
        "temperature": 0,
    }  # fmt: skip
    with http_client(url) as http:
        assert http.get("/v1/models").status_code == 401
        assert http.post("/v1/chat/completions", json=body).status_code == 401
        assert http.get("/health").status_code == 200
        page = http.get("/", headers=mine)
        with http.stream("POST", "/v1/chat/completions", json=body, headers=mine) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            server.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert TOKEN not in page.text + first
    errors = server.stderr.read()
    assert server.wait(60) == 0
    assert "stopped" in errors
    assert TOKEN not in errors


def test_the_page_has_no_script_or_style_of_its_own(http: httpx.Client) -> None:
    page = http.get("/").text
    assert "<script src=" in page
    assert not re.search(r"<style|style=|onclick|<script>|https?://", page)
    for path in re.findall(r'(?:src|href)="(/[^"]+)"', page):
        assert http.get(path).status_code == 200
    script = http.get("/chat.js").text
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)


def test_wrong_use_is_an_error_before_anything_is_loaded(
    whet: Any, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WHET_TOKEN", raising=False)
    for arguments, reason in (
        (["builtin:tiny", "--host", "0.0.0.0"], "export WHET_TOKEN"),
        (["builtin:nothing"], "builtin:nothing"),
        (["builtin:tiny", "builtin:smollm2"], "not an adapter"),
        ([str(adapters["loud"]), str(adapters["loud"])], "given twice"),
        (["builtin:smollm2", str(adapters["loud"])], "an adapter of"),
    ):
        ended = whet("serve", *arguments, "--port", "0")
        assert (ended.code, reason in ended.err) == (1, True), ended.err
        assert "Traceback" not in ended.err


def test_help_says_what_to_use_in_production(whet: Any) -> None:
    shown = whet("serve", "--help").out
    for program in ("vllm serve", "sglang.launch_server", "llama-server", "ollama create"):
        assert program in shown
