"""Chat templates in the style of well-known families, each with an oracle written by hand.

`pieces` says what a conversation looks like and which of it the model has to produce, without asking the template:
[("<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n", False), ("Yes<|im_end|>", True), ("\\n", False)].
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Turns = Sequence[tuple[str, str]]
Pieces = list[tuple[str, bool]]


@dataclass(frozen=True)
class Family:
    name: str
    template: str
    markers: tuple[str, ...]
    pieces: Callable[[Turns], Pieces]
    bos: str | None = None
    eos: str | None = None
    stop: str | None = None  # what a generation config would name beside the eos
    takes_system: bool = True
    strips_markers: bool = False  # markers swallow the whitespace after them, as Phi-3's do


@cache
def _small_backend() -> str:
    """A byte-level BPE that merges a little, so that tokens and characters are not the same thing."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    corpus = ["user assistant system hello there, what is the answer?\n\nThe answer is this.  Then  some  more\n\n"] * 3
    backend.train_from_iterator(corpus, trainer)
    return str(backend.to_str())


def small_tokenizer(
    template: str | None,
    markers: Sequence[str],
    bos: str | None = None,
    eos: str | None = None,
    strips_markers: bool = False,
) -> PreTrainedTokenizerFast:
    """A tokenizer of some 400 pieces that has `markers` as tokens of their own."""
    backend = Tokenizer.from_str(_small_backend())
    backend.add_special_tokens([AddedToken(text, rstrip=strips_markers, normalized=False) for text in markers])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


@cache
def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    return small_tokenizer(family.template, family.markers, family.bos, family.eos, family.strips_markers)


def _even(turns: Turns, header: Callable[[str], str], end: str, after: str, strip: bool, start: str = "") -> Pieces:
    """Families whose turns all look alike: header, content, end marker, whitespace."""
    pieces: Pieces = [(start, False)]
    for role, content in turns:
        text = content.strip() if strip else content
        learned = role == "assistant"
        pieces += [(header(role), False), (text + end, learned), (after, False)]
    return pieces


CHATML_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML = Family(
    "chatml",
    CHATML_TEMPLATE,
    ("<|im_start|>", "<|im_end|>"),
    lambda turns: _even(turns, lambda role: f"<|im_start|>{role}\n", "<|im_end|>", "\n", strip=False),
    eos="<|im_end|>",
)


def _llama2(turns: Turns) -> Pieces:
    pieces: Pieces = []
    system = turns[0][1] if turns[0][0] == "system" else None
    for role, content in turns:
        if role == "user":
            merged = content if system is None else f"<<SYS>>\n{system}\n<</SYS>>\n\n{content}"
            pieces.append((f"<s>[INST] {merged.strip()} [/INST]", False))
            system = None
        elif role == "assistant":
            pieces.append((f" {content.strip()} </s>", True))
    return pieces


LLAMA2 = Family(
    "llama2",
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = none %}{% endif %}"
    "{% for m in rest %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system is not none %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] %}"
    "{% else %}{% set content = m['content'] %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    ("<s>", "</s>", "[INST]", "[/INST]"),
    _llama2,
    bos="<s>",
    eos="</s>",
)

LLAMA3 = Family(
    "llama3",
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    lambda turns: _even(
        turns,
        lambda role: f"<|start_header_id|>{role}<|end_header_id|>\n\n",
        "<|eot_id|>",
        "",
        strip=True,
        start="<|begin_of_text|>",
    ),
    bos="<|begin_of_text|>",
    eos="<|eot_id|>",
)


def _dated(turns: Turns) -> Pieces:
    today = datetime.date.today().strftime("%d %b %Y")
    head = f"<|begin_of_text|><|start_header_id|>date<|end_header_id|>\n\nToday: {today}<|eot_id|>"
    return [(head, False), *LLAMA3.pieces(turns)[1:]]


DATED = Family(
    "llama3-dated",
    LLAMA3.template.replace(
        "{{ bos_token }}",
        "{{ bos_token + '<|start_header_id|>date<|end_header_id|>\n\nToday: ' + strftime_now('%d %b %Y') }}<|eot_id|>",
    ),
    LLAMA3.markers,
    _dated,
    bos=LLAMA3.bos,
    eos=LLAMA3.eos,
)


