"""Requests that are wrong, too many, or abandoned: a clear answer in OpenAI's form, and nothing else disturbed."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tool_calls import HERMES, renderer
from web_servers import http_client, running

from whet.inference.inference_model import InferenceModel
from whet.inference.online_engine import NO_ADAPTERS
from whet.run.models.load_models import LoadedModels
from whet.serve.app import make_serving_app
from whet.serve.requests import ChatRequest, CompletionRequest, parse_request
from whet.web import server as server_module
from whet.web.request_guard import Rejection

GOOD: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 2,
}  # fmt: skip
CHAT = "/v1/chat/completions"


def metric(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"whet_{name} ")))


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"model": None}, 400, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": "Hello"}, 400, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages"),
        ({"messages": [{"role": "tool", "content": "4"}]}, 400, "messages"),
        ({"n": 0}, 400, "n"),
        ({"n": 33}, 400, "n"),
        ({"n": True}, 400, "n"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_completion_tokens": 1.5}, 400, "max_completion_tokens"),
        ({"temperature": 3}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 1.1}, 400, "top_p"),
        ({"stop": ""}, 400, "stop"),
        ({"stop": ["a"] * 17}, 400, "stop"),
        ({"stop": "\ud800"}, 400, "stop"),
        ({"stream": "yes"}, 400, "stream"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty"),
        ({"frequency_penalty": -1}, 400, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"tools": "calculator"}, 400, "tools"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"reasoning_effort": "high"}, 400, "reasoning_effort"),
        ({"tempreature": 0.5}, 400, "tempreature"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(http: httpx.Client, changes: dict[str, Any], status: int, param: str) -> None:
    answer = http.post(CHAT, content=json.dumps({**GOOD, **changes}))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


def test_what_has_no_effect_is_accepted(http: httpx.Client) -> None:
    neutral = {
        "user": "me", "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "tools": None, "stop": None,
        "response_format": {"type": "text"}, "metadata": {"a": "b"}, "tool_choice": "none", "seed": None, "top_p": 0,
    }  # fmt: skip
    assert http.post(CHAT, json={**GOOD, **neutral}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"\xff", b'{"model": NaN}', b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
def test_a_malformed_body_is_an_error_of_the_client(http: httpx.Client, body: bytes) -> None:
    answer = http.post(CHAT, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_paths_and_methods_that_do_not_exist(http: httpx.Client) -> None:
    for path in ("/v1/embeddings", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/chat.js/../page.html", "/docs"):
        answer = http.get(path)
        assert answer.status_code == 404, path
        assert answer.json()["error"]["message"]
    assert http.get(CHAT).status_code == 405
    assert http.post("/health").status_code == 405


def test_a_huge_body_is_refused(http: httpx.Client) -> None:
    answer = http.post(CHAT, content=b" " * (5 << 20))
    assert answer.status_code == 413


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, "logit_bias", "x"}))


TEXT = st.text(st.characters(), max_size=8)  # with lone surrogates


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(FIELDS, JSON | TEXT, max_size=4), st.sampled_from([ChatRequest, CompletionRequest]))
def test_any_json_is_a_request_or_refused_with_a_reason(
    changes: dict[str, Any], kind: type[ChatRequest | CompletionRequest]
) -> None:
    body = json.dumps({**GOOD, "prompt": "Hello", **changes}).encode()
    refused: Rejection | None = None
    try:
        parse_request(kind, body).sampling(0)
    except Rejection as error:
        refused = error
    assert refused is None or (refused.status == 400 and json.loads(refused.body())["error"]["message"])


CALL = st.fixed_dictionaries({
    "id": TEXT, "type": st.just("function"),
    "function": st.fixed_dictionaries({"name": TEXT, "arguments": st.sampled_from(["{}", "[]", "{", "null"]) | TEXT}),
})  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer", "function"])},
    optional={
        "content": TEXT | st.none() | JSON | st.just([{"type": "text", "text": "x"}]), "tool_calls": st.lists(CALL),
        "tool_call_id": TEXT, "name": TEXT, "refusal": st.none(), "reasoning_content": TEXT,
    },
)  # fmt: skip
TOOL = st.fixed_dictionaries({
    "type": st.just("function"),
    "function": st.fixed_dictionaries({"name": TEXT}, optional={"description": TEXT | JSON, "parameters": JSON}),
})  # fmt: skip
PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.lists(MESSAGE, min_size=1, max_size=3), "tools": st.lists(TOOL, max_size=2),
    "seed": st.integers(), "temperature": st.floats(0, 2), "top_p": st.floats(0, 1), "top_k": st.integers(0, 10**6),
    "min_p": st.floats(0, 1), "repetition_penalty": st.floats(0.01, 100), "stop": st.lists(TEXT, max_size=3) | TEXT,
    "logprobs": st.booleans() | st.integers(0, 20), "top_logprobs": st.integers(0, 20), "stream": st.booleans(),
    "n": st.integers(1, 3), "prompt": TEXT | st.lists(TEXT, max_size=2) | st.lists(st.integers(-1, 420), max_size=4),
    "stream_options": st.just({"include_usage": True}), "tool_choice": st.sampled_from(["auto", "none", "required"]),
}  # fmt: skip
"""Values that are right more often than not: they come further than `JSON`."""


@st.composite
def odd_bodies(draw: Any) -> tuple[str, dict[str, Any]]:
    """(path, a good body with up to three fields changed)."""
    path = draw(st.sampled_from([CHAT, "/v1/completions"]))
    kind, other = (ChatRequest, "messages") if path == CHAT else (CompletionRequest, "prompt")
    names = sorted(name for name in kind.model_fields if name not in ("model", "max_tokens", "max_completion_tokens"))
    body = {"model": draw(st.sampled_from(["tiny", "tools"])), other: GOOD["messages"] if path == CHAT else "Hello"}
    for name in draw(st.lists(st.sampled_from(names), unique=True, max_size=3)):
        body[name] = draw(PLAUSIBLE.get(name, JSON) | (JSON if name != "n" else st.none()))
    return path, {**body, "max_tokens": 2}


def post_odd_bodies(tiny: InferenceModel, examples: int) -> set[int]:
    """The statuses that servers of `tiny` give, with a template that has no tools and with one that has."""
    with_tools = replace(tiny, renderer=renderer(HERMES))
    statuses = set()
    models = LoadedModels({"tiny": (tiny, None), "tools": (with_tools, None)}, NO_ADAPTERS)
    with running(make_serving_app(models, 32)) as url, http_client(url) as http:

        @settings(max_examples=examples, deadline=None)
        @given(odd_bodies())
        def post(odd: tuple[str, dict[str, Any]]) -> None:
            answer = http.post(odd[0], content=json.dumps(odd[1]))
            statuses.add(answer.status_code)
            assert answer.status_code in (200, 400), answer.text
            assert answer.status_code == 200 or answer.json()["error"]["message"]
            assert "generation failed" not in answer.text

        post()
    return statuses


def test_odd_requests_get_an_answer_from_a_server(tiny: InferenceModel) -> None:
    assert post_odd_bodies(tiny, 25) <= {200, 400}


@pytest.mark.slow
def test_a_thousand_odd_requests_get_an_answer_from_a_server(tiny: InferenceModel) -> None:
    """`test_odd_requests_get_an_answer_from_a_server` with more of them."""
    assert post_odd_bodies(tiny, 1000) == {200, 400}


# Too many, and clients that leave


@pytest.fixture
def gate(tiny: InferenceModel) -> Iterator[threading.Event]:
    """While it is cleared, the engine does not finish a step."""
    found = threading.Event()
    found.set()

    def wait(*_: Any) -> None:
        assert found.wait(60)

    hook = tiny.model.register_forward_pre_hook(wait)
    yield found
    found.set()
    hook.remove()


def test_requests_over_the_limit_get_429_and_a_disconnect_frees_the_slot(
    serve_tiny: Callable[..., contextlib.AbstractContextManager[str]], gate: threading.Event
) -> None:
    with serve_tiny(max_requests=1) as url, http_client(url) as http:
        gate.clear()
        with http.stream("POST", CHAT, json={**GOOD, "max_tokens": 4000, "stream": True}) as stream:
            lines = stream.iter_lines()  # kept: the connection is closed with it
            next(lines)
            full = http.post(CHAT, json=GOOD)
            assert full.status_code == 429
            assert int(full.headers["retry-after"]) > 0
            assert full.json()["error"]["type"] == "rate_limit_error"
        wait_until(lambda: metric(http, "disconnected_total") == 1)
        gate.set()
        assert http.post(CHAT, json=GOOD).status_code == 200
        wait_until(lambda: metric(http, "sequences_running") == 0)
        assert metric(http, "generated_tokens_total") <= 2


def test_a_client_that_leaves_while_it_waits_for_a_whole_answer_frees_the_slot(
    serve_tiny: Callable[..., contextlib.AbstractContextManager[str]], gate: threading.Event
) -> None:
    with serve_tiny(max_requests=1) as url, http_client(url) as http:
        body = json.dumps({**GOOD, "max_tokens": 4000}).encode()
        address = httpx.URL(url)
        gate.clear()
        with socket.create_connection((address.host, address.port)) as raw:
            raw.sendall(b"POST %b HTTP/1.1\r\nHost: localhost\r\n" % CHAT.encode())
            raw.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            wait_until(lambda: metric(http, "prompt_tokens_total") > 0)
            assert http.post(CHAT, json=GOOD).status_code == 429
        gate.set()
        wait_until(lambda: http.post(CHAT, json=GOOD).status_code == 200)


def test_clients_that_hang_do_not_disturb_others(http: httpx.Client, server: str) -> None:
    address = httpx.URL(server)
    with contextlib.ExitStack() as stack:
        for sent in (b"", b"POST", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"):
            raw = stack.enter_context(socket.create_connection((address.host, address.port)))
            raw.sendall(sent)
        assert http.post(CHAT, json=GOOD).status_code == 200
        assert http.get("/health").json() == {"status": "ok"}


def test_a_connection_without_a_request_is_closed(
    serve_tiny: Callable[..., contextlib.AbstractContextManager[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_MAX_IDLE_S", 0.4)
    with serve_tiny() as url:
        address = httpx.URL(url)
        for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: loc"):
            with socket.create_connection((address.host, address.port), timeout=60) as raw:
                raw.sendall(sent)
                assert raw.recv(1) == b""


def test_a_failure_of_the_engine_ends_its_requests_and_not_the_server(
    serve_tiny: Callable[..., contextlib.AbstractContextManager[str]], tiny: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    with serve_tiny() as url, http_client(url) as http:

        def fail(*_: Any) -> None:
            raise RuntimeError("the device has no memory left")

        hook = tiny.model.register_forward_pre_hook(fail)
        try:
            broken = http.post(CHAT, json=GOOD)
            streamed = http.post(CHAT, json={**GOOD, "stream": True})
        finally:
            hook.remove()
        assert broken.status_code == 500
        assert broken.json()["error"] == {
            "message": "generation failed: the device has no memory left", "type": "server_error", "param": None,
            "code": None,
        }  # fmt: skip
        assert "generation failed" in streamed.text
        assert http.post(CHAT, json=GOOD).status_code == 200
    assert "RuntimeError" in capfd.readouterr().err
