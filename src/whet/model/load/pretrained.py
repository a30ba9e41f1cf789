"""Loads a model with transformers, or initialises one at random; adds rows for new tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from whet.compat.transformers_private import forget_attention_, forget_dequantization_
from whet.core.console import loading, warn
from whet.core.errors import WhetError
from whet.model.config import ModelConfig
from whet.model.load.random_models import is_random_model, random_model_config
from whet.model.load.tokenizer import load_tokenizer
from whet.model.load.weight_files import (
    load_error,
    local_model_folder,
    quantized_weights,
    reach_model,
    register_model_code,
    require_certified_files,
    require_files_inside,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_model(config: ModelConfig, dtype: torch.dtype | str, device: torch.device | None = None) -> nn.Module:
    """The model in `dtype` (`auto`: as saved), with rows for added tokens. Weights are read directly onto `device`."""
    model = _load_pretrained(config, dtype, device)
    add_token_rows_(model, config)
    train_pad_row_(model)
    return prepare_float64_(model, dtype)


def train_pad_row_(model: nn.Module) -> nn.Module:
    """Let the pad token's row of an embedding get its gradient, which torch drops otherwise (`padding_idx`). Many
    models pad with a token of the conversations, such as the end of a turn; padding itself is not supervised."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    return model


def auto_class(config: Any) -> Any:
    """transformers' auto class for a configuration. A checkpoint with a vision tower is loaded with it, although text
    does not reach it: an export would lose it otherwise."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    is_whole = config.get_text_config() is not config and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if is_whole else AutoModelForCausalLM


def load_with_transformers(place: str | Path, *, dequantize: bool = False, **options: Any) -> Any:
    """`from_pretrained` of the `auto_class` of a folder or hub id. `dequantize`: weights in fp8 and MXFP4, which
    transformers keeps so where it has kernels for them."""
    from transformers import AutoConfig

    register_model_code(place)
    own = {name: options[name] for name in ("revision", "trust_remote_code") if name in options}
    config = AutoConfig.from_pretrained(place, **own)
    require_language_model(config)
    if dequantize:
        options |= dequantization_options(config)
    forget_attention_(config)
    loaded = auto_class(config).from_pretrained(place, config=config, **options)
    if getattr(config, "quantization_config", None) is not None:
        _finish_dequantization_(loaded[0] if isinstance(loaded, tuple) else loaded, options.get("dtype"))
    return loaded


def dequantization_options(config: Any) -> dict[str, Any]:
    """What `from_pretrained` needs to dequantize the weights of a model with this configuration."""
    settings = getattr(config, "quantization_config", None)
    if not isinstance(settings, dict) or settings.get("quant_method") not in ("fp8", "mxfp4"):
        return {}
    from transformers.quantizers import AutoQuantizationConfig

    return {"quantization_config": AutoQuantizationConfig.from_dict(settings | {"dequantize": True})}


def _finish_dequantization_(model: Any, dtype: Any) -> None:
    """Of a model whose files are quantized and that is not."""
    if getattr(model, "hf_quantizer", None) is None:
        forget_dequantization_(model)
        if isinstance(dtype, torch.dtype):
            widen_weights_(model, dtype)


def widen_weights_(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give narrower weights this dtype: transformers dequantizes MXFP4 to bf16, whatever dtype is requested."""
    for weight in model.parameters():
        if weight.dtype.itemsize < dtype.itemsize:
            weight.data = weight.data.to(dtype)
    return model


_OTHER_HEADS = (
    "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice", "ForMaskedLM",
    "RewardModel",
)  # fmt: skip