def _mistral(turns: Turns) -> Pieces:
    system = turns[0][1] if turns[0][0] == "system" else None
    last_user = max(i for i, (role, _) in enumerate(turns) if role == "user")
    pieces: Pieces = [("<s>", False)]
    for i, (role, content) in enumerate(turns):
        if role == "user":
            lead = f"{system}\n\n" if system is not None and i == last_user else ""
            pieces.append((f"[INST] {lead}{content}[/INST]", False))
        elif role == "assistant":
            pieces.append((f" {content.strip()}</s>", True))
    return pieces


MISTRAL = Family(
    "mistral",
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = none %}{% set rest = messages %}{% endif %}"
    "{{ bos_token }}{% for m in rest %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' }}"
    "{% if system is not none and loop.revindex <= 2 %}{{ system + '\n\n' }}{% endif %}"
    "{{ m['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}",
    ("<s>", "</s>", "[INST]", "[/INST]"),
    _mistral,
    bos="<s>",
    eos="</s>",
)

GEMMA = Family(
    "gemma",
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if m['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = m['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    lambda turns: _even(
        turns,
        lambda role: f"<start_of_turn>{'model' if role == 'assistant' else role}\n",
        "<end_of_turn>",
        "\n",
        strip=True,
        start="<bos>",
    ),
    bos="<bos>",
    eos="<eos>",  # which never occurs: the end of a turn is the last marker that all turns share
    takes_system=False,
)

PHI3 = Family(
    "phi3",
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
    lambda turns: [*_even(turns, lambda role: f"<|{role}|>\n", "<|end|>", "\n", strip=False), ("<|endoftext|>", False)],
    eos="<|endoftext|>",
    stop="<|end|>",
    strips_markers=True,
)

ZEPHYR = Family(
    "zephyr",
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",  # no newline: the model has to write it
    ("<|system|>", "<|user|>", "<|assistant|>", "</s>"),
    lambda turns: [
        piece
        for role, content in turns
        for piece in (
            [("<|assistant|>", False), (f"\n{content}</s>", True), ("\n", False)]
            if role == "assistant"
            else [(f"<|{role}|>\n{content}</s>\n", False)]
        )
    ],
    eos="</s>",
)


def _deepseek(turns: Turns, prefill: str = "") -> Pieces:
    pieces: Pieces = [("<｜begin▁of▁sentence｜>", False)]
    for role, content in turns:
        given = next((given for given in (prefill, prefill.strip()) if content.startswith(given)), "")
        pieces += {
            "system": [(content, False)],
            "user": [(f"<｜User｜>{content}", False)],
            "assistant": [
                (f"<｜Assistant｜>{given}", False),
                (f"{content.removeprefix(given)}<｜end▁of▁sentence｜>", True),
            ],
        }[role]
    return pieces


def _deepseek_family(name: str, prefill: str) -> Family:
    return Family(
        name,
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
        "{% elif m['role'] == 'assistant' %}{{ '<｜Assistant｜>' + m['content'] + eos_token }}"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>" + prefill + "' }}{% endif %}",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        partial(_deepseek, prefill=prefill),
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
    )


DEEPSEEK = _deepseek_family("deepseek", "")
DEEPSEEK_R1 = _deepseek_family("deepseek-r1", "<think>\n")  # a prefill that histories do not have


def _qwen3(turns: Turns) -> Pieces:
    pieces: Pieces = []
    for i, (role, content) in enumerate(turns):
        think = "<think>\n\n</think>\n\n" if role == "assistant" and i == len(turns) - 1 else ""
        learned = role == "assistant"
        pieces += [(f"<|im_start|>{role}\n", False), (f"{think}{content}<|im_end|>", learned), ("\n", False)]
    return pieces


QWEN3 = Family(
    "qwen3-like",
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    _qwen3,
    eos="<|im_end|>",
)

GRANITE = Family(
    "granite",
    "{% for m in messages %}"
    "{{ '<|start_of_role|>' + m['role'] + '<|end_of_role|>' + m['content'] + '<|end_of_text|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}",
    ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    lambda turns: _even(
        turns, lambda role: f"<|start_of_role|>{role}<|end_of_role|>", "<|end_of_text|>", "\n", strip=False
    ),
    eos="<|end_of_text|>",
)

FAMILIES = (
    CHATML, LLAMA2, LLAMA3, DATED, MISTRAL, GEMMA, PHI3, ZEPHYR, DEEPSEEK, DEEPSEEK_R1, QWEN3, GRANITE,
)  # fmt: skip
