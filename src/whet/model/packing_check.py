"""Checks before the first step: packed documents do not influence each other, and whet's logits are the model's own.

Some architectures carry state from token to token, so that packed documents would leak into each other: their recurrent
layers compute each document by itself (`attention/recurrent.py`). Others have attention of their own: they are trained
unpacked, documents of like length in a padded batch. Some transform their logits in ways that their configuration does
not show: they are refused. Training them would look healthy and be wrong.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whet.core.distributed import is_peer_failure
from whet.core.errors import WhetError, describe_error
from whet.model.attention import PackingError, native_attention, unsupported_attention, use_native_attention
from whet.model.attention.recurrent import find_recurrent_layers, reset_state_between_documents, undo_reset
from whet.model.experts.routing import Routing
from whet.model.loss.loss_model import LossModel
from whet.model.loss.output_head import OutputHead, read_output_head
from whet.model.modules import eval_mode, other_modalities


@dataclass(frozen=True, slots=True)
class LengthDependentRope:
    """A rotary embedding with other frequencies for documents that are longer than `switch`."""

    kind: str
    switch: int


def length_dependent_rope(model: nn.Module, longest: int) -> LengthDependentRope | None:
    """The rotary embedding, if its frequencies depend on length for documents of up to `longest` tokens.

    transformers takes the largest position of a whole row, so that one long document would change the embeddings of the
    short ones beside it. Up to the original context length, all documents have the same frequencies.
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    for settings in _rope_settings(getattr(config, "rope_parameters", None) or {}):
        kind = settings.get("rope_type")
        first = settings.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if kind == "dynamic":
            first = None  # transformers reads max_position_embeddings alone
        if kind in ("dynamic", "longrope") and longest > (switch := first or config.max_position_embeddings):
            return LengthDependentRope(kind, switch)
    return None