def require_language_model(config: Any) -> None:
    """Raise a WhetError for a checkpoint of another kind, of whose weights transformers would take what fits: a
    classifier with tied embeddings becomes a language model, and an encoder-decoder loses its encoder."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    saved = [str(name) for name in getattr(config, "architectures", None) or []]
    other = next((name for name in saved if name.endswith(_OTHER_HEADS)), None)
    if other is not None:
        raise WhetError(
            f"model.path: config.json says that this is a {other}, which does not predict the next token, so it cannot "
            "answer. Use a causal language model (…ForCausalLM)"
        )
    if saved and getattr(config, "is_encoder_decoder", False) and not any("CausalLM" in name for name in saved):
        raise WhetError(
            f"model.path: this is an encoder-decoder model ({saved[0]}), and whet trains only decoders. Use a causal "
            "language model (…ForCausalLM)"
        )
    is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if not is_known and not hasattr(config, "auto_map"):
        raise WhetError(
            f"model.path: transformers has no causal language model of the type {config.model_type} "
            f"({', '.join(saved) or 'config.json'}). Use one (…ForCausalLM)"
        )


@contextlib.contextmanager
def show_loading(config: ModelConfig) -> Iterator[None]:
    """Print which model transformers loads inside this block, and count its weights on a terminal."""
    from transformers.utils import logging

    size = sum(file.stat().st_size for file in local_model_folder(config.path, config.revision).glob("*.safetensors"))
    with loading(config.path + (f" ({size / 1e9:.1f} GB)" if size >= 1e8 else "")) as track:

        def count(factory: Any, args: Any, kwargs: Any) -> Any:
            return track(args[0]) if kwargs.get("desc") == "Loading weights" else factory(*args, **kwargs)

        before = logging.set_tqdm_hook(count)
        try:
            yield
        finally:
            logging.set_tqdm_hook(before)


def _load_pretrained(config: ModelConfig, dtype: torch.dtype | str, device: torch.device | None) -> nn.Module:
    if is_random_model(config.path):
        return _init_random_model(config, dtype, device or torch.device("cpu"))
    place = reach_model(config.path)
    require_files_inside(place)
    require_certified_files(Path(place))
    try:
        with show_loading(config):
            model, found = load_with_transformers(
                place, revision=config.revision, trust_remote_code=config.trust_remote_code,
                dtype=dtype, output_loading_info=True, device_map=None if device is None else {"": device},
                dequantize=True, ignore_mismatched_sizes=True,  # reported below, by name
            )  # fmt: skip
    except (WhetError, torch.OutOfMemoryError):
        raise  # nothing is wrong with the files
    except Exception as error:  # a damaged or forged file can raise almost anything
        raise load_error(config.path, "model", error) from None
    _require_matching_weights(model, found, config.path)
    _untie_(model, config.path)
    return model


def _require_matching_weights(model: nn.Module, found: dict[str, Any], path: str) -> None:
    """Compare the names and shapes of a model's weights with those in its files."""
    for name, in_file, in_model in sorted(found["mismatched_keys"]):
        raise WhetError(
            f"model.path: {path}: {name} has the shape {list(in_file)} in the weight files, but {list(in_model)} "
            "according to config.json. Check that they belong together"
        )
    missing = sorted(found["missing_keys"])
    if missing:
        raise WhetError(
            f"model.path: {path}: {len(missing)} weights are missing ({', '.join(missing[:3])} …) and would be "
            "initialised at random. Check that config.json belongs to the weight files and that all were copied"
        )
    report_left_out_weights(model, sorted(found["unexpected_keys"]), path)


def report_left_out_weights(model: nn.Module, extra: Sequence[str], path: str) -> None:
    """Warn of weights in the files that the model has no place for; raise a WhetError where a layer lacks its own."""
    modules = dict(model.named_modules())
    owned = [name for name in extra if _has_weights(modules.get(name.rpartition(".")[0]))]
    if owned:  # such as a bias: the model would compute otherwise than the one that was saved
        raise WhetError(
            f"model.path: {path}: according to config.json, some layers lack weights that the files contain "
            f"({', '.join(owned[:3])}{' …' if len(owned) > 3 else ''}). Check that they belong together"
        )
    if extra:
        names = ", ".join(extra[:3]) + (f" and {len(extra) - 3:,} more" if len(extra) > 3 else "")
        warn(
            f"model.path: {path}: the files contain weights that are not part of {type(model).__name__} according to "
            f"config.json, and that are left out: {names}"
        )


def _untie_(model: Any, path: str) -> None:
    """Correct a configuration that ties weights which differ in the files. transformers leaves those apart when it
    loads them, and ties them when it resizes the embedding; other programs tie them when they load the export."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    if untied := [one for one, other in ties.items() if weights.get(one) is not weights.get(other)]:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
        warn(
            f"model.path: {path}: config.json ties {untied[0]} to the embedding, and the files have another weight for "
            "it. It is trained and exported as it is in the files, not tied"
        )


def require_unquantized(model: Any, path: str) -> None:
    """Raise a WhetError for weights that transformers holds in a quantized form."""
    if getattr(model, "hf_quantizer", None) is not None:
        method = model.hf_quantizer.quantization_config.quant_method
        raise quantized_weights(path, str(getattr(method, "value", method)))


def _has_weights(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in module.parameters(recurse=False))


def _init_random_model(config: ModelConfig, dtype: torch.dtype | str, device: torch.device) -> nn.Module:
    """Initialised on `device` in the final dtype, because an 8B model in fp32 exceeds many hosts' memory. Always the
    same weights, and global random states do not change."""
    shape = random_model_config(config.path, config.trust_remote_code)
    target_dtype = (shape.dtype or torch.float32) if dtype == "auto" else dtype
    seeded = [device] if device.type not in ("cpu", "mps") else []
    with torch.random.fork_rng(seeded, device_type=device.type if seeded else "cuda"), device:
        torch.manual_seed(0)
        try:
            model: nn.Module = auto_class(shape).from_config(
                shape, dtype=target_dtype, trust_remote_code=config.trust_remote_code
            )
        except Exception as error:
            raise load_error(config.path, "model", error) from None
    return model.eval()


def prepare_float64_(model: nn.Module, dtype: torch.dtype | str) -> nn.Module:
    """In fp64, make every weight fp64, also those that an architecture keeps in fp32 (routers), and compute experts one
    by one: torch's grouped matmul does not support fp64."""
    if dtype == torch.float64:
        for weight in model.parameters():
            if weight.dtype == torch.float32:
                weight.data = weight.data.double()
        model.set_experts_implementation("eager")  # type: ignore[operator]
    return model


