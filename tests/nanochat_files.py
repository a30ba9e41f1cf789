"""nanochat's files as its own code writes them: a checkpoint of February 2026 and a pickled tokenizer."""

from __future__ import annotations

import json
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import torch

SPECIAL_TOKENS = (
    "<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>", "<|python_start|>",
    "<|python_end|>", "<|output_start|>", "<|output_end|>",
)  # fmt: skip
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)


@cache
def tiktoken_encoding(size: int = 500) -> Any:
    """A tokenizer of `size` tokens and nanochat's special ones."""
    import tiktoken
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    from whet.data.builtin import COMMON_WORDS, generate_spelling_bee

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    samples = generate_spelling_bee("train")
    texts = [" ".join(COMMON_WORDS), *(next(samples).messages[1].content for _ in range(20))]
    learner.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet))
    byte_of = {letter: byte for byte, letter in enumerate(_letters())}
    ranks = {bytes(byte_of[letter] for letter in token): number for token, number in learner.get_vocab().items()}
    special = {token: len(ranks) + number for number, token in enumerate(SPECIAL_TOKENS)}
    return tiktoken.Encoding("rustbpe", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def _letters() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [bytes_to_unicode()[byte] for byte in range(256)]


def write_checkpoint(folder: Path, step: int = 650, **changed: Any) -> dict[str, torch.Tensor]:
    """`model_NNNNNN.pt` and `meta_NNNNNN.json` with random weights; the tensors."""
    sizes = {
        "sequence_len": 512, "vocab_size": 509, "n_layer": 4, "n_head": 4, "n_kv_head": 2, "n_embd": 64,
        "window_pattern": "SSSL", **changed,
    }  # fmt: skip
    width, rows = sizes["n_embd"], -(-sizes["vocab_size"] // 64) * 64
    values = sizes["n_kv_head"] * width // sizes["n_head"]
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (rows, width), "lm_head.weight": (rows, width)}
    for number in range(sizes["n_layer"]):
        block = f"transformer.h.{number}"
        shapes |= {
            f"{block}.attn.c_q.weight": (width, width), f"{block}.attn.c_k.weight": (values, width),
            f"{block}.attn.c_v.weight": (values, width), f"{block}.attn.c_proj.weight": (width, width),
            f"{block}.mlp.c_fc.weight": (4 * width, width), f"{block}.mlp.c_proj.weight": (width, 4 * width),
        }  # fmt: skip
        if number % 2 == (sizes["n_layer"] - 1) % 2:
            shapes[f"value_embeds.{number}.weight"] = (rows, values)
            shapes[f"{block}.attn.ve_gate.weight"] = (sizes["n_kv_head"], 32)
    tensors = {name: torch.randn(shape) * (1 if "e.weight" in name else width**-0.5) for name, shape in shapes.items()}
    for name in tensors:
        if name.startswith("value_embeds") or "wte" in name:
            tensors[name] = tensors[name].bfloat16()  # as on a GPU
    tensors["resid_lambdas"] = torch.rand(sizes["n_layer"]) + 0.5
    tensors["x0_lambdas"] = torch.rand(sizes["n_layer"])
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}, folder / f"model_{step:06d}.pt")
    (folder / f"meta_{step:06d}.json").write_text(json.dumps({"step": step, "model_config": sizes}))
    return tensors


def write_base(folder: Path, tag: str = "d4", steps: tuple[int, ...] = (650,), **changed: Any) -> Path:
    """nanochat's base folder: base_checkpoints/TAG and tokenizer/tokenizer.pkl."""
    for step in steps:
        write_checkpoint(folder / "base_checkpoints" / tag, step, **changed)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/tokenizer.pkl").write_bytes(pickle.dumps(tiktoken_encoding()))
    return folder
