"""`whet serve` on CUDA, over real HTTP: concurrent streams, CUDA graphs, adapters mixed in a batch."""

from __future__ import annotations

import json
import shutil
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="needs fastapi, of the serve extra")
pytest.importorskip("uvicorn", reason="needs uvicorn, of the serve extra")

from serve.web_servers import running
from whet.data.conversation import Message
from whet.inference.inference_model import InferenceModel
from whet.model.config import ModelConfig
from whet.model.load.builtin_models import builtin_folder
from whet.model.load.pretrained import load_model
from whet.run.models.load_models import load_inference_model, load_models_to_serve
from whet.serve.app import make_serving_app

pytestmark = pytest.mark.gpu

TOKENS = 40
QUESTIONS = [f"{'Tell me more. ' * (number * 5 % 23)}What is {number}?" for number in range(24)]
"""Prompts of 10 to 300 tokens."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """builtin:tiny with larger weights, so that the most likely token is clear and answers differ."""
    folder = tmp_path_factory.mktemp("models") / "base"
    shutil.copytree(builtin_folder("builtin:tiny"), folder)
    model: Any = load_model(ModelConfig(path="builtin:tiny"), torch.float32)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(8)
    model.save_pretrained(folder)
    return folder


def greedy_answer(model: InferenceModel, question: str) -> str:
    """What transformers generates."""
    prompt = model.prompt_ids([Message("user", question)])
    module: Any = model.model
    tokens = torch.tensor([prompt], device=next(module.parameters()).device)
    with model.context():
        output = module.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=TOKENS,
            eos_token_id=list(model.stop_ids), pad_token_id=model.pad_id,
        )  # fmt: skip
    ids = output[0, len(prompt) :].tolist()
    return model.decode([token for token in ids if token not in model.stop_ids])


def streamed_answer(url: str, name: str, question: str) -> str:
    """What the server streams, read without a client library."""
    body = {
        "model": name, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": TOKENS,
        "stream": True,
    }  # fmt: skip
    request = urllib.request.Request(f"{url}v1/chat/completions", json.dumps(body).encode())
    text, is_done = "", False
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            is_done = is_done or data == "[DONE]"
            if data and data != "[DONE]":
                text += json.loads(data)["choices"][0]["delta"].get("content", "")
    assert is_done
    return text


def test_concurrent_streams_are_what_transformers_generates(base: Path) -> None:
    loaded = load_models_to_serve([str(base)])
    model, _ = loaded.models["base"]
    assert next(model.model.parameters()).device.type == "cuda"
    expected = [greedy_answer(model, question) for question in QUESTIONS]
    assert len(set(expected)) > len(QUESTIONS) / 2
    with running(make_serving_app(loaded, 32)) as url, ThreadPoolExecutor(len(QUESTIONS)) as pool:
        for _ in range(2):  # the second time with CUDA graphs that were captured
            assert list(pool.map(lambda question: streamed_answer(url, "base", question), QUESTIONS)) == expected


def test_adapters_mixed_in_a_batch_answer_as_each_alone(base: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    for seed, name in enumerate(("loud", "shy")):
        settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(load_model(ModelConfig(path=str(base)), torch.float32), settings)
        torch.manual_seed(seed)
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_A" in parameter_name or "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter)
        adapted.save_pretrained(base.parent / name)
    folders = [base, base.parent / "loud", base.parent / "shy"]
    expected = {
        folder.name: [greedy_answer(load_inference_model(str(folder)), question) for question in QUESTIONS[:6]]
        for folder in folders
    }
    assert expected["loud"] != expected["shy"] != expected["base"]
    loaded = load_models_to_serve([str(folder) for folder in folders])
    assert loaded.adapters.mixed
    asked = [(name, number) for number in range(6) for name in expected]
    with running(make_serving_app(loaded, 32)) as url, ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda each: streamed_answer(url, each[0], QUESTIONS[each[1]]), asked))
    assert found == [expected[name][number] for name, number in asked]
