"""Whether what was loaded back is spoken to like the trained model, and ends its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from whet.checkpoint.export.certificate import Findings
from whet.checkpoint.export.order import Speech

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_HARD = "Größe: 1234567,89 €\n\n\tThe 2nd line's   gap; <b>tag</b> 漢字 🙂 don't WE'LL x=3.14"
"""Digits, gaps, cases and scripts on which tokenizers that look alike differ."""


_FORCING = (
    "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "forced_bos_token_id",
    "forced_eos_token_id", "min_length", "min_new_tokens", "repetition_penalty", "no_repeat_ngram_size",
    "exponential_decay_length_penalty",
)  # fmt: skip
"""Settings that change even the likeliest answer; those of sampling are the user's to choose."""
_SAME = ((0, None), (1.0, None), (None, 0), (None, 1.0))
"""What transformers fills in where nothing is said."""


def compare_speech(speech: Speech, loaded: PreTrainedTokenizerFast, texts: Sequence[str], findings: Findings) -> None:
    """`texts` are what is said in the comparison, beside a text that is hard on tokenizers."""
    before = len(findings.reasons)
    own = speech.tokenizer
    if own.chat_template != loaded.chat_template:
        findings.blame("its chat template is not the one that was trained with")
    for text in (*texts, _HARD):
        if own.encode(text, add_special_tokens=False) != loaded.encode(text, add_special_tokens=False):
            findings.blame(f"its tokenizer cuts {text[:60]!r} into other tokens")
            break
    else:
        if own.chat_template is not None and len(findings.reasons) == before:
            _compare_rendered(own, loaded, [*texts, _HARD], findings)
    if own.eos_token_id != loaded.eos_token_id:
        findings.blame(f"its tokenizer's eos token is {loaded.eos_token!r} and was {own.eos_token!r}")
    findings.same_ids = len(findings.reasons) == before


def _compare_rendered(own: Any, loaded: Any, texts: Sequence[str], findings: Findings) -> None:
    """Question, answer and question again, and the beginning of an answer."""
    for first, second in zip(texts, [*texts[1:], texts[0]], strict=True):
        turns = [("user", first), ("assistant", second), ("user", first)]
        messages = [{"role": role, "content": text} for role, text in turns]
        try:
            wanted = own.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except Exception:  # a template may refuse such a conversation, which then says nothing about the export
            continue
        if loaded.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) != wanted:
            findings.blame(f"rendered by its chat template, {first[:60]!r} has other ids")
            return


def compare_stops(speech: Speech, settings: Any, findings: Findings) -> None:
    """`settings`: the generation settings that came with the export."""
    found = settings.eos_token_id
    ends = set() if found is None else {found} if isinstance(found, int) else set(found)
    missing = sorted(set(speech.stops) - ends)
    if missing:
        words = ", ".join(repr(speech.tokenizer.convert_ids_to_tokens(number)) for number in missing)
        findings.blame(f"its generation settings do not stop at {words}")
    more = sorted(ends - set(speech.stops))
    if more:
        words = ", ".join(repr(speech.tokenizer.convert_ids_to_tokens(number)) for number in more)
        findings.blame(f"its generation settings stop at {words}, which ends no answer")
    for key in _FORCING:
        found, own = getattr(settings, key, None), speech.generation.get(key)
        if found != own and (found, own) not in _SAME:
            findings.blame(f"its generation settings have {key} = {found!r}, and the trained model's {own!r}")


@torch.inference_mode()
def try_to_stop(speech: Speech, model: Any, prompt: Sequence[int], findings: Findings) -> None:
    """Let the loaded model generate, put the end of turn into its mouth, and see whether it falls silent."""
    from transformers import LogitsProcessor, LogitsProcessorList

    end = speech.end_of_turn if speech.end_of_turn is not None else next(iter(speech.stops), None)
    if end is None:
        return

    class SayEnd(LogitsProcessor):
        def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
            forced = torch.full_like(scores, float("-inf"))
            forced[:, end] = 0
            return forced

    ids = torch.tensor([list(prompt)], device=model.device)
    said = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, num_beams=1,
        logits_processor=LogitsProcessorList([SayEnd()]), pad_token_id=end,
    )  # fmt: skip
    if said.shape[1] != ids.shape[1] + 1:
        findings.blame(f"it goes on after {speech.tokenizer.convert_ids_to_tokens(end)!r}, which ends an answer")
