"""Many clients at once against a real model: none fails, all progress together, memory stays bounded."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from web_servers import http_client

from small_models import smollm2_folder

TOKENS = 48


@pytest.fixture
def url(real_python: str) -> Iterator[str]:
    """A server of builtin:smollm2 in a process of its own."""
    smollm2_folder()
    command = [real_python, "-m", "whet", "serve", "builtin:smollm2", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            found = next(match for line in server.stderr if (match := re.search(r"http://\S+/", line)))
            yield found[0]
            server.terminate()
            assert server.wait(120) == 0
        finally:
            server.kill()


def question(number: int) -> str:
    return f"Tell me {number + 3} facts about the number {number}."


async def stream_chats(url: str, clients: int, tokens: int) -> tuple[list[dict[str, Any]], list[int]]:
    """(each client's text, chunks and times; the server's memory meanwhile)."""
    memory: list[int] = []
    counts = [0] * clients
    first_end: list[list[int]] = []

    async def chat(client: AsyncOpenAI, number: int) -> dict[str, Any]:
        began, first, text = time.monotonic(), None, ""
        stream = await client.chat.completions.create(
            model="builtin:smollm2", stream=True, temperature=0, max_tokens=tokens,
            messages=[{"role": "user", "content": question(number)}],
        )  # fmt: skip
        reason = None
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                first = first or time.monotonic() - began
                text += chunk.choices[0].delta.content
                counts[number] += 1
            reason = chunk.choices[0].finish_reason or reason
        first_end.append(list(counts))
        return {"text": text, "reason": reason, "first": first, "whole": time.monotonic() - began}

    async def watch(http: httpx.AsyncClient) -> None:
        while True:
            text = (await http.get("/metrics")).text
            memory.append(int(next(re.finditer(r"whet_resident_bytes (\d+)", text))[1]))
            await asyncio.sleep(1)

    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=600) as http,
        AsyncOpenAI(
            base_url=f"{url}v1", api_key="any", max_retries=0,
            http_client=httpx.AsyncClient(limits=limits, timeout=600),
        ) as client,
    ):  # fmt: skip
        watching = asyncio.create_task(watch(http))
        answers = await asyncio.gather(*(chat(client, number) for number in range(clients)))
        watching.cancel()
    return [{**answer, "at_first_end": min(first_end[0])} for answer in answers], memory


@pytest.mark.slow
def test_64_concurrent_chats_on_two_cores(url: str, whet: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (alone,), idle = asyncio.run(stream_chats(url, 1, TOKENS))
    chat = whet("chat", "builtin:smollm2", "--prompt", question(0), "--max-new-tokens", TOKENS, "--json")
    assert json.loads(chat.out)["answer"] == alone["text"]
    began = time.monotonic()
    answers, memory = asyncio.run(stream_chats(url, 64, TOKENS))
    seconds = time.monotonic() - began
    failed = [answer for answer in answers if answer["reason"] not in ("stop", "length") or not answer["text"]]
    firsts = sorted(answer["first"] for answer in answers if answer["first"] is not None)
    with capsys.disabled():
        sys.stdout.write(
            f"\n64 requests, {len(failed)} failed, {seconds:.1f} s; time to first token p50 "
            f"{statistics.median(firsts):.2f} s, p95 {firsts[60]:.2f} s (alone {alone['first']:.2f} s); memory "
            f"{max(idle) / 2**20:.0f} MiB before, {max(memory) / 2**20:.0f} MiB at most; chunks of the slowest client "
            f"when the first one ended: {answers[0]['at_first_end']}\n"
        )
    assert failed == []
    assert answers[0]["text"] == alone["text"]
    assert answers[0]["at_first_end"] > 0, "a client had nothing when another was done"
    assert max(memory) - max(idle) < 3 * 2**30


def test_many_clients_get_the_answers_that_each_gets_alone(server: str) -> None:
    """The fast one of the same fact, with a tiny model."""

    def ask(number: int) -> str:
        body = {"model": "tiny", "prompt": f"Number {number}:", "max_tokens": 6, "temperature": 0}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    with http_client(server) as http, ThreadPoolExecutor(16) as pool:
        alone = [ask(number) for number in range(16)]
        assert list(pool.map(ask, range(16))) == alone
    assert len(set(alone)) > 4
