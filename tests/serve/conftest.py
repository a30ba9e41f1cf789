"""Servers for the tests: real ones on a free port, with a small model."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from web_servers import http_client, running

from whet.inference.inference_model import InferenceModel
from whet.inference.online_engine import NO_ADAPTERS
from whet.model.config import ModelConfig
from whet.model.load.builtin_models import builtin_folder
from whet.model.load.pretrained import load_model
from whet.run.models.load_models import LoadedModels, load_inference_model
from whet.serve.app import make_serving_app


@pytest.fixture(scope="session")
def tiny() -> InferenceModel:
    """builtin:tiny with larger weights, so that the most likely token is clear and answers differ."""
    loaded = load_inference_model("builtin:tiny")
    for parameter in loaded.model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(8)
    return loaded


@pytest.fixture(scope="session")
def serve_tiny(tiny: InferenceModel) -> Callable[..., contextlib.AbstractContextManager[str]]:
    """Starts a server of `tiny`."""

    def serve(max_requests: int = 32, token: str | None = None) -> contextlib.AbstractContextManager[str]:
        return running(make_serving_app(LoadedModels({"tiny": (tiny, None)}, NO_ADAPTERS), max_requests, token))

    return serve


@pytest.fixture(scope="session")
def server(serve_tiny: Callable[..., contextlib.AbstractContextManager[str]]) -> Iterator[str]:
    """The URL of a server of `tiny`."""
    with serve_tiny() as url:
        yield url


@pytest.fixture
def client(server: str) -> Iterator[Any]:
    """The openai client."""
    from openai import OpenAI

    with OpenAI(base_url=f"{server}v1", api_key="any", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture
def http(server: str) -> Iterator[httpx.Client]:
    with http_client(server) as found:
        yield found


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `tiny` as a folder."""
    folder = tmp_path_factory.mktemp("models") / "base"
    shutil.copytree(builtin_folder("builtin:tiny"), folder)
    model: Any = load_model(ModelConfig(path="builtin:tiny"), torch.float32)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(8)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapters(base_folder: Path) -> dict[str, Path]:
    """Adapters of `base_folder`, saved by peft, that change its answers: two of plain LoRA and one of DoRA."""
    from peft import LoraConfig, get_peft_model

    found = {}
    for seed, name in enumerate(("loud", "shy", "dora")):
        base = load_model(ModelConfig(path=str(base_folder)), torch.float32)
        settings = LoraConfig(
            r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", use_dora=name == "dora"
        )
        adapted = get_peft_model(base, settings)
        torch.manual_seed(seed)
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_A" in parameter_name or "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter)
        found[name] = base_folder.parent / name
        adapted.save_pretrained(found[name])
    return found