# Embedding and head rows for added tokens.
#
# A new row is the mean of the rows of the tokens that the text was split into before, so that the model starts with a
# token that means about the same. Random rows are far from all others and disturb the model at first.


def add_token_rows_(model: nn.Module, config: ModelConfig) -> None:
    """Add rows for `config.add_tokens` to embedding and head. Existing padding rows are used first."""
    if not config.add_tokens:
        return
    before = load_tokenizer(config.model_copy(update={"add_tokens": []}))
    after, known = load_tokenizer(config), before.get_vocab()
    new = [token for token in config.add_tokens if token not in known]
    if not new:
        return
    numbers = lookup_token_ids(after, new)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    if len(after) > embedding.num_embeddings:
        model.resize_token_embeddings(len(after), mean_resizing=False)  # type: ignore[operator]
    pieces = [_split_before(before, token) for token in new]
    seen: list[Tensor] = []
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):  # type: ignore[operator]
        weight = None if module is None else module.weight
        if weight is None or any(weight is other for other in seen):  # tied: the same rows
            continue
        seen.append(weight)
        _fill_rows(weight, numbers, pieces, len(before))
        if getattr(module, "bias", None) is not None and len(module.bias) == len(weight):
            _fill_rows(module.bias, numbers, pieces, len(before))


@torch.no_grad()
def resize_embeddings_(model: nn.Module, tokens: int) -> None:
    """Resize embedding and head to `tokens` rows for an adapter that brings the new ones. Without the adapter they are
    the mean of all rows, which is never the argmax, so generation does not change."""
    before = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if tokens <= before:
        return
    model.resize_token_embeddings(tokens, mean_resizing=False)  # type: ignore[operator]
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):  # type: ignore[operator]
        for weight in () if module is None else module.parameters(recurse=False):
            exact = torch.promote_types(weight.dtype, torch.float32)
            weight[before:] = weight[:before].to(exact).mean(dim=0).to(weight.dtype)


def lookup_token_ids(
    tokenizer: PreTrainedTokenizerFast, tokens: Sequence[str], key: str = "model.add_tokens"
) -> list[int]:
    """The ids of tokens, each of which must be in the vocabulary."""
    known = tokenizer.get_vocab()
    unknown = [token for token in tokens if token not in known]
    if unknown:
        raise WhetError(f"{key}: {unknown[0]!r} is not a token of this tokenizer. Add it with model.add_tokens")
    return [known[token] for token in tokens]


def trainable_token_ids(config: ModelConfig, known: Sequence[str]) -> list[int]:
    """The ids whose rows an adapter trains: added tokens, and the `known` ones of adapter.tokens."""
    if not config.add_tokens and not known:
        return []
    tokenizer = load_tokenizer(config)
    numbers = lookup_token_ids(tokenizer, config.add_tokens) + lookup_token_ids(tokenizer, known, "adapter.tokens")
    return sorted(set(numbers))


def _split_before(tokenizer: PreTrainedTokenizerFast, token: str) -> list[int]:
    """The ids that the text was split into before, without the unknown token."""
    ids: list[int] = tokenizer.encode(token, add_special_tokens=False)
    return [number for number in ids if number != tokenizer.unk_token_id]


@torch.no_grad()
def _fill_rows(weight: Tensor, numbers: Sequence[int], pieces: Sequence[Sequence[int]], known: int) -> None:
    """Set rows of a matrix or elements of a bias to means, computed in at least fp32."""
    exact = torch.promote_types(weight.dtype, torch.float32)
    overall = None
    rows = []
    for ids in pieces:
        if ids:
            rows.append(weight[list(ids)].to(exact).mean(dim=0))
        else:
            overall = weight[:known].to(exact).mean(dim=0) if overall is None else overall
            rows.append(overall)
    weight[list(numbers)] = torch.stack(rows).to(weight.dtype)
