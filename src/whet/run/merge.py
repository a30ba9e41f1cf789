"""`whet merge`: check a base model and LoRA adapters against each other and merge them into one plain model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.core.console import info, silence_libraries, warn
from whet.core.errors import WhetError
from whet.exporting.merge_adapters import CombinationType, WeightedAdapter, merge_adapters, require_mergeable
from whet.inference.adapters import has_4bit_base
from whet.model.config import ModelConfig
from whet.model.load.pretrained import load_model
from whet.model.load.tokenizer import load_tokenizer
from whet.model.load.weight_files import locate_model, weights_hash
from whet.model.lora.peft_adapters import embedding_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PROBE_TEXTS = (
    "The model that ships is the model that was trained: one way to see that is to ask it.",
    'Please send three red lamps to Anna in Riga by Friday. {"item": "lamp", "amount": 3}',
)


def merge_adapter_folders(base: str, adapters: Sequence[str], how: CombinationType, out: Path) -> dict[str, Any]:
    """Merge adapters, each a folder or FOLDER=WEIGHT, into `base` and write a plain model folder."""
    silence_libraries()
    if (out / "config.json").exists() or (out.exists() and any(out.iterdir())):
        raise WhetError(f"--out {out}: this folder is not empty. Give another one")
    parts = [_parse_adapter(text) for text in adapters]
    require_mergeable(parts)
    config = ModelConfig(path=base)
    for part in parts:
        _require_same_base(config, part)
    model = load_model(config, "auto")
    tokenizer = _common_tokenizer(config, parts, embedding_rows(model))
    probes = [tokenizer.encode(text) for text in _PROBE_TEXTS]
    certificate = merge_adapters(model, parts, probes, tokenizer, how, out)
    info(
        f"merged to {out}: loaded back and compared, largest difference of a logit "
        f"{certificate['max_logit_difference']:.1e}"
    )
    return {"merged": str(out), "certificate": certificate}


def _parse_adapter(text: str) -> WeightedAdapter:
    folder, equals, weight = text.rpartition("=")
    if not equals or Path(text).expanduser().is_dir():
        return WeightedAdapter(_adapter_folder(Path(text).expanduser()))
    try:
        number = float(weight)
    except ValueError:
        raise WhetError(f"--adapter {text}: {weight!r} is no number. Write FOLDER or FOLDER=WEIGHT") from None
    if not abs(number) < 1e6 or number == 0:
        raise WhetError(
            f"--adapter {text}: a weight of {weight} makes no sense. Leave the adapter out, or give another"
        )
    return WeightedAdapter(_adapter_folder(Path(folder).expanduser()), number)


def _adapter_folder(folder: Path) -> Path:
    """Of a run, what it exported."""
    exported = folder / "exports" / "adapter"
    return exported if (folder / "config.yaml").is_file() and exported.is_dir() else folder


def _require_same_base(base: ModelConfig, part: WeightedAdapter) -> None:
    """The adapter must have been trained on these weights, wherever they lie by now."""
    if has_4bit_base(part.folder):
        warn(
            f"--adapter {part.folder}: trained beside its base in 4 bits, and merged into the whole one here: it may "
            "say something else than what was trained. `whet export RUN --to merged` merges into what it was trained on"
        )
    named = str(part.settings.get("base_model_name_or_path") or "")
    here = locate_model(base.path)
    if named in (here, base.path) or (Path(named).is_dir() and Path(named).resolve() == Path(here).resolve()):
        return
    try:
        then, now = weights_hash(ModelConfig(path=named)), weights_hash(base)
    except (WhetError, OSError, ValueError):  # no such folder any more, or a hub that cannot be reached
        then = now = None
    if then is None or now is None:
        known = named or "a model that it does not name"
        warn(f"--adapter {part.folder}: trained on {known}, which is not at hand to be compared")
    elif then != now:
        raise WhetError(
            f"--adapter {part.folder}: it was trained on other weights than {base.path}: on {named}. Give that as BASE"
        )


def _common_tokenizer(base: ModelConfig, parts: Sequence[WeightedAdapter], room: int) -> PreTrainedTokenizerFast:
    """The base's, or the one with added tokens that all adapters which bring one agree about."""
    own = load_tokenizer(base)
    chosen, owner = own, base.path
    for part in parts:
        settings = part.settings.get("trainable_token_indices") or []
        highest = max(
            (i for ids in (settings.values() if isinstance(settings, dict) else [settings]) for i in ids), default=0
        )
        if not (part.folder / "tokenizer_config.json").exists():
            if highest >= max(room, len(chosen)):
                raise WhetError(
                    f"--adapter {part.folder}: it trained token {highest}, the model has {room}, and there is no "
                    "tokenizer beside it to name the tokens that are missing. Copy the one it was trained with there"
                )
            continue
        brought = load_tokenizer(ModelConfig(path=base.path, tokenizer=str(part.folder)))
        vocabulary = brought.get_vocab()
        if vocabulary == chosen.get_vocab():
            chosen = brought if chosen is own else chosen  # its template is what was trained with
            continue
        if chosen is not own or not own.get_vocab().items() <= vocabulary.items():
            raise WhetError(
                f"--adapter {part.folder}: its vocabulary of {len(vocabulary):,} tokens is not that of {owner} "
                f"({len(chosen):,}), so the same text means other tokens to them. Merge adapters of one vocabulary"
            )
        chosen, owner = brought, str(part.folder)
    return chosen