def _rope_settings(parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One dict for the model, or one for each layer type."""
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (value for value in parameters.values() if isinstance(value, dict))


_PROBE_FAILURES = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_LARGE_LOGIT = 64.0
"""The largest logit of the second comparison: a soft-cap of 30 hardly changes the small logits of the first."""


class LeakError(PackingError):
    """A packed document changed the logits of another."""


def choose_packing(root: LossModel, vocabulary: int, longest: int) -> None:
    """Check that packed documents do not influence each other; where they do, reset the state of recurrent layers
    between documents, and if that does not help, train the model unpacked.

    Sets `root.unpacked`. Raises a WhetError if whet's logits are not the model's own either way. `longest`: the length
    of the longest document in training.
    """
    _require_positions(root.language_model, longest)
    try:
        root.with_full_weights(functools.partial(_check_packed, root, vocabulary, longest))
        return
    except LeakError as error:
        failure = _reset_state(root, vocabulary, longest)
        if failure is None:
            return
        root.unpacked = f"{error}{failure}"
    except PackingError as error:
        root.unpacked = str(error)
    except _PROBE_FAILURES as error:
        _raise_if_not_the_model(error)
        root.unpacked = f"its code fails on packed conversations ({describe_error(error)})"
    use_native_attention(root.language_model)
    root.with_full_weights(functools.partial(_check_unpacked, root, vocabulary, longest))
    _check_backward(root, vocabulary)
    rope = length_dependent_rope(root.language_model, longest)
    root.rope_switch = None if rope is None else rope.switch
    counts_by_batch = rope is not None and root.router_aux_loss is not None
    if not counts_by_batch and not _selects_tokens(root.language_model, longest):
        root.pads = root.with_full_weights(functools.partial(_pads_exactly, root, vocabulary, longest))


_POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings", "positions_embed", "pos_encoding")
"""Names of what has a row for each position: an embedding, or a buffer of sines."""


def _require_positions(model: nn.Module, longest: int) -> None:
    """Refuse documents with more tokens than the model has positions for. On a GPU, looking up one more ends the
    process; rotary embeddings have no such limit, nor has ALiBi but that of MPT."""
    others = tuple(f"{name}." for name in other_modalities(model))
    config: Any = model.config
    rooms = [config.max_seq_len] if config.model_type == "mpt" else []
    for name, table in itertools.chain(model.named_modules(), model.named_buffers()):
        plain = name.partition(".base_layer")[0].partition(".original_module")[0]  # adapted, or trained whole by peft
        if plain.rpartition(".")[2] not in _POSITION_TABLES or name.startswith(others):
            continue
        weight = table if isinstance(table, Tensor) else getattr(table, "weight", None)
        if isinstance(table, nn.Embedding | Tensor) and weight is not None:
            rooms.append(len(weight) - getattr(table, "offset", 0))
    if rooms and longest > min(rooms):
        raise WhetError(
            f"data.max_length: the longest conversation has {longest:,} tokens, and {type(model).__name__} has "
            f"positions for only {min(rooms):,}. Lower data.max_length to that"
        )


def _raise_if_not_the_model(error: Exception) -> None:
    if is_peer_failure(error) or isinstance(error, torch.OutOfMemoryError):
        raise error


@torch.no_grad()
def _check_packed(root: LossModel, vocabulary: int, longest: int) -> None:
    """Compare two packed documents with the model's own logits for each of them."""
    model = root.language_model
    rope = length_dependent_rope(model, longest)
    if rope is not None:  # the documents below are too short to show it
        raise PackingError(
            f"its rotary embedding ({rope.kind}) depends on the longest conversation of a row, here {longest:,} "
            "tokens. With data.max_length at its original context length it can be packed"
        )
    reason = unsupported_attention(model)
    if reason is not None:  # the documents below are too short to show windows
        raise PackingError(reason)
    tokens = torch.arange(16, device=next(root.parameters()).device) * 7919 % vocabulary
    routing = Routing(model)
    with eval_mode(root):
        head = read_output_head(model)  # raises for heads that are not linear
        hidden = hidden_of_documents(root, [tokens[:8], tokens[8:]])
        other = hidden_of_documents(root, [tokens[:8].flip(0), tokens[8:]])
        largest = _largest_logit(head, hidden)
        own = {_LARGE_LOGIT / largest: _reference_logits(model, tokens, _LARGE_LOGIT / largest)}
        with routing.captured():
            own[1.0] = _reference_logits(model, tokens, 1.0)
        if routing.modules:
            with routing.replayed():
                routed = hidden_of_documents(root, [tokens[:8], tokens[8:]])
    leak = (
        (head.logits(hidden[8:]) - head.logits(other[8:])).abs().max().item()
    )  # same shapes, so no rounding differences
    if not leak <= 1e-5 * own[1.0].abs().max().item():
        raise LeakError(
            f"packed conversations influence each other (logits change by {leak:.3g} when another conversation "
            "changes): it has recurrent layers or custom attention"
        )
    difference = _logit_difference(head, routed if routing.modules else hidden, own, largest)
    if difference:
        raise PackingError(f"packed conversations have different logits from each alone (by {difference:.3g})")


@torch.no_grad()
def _check_unpacked(root: LossModel, vocabulary: int, longest: int) -> None:
    """Compare the logits of one document with the model's own, and look whether a token changes those before it."""
    model = root.language_model
    name = type(model).__name__
    rope = length_dependent_rope(model, longest)
    if rope is not None and rope.kind == "dynamic":
        raise WhetError(
            "model.path: this model's rotary embedding (dynamic) depends on earlier documents, so runs would not be "
            f"reproducible. Lower data.max_length (the longest conversation has {longest:,} tokens)"
        )
    tokens = torch.arange(8, device=next(root.parameters()).device) * 7919 % vocabulary
    with eval_mode(root):
        try:
            head = read_output_head(model)
            hidden = root.hidden_unpacked([tokens])
            other = root.hidden_unpacked([torch.cat([tokens[:7], tokens[:1]])])
            largest = _largest_logit(head, hidden)
            own = {scale: _reference_logits(model, tokens, scale, 1) for scale in (1.0, _LARGE_LOGIT / largest)}
        except _PROBE_FAILURES as error:
            _raise_if_not_the_model(error)
            raise _broken_code(model, error) from None
    change = (hidden - other)[:7].abs().max().item()  # same shapes, so hardly any rounding differences
    if not change <= 1e-3 * hidden.abs().max().item():
        raise WhetError(
            f"model.path: {name} is not a causal model: a token changes the hidden states before it (by {change:.3g}), "
            "so it would see the answers that it is meant to learn. Use another model"
        )
    difference = _logit_difference(head, hidden, own, largest)
    if difference:
        raise WhetError(
            f"model.path: whet's logits differ from those of {name} itself by {difference:.3g}: it transforms its "
            "logits in a way that whet does not support, so it would be trained wrongly. Use another model"
        )


def _check_backward(root: LossModel, vocabulary: int) -> None:
    """Compute a gradient: kernels can lack a backward pass on a device."""
    tokens = torch.arange(8, device=next(root.parameters()).device) * 7919 % vocabulary
    with eval_mode(root):
        try:
            _with_gradients(root, lambda: root.hidden_unpacked([tokens]))
        except _PROBE_FAILURES as error:
            _raise_if_not_the_model(error)
            raise _broken_code(root.language_model, error) from None


def _broken_code(model: nn.Module, error: Exception) -> WhetError:
    return WhetError(
        f"model.path: {type(model).__name__} cannot be trained: its code fails on a conversation "
        f"({describe_error(error)}). Use another model; with an adapter, try adapter.targets that name only the "
        "attention layers"
    )


_CHOSEN_TOKENS = ("index_topk", "keep_window_size")  # DeepSeek-V3.2 and GLM-5; Doge


def _selects_tokens(model: nn.Module, longest: int) -> bool:
    """Whether the model attends to some tokens of a document alone: sparse attention. Which of equal tokens it chooses
    depends on the length of the row, and so on padding. The documents of the probe are too short to show it."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    sizes = (getattr(config, name, None) for name in _CHOSEN_TOKENS)
    return any(size is not None and longest > size for size in sizes)


_PROBED_LENGTHS = (73, 200)
"""More than the chunks of state-space layers, and no multiples of them; less where training has no such documents. The
longer one is second: the end of the first would be a place inside of it, should a layer mistake one for the other."""


def _probed_documents(root: LossModel, vocabulary: int, longest: int) -> list[Tensor]:
    device = next(root.parameters()).device
    share = min(1.0, longest / max(_PROBED_LENGTHS))
    return [torch.arange(max(1, int(n * share)), device=device) * 7919 % vocabulary for n in _PROBED_LENGTHS]


def _reset_state(root: LossModel, vocabulary: int, longest: int) -> str | None:
    """Reset the state of recurrent layers between documents. None if packed documents then have the hidden states and
    gradients that each has alone; otherwise why not, and the model is as before."""
    tokens = (torch.arange(16, device=next(root.parameters()).device) * 7919 % vocabulary).split(8)
    layers = []
    try:
        run_packed = functools.partial(hidden_of_documents, root, tokens)
        layers = root.with_full_weights(
            functools.partial(find_recurrent_layers, root.language_model, run_packed, 8, 16)
        )
        if not layers:
            return ""
        reset_state_between_documents(layers)
        root.with_full_weights(functools.partial(_check_packed, root, vocabulary, longest))
        failure = _packing_difference(root, _probed_documents(root, vocabulary, longest))
        if failure is None:
            return None
    except PackingError as error:
        failure = str(error)
    except _PROBE_FAILURES as error:
        _raise_if_not_the_model(error)
        failure = describe_error(error)
    undo_reset(layers)
    return f"; resetting their state between conversations does not help: {failure}"


def _packing_difference(root: LossModel, documents: list[Tensor]) -> str | None:
    """How packed documents differ from each alone in their hidden states or the gradients of their embeddings, beyond
    rounding, or that the gradient of a document reaches another; None if they do not.

    Rounding grows with the depth of a model. By how much, embeddings show that differ by one unit of rounding.
    """
    routing = Routing(root.language_model)
    run_packed = functools.partial(hidden_of_documents, root, documents)
    with eval_mode(root):
        with native_attention(root.language_model), routing.captured():
            alone = [_with_gradients(root, functools.partial(root.hidden_unpacked, [each])) for each in documents]
        with routing.replayed():
            packed = _with_gradients(root, run_packed)
            rounded = _with_gradients(root, run_packed, is_rounded=True)
        _, of_last = _with_gradients(root, lambda: run_packed()[-len(documents[-1]) :])
    if of_last[: -len(documents[-1])].any():
        return "the gradient of a conversation reaches another"
    expected = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    for what, found, right, noisy in zip(("hidden states", "gradients"), packed, expected, rounded, strict=True):
        difference, rounding = _difference(found, right), _difference(noisy, found)
        if not difference <= max(_tolerance(right), min(2 * rounding, _MAX_ROUNDING)):
            return f"{what} differ by {difference:.1%} from those of each conversation alone"
    return None


def _with_gradients(root: LossModel, compute: Callable[[], Tensor], is_rounded: bool = False) -> tuple[Tensor, Tensor]:
    """Hidden states of one row, and the gradient of a weighted sum of them for each embedding. `is_rounded`: with
    embeddings that differ by a unit of rounding. A pass of its own: a backward pass shards the root's weights again."""
    return root.with_full_weights(functools.partial(_hidden_and_gradients, root, compute, is_rounded))


@torch.enable_grad()
def _hidden_and_gradients(root: LossModel, compute: Callable[[], Tensor], is_rounded: bool) -> tuple[Tensor, Tensor]:
    embeddings = []

    def detach(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        embedding = output.detach()
        if is_rounded:
            is_coarse = torch.is_autocast_enabled(output.device.type)
            unit = torch.finfo(torch.bfloat16 if is_coarse else output.dtype).eps
            signs = 1 - 2 * (torch.arange(output.shape[-1], device=output.device) % 2)
            embedding = embedding * (1 + unit * signs).to(output.dtype)
        embeddings.append(embedding.requires_grad_())
        return embeddings[-1].clone()  # some models add positions to it in place

    hook = root.language_model.get_input_embeddings().register_forward_hook(detach)  # type: ignore[operator]
    try:
        hidden = compute()
    finally:
        hook.remove()
    weights = torch.linspace(-1, 1, hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)
    gradient, *_ = torch.autograd.grad((hidden * weights).sum(), embeddings, allow_unused=True, materialize_grads=True)
    return hidden.detach(), gradient[0]


_MAX_ROUNDING = 0.15
"""Differences that are no rounding, however deep the model: those of a wrong computation are of the order of 1."""


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def _tolerance(expected: Tensor) -> float:
    """The `_difference` of two results of the same computation in other shapes."""
    is_coarse = torch.is_autocast_enabled(expected.device.type) or expected.dtype.itemsize < 4
    return 3e-2 if is_coarse else 1e-4


@torch.no_grad()
def _pads_exactly(root: LossModel, vocabulary: int, longest: int) -> bool:
    """Whether documents in a padded batch have the hidden states that each has alone."""
    documents = _probed_documents(root, vocabulary, min(longest, root.rope_switch or longest))
    with eval_mode(root):
        alone = torch.cat([root.hidden_unpacked([document]) for document in documents])
        try:
            return _difference(root.hidden_unpacked(documents), alone) <= _tolerance(alone)
        except _PROBE_FAILURES as error:
            _raise_if_not_the_model(error)
            return False


@torch.no_grad()
def require_finite_logits(model: nn.Module) -> None:
    """Raise if the logits of a model are zero or not finite."""
    tokens = torch.arange(8, device=next(model.parameters()).device)
    with eval_mode(model), native_attention(model):
        _require_finite(model(input_ids=tokens[None], use_cache=False).logits.abs().max().item())


def _largest_logit(head: OutputHead, hidden: Tensor) -> float:
    largest = OutputHead(head.weight, scale=head.scale).logits(hidden).abs().max().item()
    _require_finite(largest)
    return largest


def _require_finite(largest: float) -> None:
    if not 0 < largest < math.inf:
        raise WhetError(
            "model.path: all logits of this model are zero, or some are not finite: its weights are broken, as after "
            "a diverged run. Use an earlier checkpoint"
        )


def _logit_difference(head: OutputHead, hidden: Tensor, own: dict[float, Tensor], largest: float) -> float | None:
    """By how much whet's logits differ from the model's own; None if only by rounding."""
    is_coarse = torch.is_autocast_enabled(hidden.device.type) or hidden.dtype.itemsize < 4
    for scale, expected in own.items():
        difference = (expected - head.logits(hidden * scale).float()).abs().max().item()
        size = max(expected.abs().max().item(), scale * largest)  # logits are rounded before the soft-cap
        if not difference <= (0.05 if is_coarse else 1e-4) * size:
            return difference
    return None


def hidden_of_documents(root: LossModel, documents: Sequence[Tensor]) -> Tensor:
    """Hidden states of a row of packed documents."""
    lengths = [len(document) for document in documents]
    edges = [0, *itertools.accumulate(lengths)]
    tokens = torch.cat(list(documents))
    positions = torch.cat([torch.arange(length, device=tokens.device) for length in lengths])
    cu_seqlens = torch.tensor(edges, device=tokens.device, dtype=torch.int32)
    return root.hidden(tokens, positions, cu_seqlens, max(lengths), edges)


def _reference_logits(model: nn.Module, tokens: Tensor, scale: float, documents: int = 2) -> Tensor:
    """The model's own logits of each document alone, with hidden states multiplied by `scale` before the head."""

    def scale_hidden(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs[0] * scale, *inputs[1:])

    hook = model.get_output_embeddings().register_forward_pre_hook(scale_hidden)  # type: ignore[operator]
    try:
        with native_attention(model):
            parts = [model(input_ids=part[None], use_cache=False).logits[0] for part in tokens.chunk(documents)]
    finally:
        hook.remove()
    return torch.cat(parts).float()
