"""What `whet dash` refuses: other hosts, other sites, other folders, large requests, scripts, missing tokens."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from runs.made_runs import make_run
from whet.dash.app import _assets
from whet.dash.runs_folder import NotFoundError, RunsFolder
from whet.web.server import bind

TOKEN = "correcthorsebatterystaple"


@pytest.fixture
def runs(tmp_path):
    make_run(tmp_path / "runs" / "one")
    return tmp_path / "runs"


# Hosts and tokens.


def test_dns_rebinding_gets_neither_page_nor_data(dash, runs):
    server = dash(runs)
    for path in ("/", "/api/runs", "/api/session", "/static/js/main.js"):
        refused = server.get(path, {"Host": "evil.example"})
        assert refused.status == 403, path
        assert b"one" not in refused.body


def test_without_a_host_or_with_two_it_is_refused(dash, runs):
    server = dash(runs)
    for lines in ("GET / HTTP/1.0\r\n\r\n", "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(lines.encode())
            assert re.match(rb"HTTP/1.[01] 4\d\d", client.recv(1000))


def test_an_address_that_others_reach_needs_a_token(whet, tmp_path, monkeypatch):
    monkeypatch.delenv("WHET_TOKEN", raising=False)
    for host in ("0.0.0.0", "::"):
        ended = whet("dash", tmp_path, "--host", host)
        assert ended.code == 1
        assert "needs a token" in ended.err


def test_with_a_token_everything_is_closed_without_it(dash, runs):
    server = dash(runs, TOKEN)
    for path in ("/", "/api/runs", "/api/session", "/static/js/main.js", "/api/live", f"/api/runs?token={TOKEN}"):
        assert server.get(path).status == 401, path
    for wrong in ("", "x", TOKEN[:-1], TOKEN + "x"):
        assert server.get("/api/runs", {"Cookie": f"whet_token={wrong}"}).status == 401
    assert server.request("POST", "/api/run/stop", b'{"run": "one"}').status == 401


def test_after_the_login_no_answer_has_the_token(dash, runs):
    server = dash(runs, TOKEN)
    opened = server.request("POST", "/login", f"token={TOKEN}".encode())
    assert (opened.status, opened.headers["location"]) == (303, "/")
    cookie = {"Cookie": opened.headers["set-cookie"].partition(";")[0]}
    for path in ("/", "/api/runs", "/api/session", "/api/run?run=one", "/api/run/curves?run=one"):
        answer = server.get(path, cookie)
        assert answer.status == 200
        assert TOKEN.encode() not in answer.body


# Changes.


def test_a_button_pressed_by_another_site_does_nothing(dash, runs):
    server = dash(runs)
    good = server.page_headers()
    body = json.dumps({"run": "one"}).encode()
    for verb in ("stop", "resume"):
        path = f"/api/run/{verb}"
        attempts = {
            "without the header": {k: v for k, v in good.items() if k != "x-whet-csrf"},
            "with another": good | {"x-whet-csrf": "guess"},
            "from another origin": good | {"origin": "http://evil.example"},
            "from a null origin": good | {"origin": "null"},
            "cross-site": good | {"sec-fetch-site": "cross-site"},
            "from the same site": good | {"sec-fetch-site": "same-site"},
            "as a form": good | {"content-type": "application/x-www-form-urlencoded"},
            "as text": good | {"content-type": "text/plain"},
        }
        for name, headers in attempts.items():
            assert server.request("POST", path, body, headers).status in (403, 415), name
        assert server.get(path, run="one").status == 405
    assert not (runs / "one" / "stop").exists()
    assert server.request("DELETE", "/api/runs", None, good).status in (403, 405)
    assert server.request("OPTIONS", "/api/run/stop", None, {"origin": "http://evil.example"}).status in (403, 405)


def test_a_page_of_another_site_cannot_even_ask(dash, runs):
    server = dash(runs)
    for site in ("cross-site", "same-site"):
        assert server.get("/api/runs", {"sec-fetch-site": site}).status == 403
        assert server.get("/", {"sec-fetch-site": site}).status == 200  # a link to the page
    assert server.get("/api/runs", {"sec-fetch-site": "same-origin"}).status == 200


def test_no_answer_allows_other_origins(dash, runs):
    headers = dash(runs).get("/api/session", {"origin": "http://evil.example"}).headers
    assert not any(name.startswith("access-control") for name in headers)


# Paths.


NAMES = ["../secret", "one/../../secret", "/etc", "one/../one", ".", "..", "", "one\0", "./one/..", "%2e%2e/secret"]


@pytest.mark.parametrize("name", [*NAMES, ".hidden", "one/checkpoints", "x" * 2000, "link", "~root"])
def test_no_name_leads_out_of_the_folder(runs, name):
    make_run(runs.parent / "secret")
    make_run(runs / ".hidden")
    (runs / "link").symlink_to(runs.parent / "secret")
    folders = RunsFolder(runs)
    with pytest.raises(NotFoundError):
        folders.find(name)
    assert folders.names() == ["one"]


def test_a_path_in_an_address_leads_nowhere(dash, runs):
    server = dash(runs)
    secret = runs.parent / "secret.txt"
    secret.write_text("the secret")
    paths = ("/static/../../secret.txt", "/static/%2e%2e/%2e%2e/secret.txt", "/static//etc/passwd", "/../etc/passwd")
    for path in (*paths, "/static/js/../../app.py", "/app.py", "/static/__init__.py", "/static/js/", "/openapi.json"):
        answer = server.get(path)
        assert answer.status == 404, path
        assert b"secret" not in answer.body.replace(path.encode(), b"")


LINKS = ["config.yaml", "metrics.jsonl", "samples.jsonl", "ledger.json", "logs", "logs/rank-0.log", "plan"]


@pytest.mark.parametrize(
    "name", [*LINKS, "evals/step-000001.json", "exports/merged/certificate.json", "exports/merged"]
)
def test_a_link_in_a_run_does_not_show_what_it_leads_to(dash, runs, name):
    outside = runs.parent / "outside"
    outside.mkdir()
    (outside / "rank-0.log").write_text("the secret\n")
    (outside / "certificate.json").write_text('{"the secret": 1}')
    link = runs / "one" / name
    link.unlink(missing_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside if "." not in link.name else outside / "rank-0.log")
    server = dash(runs)
    for path in ("/api/run", "/api/run/log", "/api/run/curves", "/api/run/ledger"):
        answer = server.get(path, run="one")
        assert answer.status == 404
        assert b"the secret" not in answer.body


def test_a_link_inside_the_folder_is_a_name_like_others(runs):
    (runs / "again").symlink_to(runs / "one")
    assert RunsFolder(runs).find("again")


# Content.


def test_the_policy_forbids_whatever_is_not_of_the_page(dash, runs):
    for path in ("/", "/api/runs", "/nothing", "/static/js/main.js"):
        headers = dash(runs).get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


def test_the_page_makes_no_html_of_text_and_loads_nothing_from_elsewhere():
    own = {name: content.decode() for name, (content, _) in _assets().items() if not name.startswith("vendor/")}
    assert {"index.html", "dash.css", "js/main.js", "report.css"} <= own.keys()
    for name, text in own.items():
        sinks = (
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc|javascript:|DOMParser"
        )
        assert not re.search(sinks, text), name
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|[\"'(]//", text), name
        assert not re.search(r"<script(?![^>]* src=)|<style| on\w+=\"| style=\"", text), name


def test_the_plot_library_is_the_one_that_was_published():
    """uPlot 1.6.32 of npm: these are the hashes of its files in docs/dash.md, too."""
    import hashlib

    from whet.dash import app

    folder = Path(app.__file__).parent / "static" / "vendor" / "uplot"
    documented = (Path(__file__).parents[2] / "docs" / "dash.md").read_text()
    for name in ("uPlot.esm.js", "uPlot.min.css", "LICENSE"):
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() in documented, name
    assert "MIT License" in (folder / "LICENSE").read_text()


SECRET = "hf_abcdefghijklmnopqrstuvwx"


def test_no_secret_is_shown(dash, runs):
    run = runs / "one"
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("builtin:tiny", f"https://user:{SECRET}@host/model"))
    (run / "logs").mkdir()
    (run / "logs" / "rank-0.log").write_text(f"token {SECRET}\n")
    (run / "events.jsonl").write_text(json.dumps({"step": 1, "reason": f"Authorization: Bearer {SECRET}"}) + "\n")
    (run / "ledger.jsonl").write_text(
        json.dumps({"outcome": "dropped", "reason": "x", "detail": SECRET, "file": SECRET}) + "\n"
    )
    make_run(runs / "two")
    server = dash(runs)
    for path in ("/api/run", "/api/run/log", "/api/run/ledger", "/api/run/curves"):
        answer = server.get(path, run="one")
        assert answer.status == 200
        assert SECRET.encode() not in answer.body
    for answer in (
        server.get("/api/compare", run=["one", "two"]),
        server.get("/api/runs"),
        server.get("/api/run", run=SECRET),
    ):
        assert b"abcdefghijklmnop" not in answer.body
    with server_events(server, "/api/live?run=one") as events:
        assert SECRET.encode() not in events.read1(4000) + events.read1(4000)


def server_events(server, path):
    import urllib.request

    return urllib.request.urlopen(server.url + path, timeout=20)


# Sizes.


def test_large_requests_are_refused(dash, runs):
    server = dash(runs)
    own = server.page_headers()
    assert server.get("/api/run", run="x" * 9000).status == 422
    assert server.request("POST", "/api/run/stop", b"x" * 300_000, own).status == 413
    chunked = own | {"transfer-encoding": "chunked"}
    body = b"".join(b"10000\r\n" + b"x" * 65536 + b"\r\n" for _ in range(5)) + b"0\r\n\r\n"
    assert server.request("POST", "/api/run/stop", body, chunked).status in (400, 413)
    assert server.get("/api/run/curves", run="one", points=10**9).status == 422
    assert server.get("/api/compare", run=["one"] * 30).status in (400, 422)


def test_a_request_line_longer_than_the_limit_is_refused(dash, runs):
    line = b"GET /api/run?run=".ljust((32 << 10) + 1, b"x")  # a longer one could be answered by a closed connection
    with socket.create_connection(("127.0.0.1", dash(runs).port), timeout=60) as connection:
        connection.sendall(line)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b'{"run": 1}', b"{", b'{"run": "../x"}', b'"\xff"', b'{"run": {}}']
)
def test_a_body_that_makes_no_sense_is_an_error_of_the_client(dash, runs, body):
    server = dash(runs)
    own = server.page_headers()
    answer = server.request("POST", "/api/run/stop", body, own)
    assert answer.status in (400, 404, 422)
    assert "error" in answer.json


# The command.


def test_the_command_prints_its_address_and_listens_on_loopback_alone(tmp_path, runs):
    environment = {**os.environ, "WHET_TOKEN": ""}
    with subprocess.Popen(
        [sys.executable, "-m", "whet", "dash", str(runs), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment, cwd=tmp_path,
    ) as process:  # fmt: skip
        try:
            printed = json.loads(process.stdout.readline())
            port = int(printed["url"].removesuffix("/").rpartition(":")[2])
            assert printed["url"] == f"http://127.0.0.1:{port}/"
            listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            hexadecimal = f":{port:04X}"
            assert {each[1] for each in listening if each[3] == "0A" and each[1].endswith(hexadecimal)} == {
                f"0100007F{hexadecimal}"
            }
        finally:
            process.send_signal(2)
            _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert "shutdown failed" not in errors


def test_a_folder_that_is_not_there_and_a_port_in_use_are_errors(whet, tmp_path):
    ended = whet("dash", tmp_path / "nowhere")
    assert ended.code == 1
    assert "nowhere: no such folder" in ended.err
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        ended = whet("dash", tmp_path, "--port", port)
    assert ended.code == 1
    assert f"127.0.0.1:{port}" in ended.err
