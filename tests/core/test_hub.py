"""The hub is asked once, visibly, and not for long; the server here is a real one on this machine."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from whet.core import hub
from whet.core.errors import WhetError


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A hub whose answers the test appends; then the paths it was asked for."""
    script: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(script.pop(0))
            self.end_headers()
            script.append(self.path)

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{running.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(hub, "_WAITS_S", (0.01, 0.02, 0.04))
        hub._find_problem.cache_clear()
        yield script
        running.shutdown()
    hub._find_problem.cache_clear()


def test_retries_are_printed_and_end(server: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    server += [503, 429, 200]
    hub.reach_hub("owner/model")
    hub.reach_hub("owner/model")  # known by now
    assert server == ["/api/models/owner/model"] * 3
    shown = capfd.readouterr().err
    assert "owner/model: asking 127.0.0.1" in shown
    assert "HTTP 503; trying again in 0 s (attempt 1 of 4)" in shown
    assert "HTTP 429; trying again in 0 s (attempt 2 of 4)" in shown
    assert "owner/model: downloading; the next time it is read from" in shown


def test_the_whole_wait_is_bounded() -> None:
    assert sum(hub._WAITS_S) + (len(hub._WAITS_S) + 1) * hub._TIMEOUT_S <= 30


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_model_that_the_hub_does_not_have(server: list[Any], status: int) -> None:
    server += [status]
    with pytest.raises(WhetError, match=rf"has no such dataset, or it needs your login \(HTTP {status}\)"):
        hub.reach_hub("owner/data", "datasets")
    assert server == ["/api/datasets/owner/data"]


def test_without_a_network_the_cache_serves_or_the_error_says_so(
    server: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    with pytest.raises(WhetError, match=r"no such folder here, and 127\.0\.0\.1:9 cannot be reached"):
        hub.reach_hub("owner/model")
    (tmp_path / "cache/models--owner--other/snapshots/abc").mkdir(parents=True)
    hub.reach_hub("owner/other")
    assert "the copy of owner/other in the cache is used" in capfd.readouterr().err
    assert constants.HF_HUB_OFFLINE  # so that no library tries again for each file


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("Qwen/Qwen3-0.6B", True), ("runs/my@best", False), ("my-model", False), ("a/b/c", False), ("../x", False),
     ("owner/na me", False), ("~/model", False)],
)  # fmt: skip
def test_only_names_that_look_like_one_are_asked_for(name: str, is_one: bool) -> None:
    assert hub.is_hub_name(name) == is_one
