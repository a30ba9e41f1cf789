"""The generation speed of whet and of transformers, for the same model and prompts.

    python bench/generate.py --model llama-1b [--prompts 256] [--batch 64] [--sample] [--profile]
    python bench/generate.py --model builtin:smollm2 --questions gsm8k_test.jsonl [--dtype fp32]

With --questions: greedy answers to the questions of a file in GSM8K's format, rendered with the model's chat template,
up to a stop token or 400 tokens, by whet, by transformers' continuous batching (`generate_batch`) and by `generate`;
`equal` is the share of answers that equal those of `generate`. Otherwise, answers of fixed length to random prompts:

Prompts have 20 to 500 random tokens, answers 16 to 256: the answer length of every prompt is fixed, without stop
tokens. whet batches continuously; `generate` gets padded batches of prompts of similar length and runs each batch to
its longest answer. Only requested tokens count. `agreement` compares greedy answers: the share of tokens before the
first difference (16-bit matmuls round differently by batch). Without CUDA a tiny model is used. The last line is a JSON
object.
"""

from __future__ import annotations

import argparse
import json
import operator
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from whet.data.conversation import Message
from whet.data.render.renderer import Renderer
from whet.inference.generate import generate
from whet.inference.inference_model import stop_token_ids
from whet.inference.sampling import Sampling
from whet.model.config import ModelConfig
from whet.model.load.pretrained import load_model
from whet.model.load.tokenizer import load_tokenizer

