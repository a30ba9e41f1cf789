"""Compare a reloaded export with the trained model: logits, token ids, chat template, stop tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whet.core.errors import BadRecordError
from whet.data.conversation import Message
from whet.data.render.renderer import Renderer
from whet.exporting.dtypes import ExportDtype
from whet.exporting.spec import ExportFindings, GenerationSettings
from whet.model.modules import cache_works, without_generation_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ROWS_AT_A_TIME = 64
HARD_TEXT = "Größe: 1234567,89 €\n\n\tThe 2nd line's   gap; <b>tag</b> 漢字 🙂 don't WE'LL x=3.14"
"""Digits, whitespace, contractions and scripts on which similar tokenizers differ."""
_GREEDY_RELEVANT_KEYS = (
    "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "forced_bos_token_id",
    "forced_eos_token_id", "min_length", "min_new_tokens", "repetition_penalty", "no_repeat_ngram_size",
    "exponential_decay_length_penalty",
)  # fmt: skip
"""Settings that also change greedy answers. Sampling settings are for the user to choose."""
_EQUIVALENT_DEFAULTS = ((0, None), (1.0, None), (None, 0), (None, 1.0))
"""(exported, trained) pairs where transformers fills in a default."""


def compare_logits(
    found: Tensor,
    expected: Tensor,
    dtype: ExportDtype,
    findings: ExportFindings,
    min_same_next_token: float | None = None,
) -> None:
    """Compare logits [N, V] of the reloaded and of the trained model, within the tolerances of `dtype`."""
    if found.shape != expected.shape:
        findings.reasons.append(
            f"its vocabulary has {found.shape[-1]} tokens, the trained model's {expected.shape[-1]}"
        )
        return
    if not bool(expected.isfinite().all()):
        findings.reasons.append("the logits of the trained model are not finite")
        return
    if not bool(found.isfinite().all()):
        findings.reasons.append(f"its logits are not finite: weights may overflow {dtype.name}")
        return
    chunks = list(zip(found.split(_ROWS_AT_A_TIME), expected.split(_ROWS_AT_A_TIME), strict=True))
    difference = max((a - b).abs().max().item() for a, b in chunks)
    same = (found.argmax(dim=-1) == expected.argmax(dim=-1)).double().mean().item()
    kl = max(0.0, sum(_kl_divergence(b, a) for a, b in chunks) / len(expected))  # rounding can make it negative
    findings.max_logit_difference, findings.same_next_token, findings.kl = difference, same, kl
    allowed = dtype.max_logit_difference * max(1.0, expected.abs().max().item())
    if difference > allowed:
        findings.reasons.append(
            f"its logits differ by up to {difference:.3g}; rounding to {dtype.name} explains {allowed:.3g}"
        )
    elif same < (dtype.min_same_next_token if min_same_next_token is None else min_same_next_token):
        findings.reasons.append(f"it predicts the same next token at only {same:.1%} of positions")
    elif kl > dtype.max_kl:
        findings.reasons.append(f"its predictions have a KL divergence of {kl:.3g} nats from the trained model's")


def _kl_divergence(p: Tensor, q: Tensor) -> float:
    """Summed over rows."""
    log_p, log_q = (torch.log_softmax(logits.double(), dim=-1) for logits in (p, q))
    return float((log_p.exp() * (log_p - log_q)).sum())


def compare_tokenizers(
    settings: GenerationSettings, loaded: PreTrainedTokenizerFast, texts: Sequence[str], findings: ExportFindings
) -> None:
    """Compare chat template, token ids of `texts` and of a hard one, and eos token. Sets findings.same_ids."""
    count = len(findings.reasons)
    own = settings.tokenizer
    findings.same_template = own.chat_template == loaded.chat_template
    if not findings.same_template:
        findings.reasons.append("its chat template is not the one used in training")
    for text in (*texts, HARD_TEXT):
        if own.encode(text, add_special_tokens=False) != loaded.encode(text, add_special_tokens=False):
            findings.reasons.append(f"its tokenizer splits {text[:60]!r} differently")
            break
    else:
        if own.chat_template is not None and len(findings.reasons) == count:
            _compare_rendered_ids(own, loaded, [*texts, HARD_TEXT], findings)
    if own.eos_token_id != loaded.eos_token_id:
        findings.reasons.append(f"the eos token of its tokenizer is {loaded.eos_token!r} instead of {own.eos_token!r}")
    findings.same_ids = len(findings.reasons) == count


def rendered_prompts(settings: GenerationSettings, texts: Sequence[str]) -> list[str]:
    """The prompts that the chat template makes of the texts, after user, assistant, user; none without a template."""
    if settings.tokenizer.chat_template is None:
        return []
    renderer = Renderer(settings.tokenizer, "assistant")
    found = []
    for messages in _exchanges([*texts, HARD_TEXT]):
        with contextlib.suppress(BadRecordError):
            found.append(renderer.prompt_text(messages))
    return found


def _exchanges(texts: Sequence[str]) -> list[list[Message]]:
    """Each text as a question, with the next one as the answer before it."""
    return [
        [Message("user", first), Message("assistant", second), Message("user", first)]
        for first, second in zip(texts, [*texts[1:], texts[0]], strict=True)
    ]


def _compare_rendered_ids(
    own: PreTrainedTokenizerFast, loaded: PreTrainedTokenizerFast, texts: Sequence[str], findings: ExportFindings
) -> None:
    """Compare the prompts of both tokenizers after user, assistant, user. Their ids are those before an answer in
    training."""
    trained, exported = Renderer(own, "assistant"), Renderer(loaded, "assistant")
    for messages in _exchanges(texts):
        expected = _prompt_ids(trained, messages)
        if expected is not None and _prompt_ids(exported, messages) != expected:
            findings.reasons.append(f"its chat template renders {messages[0].content[:60]!r} to other token ids")
            return


def _prompt_ids(renderer: Renderer, messages: Sequence[Message]) -> list[int] | None:
    """None if the template refuses the messages, which says nothing about the export."""
    try:
        return renderer.prompt_ids(messages)
    except BadRecordError:
        return None


def compare_stop_tokens(settings: GenerationSettings, config: Any, findings: ExportFindings) -> None:
    """Compare the generation config of the export with the trained model's."""
    eos = config.eos_token_id
    exported = set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
    trained = set(settings.stop_ids)
    name = settings.tokenizer.convert_ids_to_tokens
    if missing := sorted(trained - exported):
        findings.reasons.append(f"its generation config does not stop at {', '.join(repr(name(i)) for i in missing)}")
    if extra := sorted(exported - trained):
        findings.reasons.append(
            f"its generation config stops at {', '.join(repr(name(i)) for i in extra)}, which does not end an answer"
        )
    for key in _GREEDY_RELEVANT_KEYS:
        found, own = getattr(config, key, None), settings.base_config.get(key)
        if found != own and (found, own) not in _EQUIVALENT_DEFAULTS:
            findings.reasons.append(f"its generation config has {key} = {found!r} instead of {own!r}")


@torch.inference_mode()
def check_generation_stops(
    settings: GenerationSettings, model: Any, prompt: Sequence[int], findings: ExportFindings
) -> None:
    """Force the reloaded model to generate the end of its turn, and check that generation stops there."""
    from transformers import LogitsProcessor, LogitsProcessorList

    end = settings.end_of_answer_id
    if end is None:
        return

    class ForceEnd(LogitsProcessor):
        def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
            forced = torch.full_like(scores, float("-inf"))
            forced[:, end] = 0
            return forced

    ids = torch.tensor([list(prompt)], device=model.device)
    stops, cached = model.generation_config.eos_token_id, cache_works(model)
    with without_generation_config(model):
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, eos_token_id=stops,
            logits_processor=LogitsProcessorList([ForceEnd()]), pad_token_id=end, use_cache=cached,
        )  # fmt: skip
    if generated.shape[1] != ids.shape[1] + 1:
        findings.reasons.append(f"it does not stop after {settings.tokenizer.convert_ids_to_tokens(end)!r}")
