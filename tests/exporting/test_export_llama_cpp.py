"""llama.cpp loads an exported GGUF: same tokens, same prompt, same greedy answers as transformers.

It runs with an fp32 cache and without flash attention, otherwise rounding changes the answers.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from small_models import smollm2_folder
from whet.exporting.exporter import write_export
from whet.model.config import AdapterConfig, ModelConfig
from whet.model.load.pretrained import load_model
from whet.model.load.tokenizer import load_tokenizer
from whet.model.lora.peft_adapters import add_adapter

QUESTIONS = ["Please send 12 red mugs to Anna in Riga by Mon.", "What is 1234567 + 89?", "Name three colours."]
TEXTS = [
    "Größe: 1234567,89 €\n\n\tThe 2nd line's   gap; <b>tag</b> 漢字 🙂 don't WE'LL x=3.14",
    "in 2026 there were 100000 of them, 3 of which  \n\n\n   were lost...\r\n",
    "<|im_start|>user\nHi<|im_end|>\n",
]


class LlamaCpp:
    """llama.cpp's server, running in this process."""

    def __init__(self, file: Path) -> None:
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path, settings.n_ctx, settings.warmup = str(file), 1024, False
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(settings)

    def request(self, path: str, **body: Any) -> Any:
        address = f"{self._server.listening_address}/{path}"
        request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())


@pytest.mark.slow
@pytest.mark.parametrize("path", ["builtin:tiny", "builtin:smollm2"])
def test_llama_cpp_gives_the_same_answers(path: str, export_spec_of: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    if path == "builtin:smollm2":
        smollm2_folder()
    config = ModelConfig(path=path)
    tokenizer = load_tokenizer(config)
    model = add_adapter(load_model(config, torch.float32), AdapterConfig(rank=4), seed=0).eval()
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.002)
    certificate = write_export(
        export_spec_of(model, tokenizer=tokenizer), "gguf", tmp_path / "gguf", [tokenizer.encode(TEXTS[0])]
    )
    merged = model.merge_and_unload()
    llama = LlamaCpp(tmp_path / "gguf" / next(iter(certificate.files)))
    for text in TEXTS:
        found = llama.request("tokenize", content=text, add_special=False, parse_special=True)["tokens"]
        assert found == tokenizer.encode(text, add_special_tokens=False)
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert llama.request("apply-template", messages=messages)["prompt"] == prompt
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        answer = llama.request("completion", prompt=ids, n_predict=24, temperature=0, top_k=1, return_tokens=True)
        with torch.inference_mode():
            expected = merged.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=2)
        assert [number for number in answer["tokens"] if number != 2] == [
            number for number in expected[0, len(ids) :].tolist() if number != 2
        ]