CUDA = torch.cuda.is_available()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="llama-1b" if CUDA else "builtin:tiny", help="the name of a model shape, or any model"
    )
    parser.add_argument("--prompts", type=int, default=256 if CUDA else 24)
    parser.add_argument("--batch", type=int, default=64 if CUDA else 8)
    parser.add_argument("--lengths", type=int, nargs=2, default=(20, 500) if CUDA else (5, 60))
    parser.add_argument("--answers", type=int, nargs=2, default=(16, 256) if CUDA else (8, 48))
    parser.add_argument("--questions", help="a file in GSM8K's format")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16" if CUDA else "fp32")
    parser.add_argument("--sample", action="store_true", help="temperature 1, top_k 50 instead of greedy")
    parser.add_argument("--profile", action="store_true", help="also print a kernel profile of whet")
    options = parser.parse_args()
    path = options.model if ":" in options.model or "/" in options.model else f"random:{options.model}"
    device = torch.device("cuda" if CUDA else "cpu")
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    model: Any = load_model(ModelConfig(path=path), dtype, device).eval()
    if options.questions:
        answer_questions(model, path, options.questions, options.dtype)
        return
    generator = random.Random(0)
    vocabulary = model.config.vocab_size
    prompts = [
        [generator.randrange(vocabulary) for _ in range(generator.randint(*options.lengths))]
        for _ in range(options.prompts)
    ]
    limits = [generator.randint(*options.answers) for _ in prompts]
    sampling = Sampling(temperature=1.0 if options.sample else 0.0, max_new_tokens=options.answers[1])

    def with_whet() -> list[list[int]]:
        completions = generate(model, prompts, sampling, batch_size=options.batch, limits=limits)
        return [completion.ids for completion in completions]

    def with_transformers() -> list[list[int]]:
        return transformers_generate(model, prompts, limits, sampling, options.batch)

    generate(model, prompts[:4], sampling, batch_size=options.batch, limits=[4] * 4)  # warm-up, and the cache probe
    transformers_generate(model, prompts[:4], [4] * 4, sampling, options.batch)
    total = sum(limits)
    results: dict[str, Any] = {
        "model": path, "prompts": len(prompts), "batch": options.batch, "tokens": total, "greedy": not options.sample,
        "device": torch.cuda.get_device_name() if CUDA else "cpu", "torch": torch.__version__,
        "transformers": transformers.__version__,
    }  # fmt: skip
    first, answers = timed(with_whet)
    second, _ = timed(with_whet)
    plain, expected = timed(with_transformers)
    results |= {"first_s": first, "whet_s": second, "generate_s": plain}
    results |= {"whet_tokens_per_s": total / second, "generate_tokens_per_s": total / plain, "ratio": plain / second}
    if not options.sample:
        results["agreement"] = sum(map(common_prefix, answers, expected)) / total
    if CUDA:
        results["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    print(f"whet      {results['whet_tokens_per_s']:10.0f} tokens/s  ({second:.2f} s; {first:.2f} s the first time)")  # noqa: T201
    print(f"generate  {results['generate_tokens_per_s']:10.0f} tokens/s  ({plain:.2f} s)")  # noqa: T201
    print(f"ratio     {results['ratio']:10.2f}")  # noqa: T201
    if options.profile:
        with torch.profiler.profile() as profile:
            with_whet()
        by = "self_device_time_total" if CUDA else "self_cpu_time_total"
        print(profile.key_averages().table(sort_by=by, row_limit=25))  # noqa: T201
    print(json.dumps(results))  # noqa: T201


def answer_questions(model: Any, path: str, file: str, dtype: str) -> None:
    """Prints seconds, tokens and the share of equal answers of each way to answer."""
    renderer = Renderer(load_tokenizer(ModelConfig(path=path)), "assistant")
    stop_ids = stop_token_ids(renderer, ModelConfig(path=path))
    lines = Path(file).read_text().splitlines()
    prompts = [renderer.prompt_ids([Message("user", json.loads(line)["question"])]) for line in lines]
    settings = transformers.GenerationConfig(
        max_new_tokens=400, do_sample=False, eos_token_id=stop_ids, pad_token_id=stop_ids[0]
    )

    def until_stop(ids: list[int]) -> list[int]:
        return ids[: next((i for i, token in enumerate(ids) if token in stop_ids), 400)]

    def with_whet() -> list[list[int]]:
        return [each.ids for each in generate(model, prompts, Sampling(max_new_tokens=400), stop_ids)]

    def with_generate_batch() -> list[list[int]]:
        found = model.generate_batch(prompts, generation_config=settings)
        by_prompt = {tuple(each.prompt_ids): until_stop(each.generated_tokens) for each in found.values()}
        return [by_prompt[tuple(prompt)] for prompt in prompts]

    @torch.inference_mode()
    def with_generate() -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for start in range(0, len(order), 220):
            numbers = order[start : start + 220]
            width = max(len(prompts[i]) for i in numbers)
            tokens = torch.tensor([[0] * (width - len(prompts[i])) + prompts[i] for i in numbers], device=model.device)
            mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in numbers])
            output = model.generate(tokens, attention_mask=mask.to(model.device), generation_config=settings)
            for i, row in zip(numbers, output[:, width:].tolist(), strict=True):
                answers[i] = until_stop(row)
        return answers

    found: dict[str, list[list[int]]] = {}
    for name, run in {"whet": with_whet, "generate_batch": with_generate_batch, "generate": with_generate}.items():
        try:
            seconds, found[name] = timed(run)
        except Exception as error:  # a peer that fails is a result, too
            print(f"{name:15} failed: {type(error).__name__}: {error}", flush=True)  # noqa: T201
            continue
        tokens = sum(map(len, found[name]))
        speed = f"{seconds:7.2f} s {tokens:8,} tokens {tokens / seconds:9,.0f} tokens/s"
        print(f"{name:15} {dtype} {speed}", flush=True)  # noqa: T201
    for name, answers in found.items():
        equal = sum(map(operator.eq, answers, found["generate"])) / len(prompts)
        print(f"{name:15} {dtype} {equal:.1%} of the answers equal those of generate")  # noqa: T201


@torch.inference_mode()
def transformers_generate(
    model: Any, prompts: list[list[int]], limits: list[int], sampling: Sampling, batch: int
) -> list[list[int]]:
    """Batches of prompts of similar length, padded on the left."""
    answers: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch):
        numbers = order[start : start + batch]
        width = max(len(prompts[i]) for i in numbers)
        tokens = torch.tensor([[0] * (width - len(prompts[i])) + prompts[i] for i in numbers])
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in numbers])
        settings = transformers.GenerationConfig(
            max_new_tokens=max(limits[i] for i in numbers), do_sample=sampling.temperature > 0, pad_token_id=0,
            eos_token_id=1 << 30, **({"temperature": 1.0, "top_k": 50} if sampling.temperature > 0 else {}),
        )  # fmt: skip
        output = model.generate(
            tokens.to(model.device), attention_mask=mask.to(model.device), generation_config=settings
        )
        for i, row in zip(numbers, output[:, width:].tolist(), strict=True):
            answers[i] = row[: limits[i]]
    return answers


def timed(run: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    if CUDA:
        torch.cuda.synchronize()
    began = time.perf_counter()
    found = run()
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - began, found


def common_prefix(one: list[int], other: list[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


if __name__ == "__main__":
    main()
