"""Comparison of a reloaded export with the trained model: logits, token ids, chat template, stop tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from whet.core.files import hash_file
from whet.exporting.spec import ExportFindings, GenerationSettings

# Whether two ways to the same logits agree, as far as rounding allows.

_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference of a logit, relative to the largest logit, that rounding explains."""


@torch.inference_mode()
def compute_all_logits(model: nn.Module, probes: Sequence[Sequence[int]]) -> Tensor:
    """[N, V] of every position of every probe, one probe at a time."""
    model.eval()
    device = next(model.parameters()).device
    return torch.cat([model(input_ids=torch.tensor([list(ids)], device=device)).logits[0].float() for ids in probes])


def compare_to_reference(wanted: Tensor, found: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """What a certificate says of them. A greedy answer may differ where two logits are as good as equal."""
    difference = (found - wanted).abs().max().item()
    agree = (found.argmax(dim=-1) == wanted.argmax(dim=-1)).double().mean().item()
    allowed = _TOLERANCE.get(dtype, 0.1) * max(1.0, wanted.abs().max().item())
    return {
        "verified": difference <= allowed and agree > 0.95,  # false for NaN too
        "tokens": len(wanted),
        "max_logit_difference": difference,
        "same_next_token": agree,
    }


def hash_safetensors(folder: Path) -> dict[str, str]:
    """Of the files with weights."""
    return {file.name: hash_file(file) for file in sorted(folder.glob("*.safetensors"))}


# Whether what was loaded back is spoken to like the trained model, and ends its answers.

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_HARD_TEXT = "Größe: 1234567,89 €\n\n\tThe 2nd line's   gap; <b>tag</b> 漢字 🙂 don't WE'LL x=3.14"
"""Digits, gaps, cases and scripts on which tokenizers that look alike differ."""


_GREEDY_RELEVANT_KEYS = (
    "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "forced_bos_token_id",
    "forced_eos_token_id", "min_length", "min_new_tokens", "repetition_penalty", "no_repeat_ngram_size",
    "exponential_decay_length_penalty",
)  # fmt: skip
"""Settings that change even the likeliest answer; those of sampling are the user's to choose."""
_EQUIVALENT_DEFAULTS = ((0, None), (1.0, None), (None, 0), (None, 1.0))
"""What transformers fills in where nothing is said."""


def compare_tokenizers(
    speech: GenerationSettings, loaded: PreTrainedTokenizerFast, texts: Sequence[str], findings: ExportFindings
) -> None:
    """`texts` are what is said in the comparison, beside a text that is hard on tokenizers."""
    before = len(findings.reasons)
    own = speech.tokenizer
    if own.chat_template != loaded.chat_template:
        findings.blame("its chat template is not the one that was trained with")
    for text in (*texts, _HARD_TEXT):
        if own.encode(text, add_special_tokens=False) != loaded.encode(text, add_special_tokens=False):
            findings.blame(f"its tokenizer cuts {text[:60]!r} into other tokens")
            break
    else:
        if own.chat_template is not None and len(findings.reasons) == before:
            _compare_rendered_ids(own, loaded, [*texts, _HARD_TEXT], findings)
    if own.eos_token_id != loaded.eos_token_id:
        findings.blame(f"its tokenizer's eos token is {loaded.eos_token!r} and was {own.eos_token!r}")
    findings.same_ids = len(findings.reasons) == before


def _compare_rendered_ids(own: Any, loaded: Any, texts: Sequence[str], findings: ExportFindings) -> None:
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


def compare_stop_tokens(speech: GenerationSettings, settings: Any, findings: ExportFindings) -> None:
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
    for key in _GREEDY_RELEVANT_KEYS:
        found, own = getattr(settings, key, None), speech.generation.get(key)
        if found != own and (found, own) not in _EQUIVALENT_DEFAULTS:
            findings.blame(f"its generation settings have {key} = {found!r}, and the trained model's {own!r}")


@torch.inference_mode()
def check_generation_stops(
    speech: GenerationSettings, model: Any, prompt: Sequence[int], findings: ExportFindings
) -> None:
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
