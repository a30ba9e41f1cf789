"""The auxiliary loss of routers: it balances the load of experts, and is exact for every layout of a step.

transformers defines it for a batch, over the layers and tokens together:

    loss = E · Σ_e f_e · P_e        E experts; N tokens × layers with a router
    f_e = choices of expert e ÷ N   a token chooses its top-k experts
    P_e = Σ p_e ÷ N                 p: the softmax of a token's router logits

The batch is the whole step here, without padding. f comes from counting and has no gradient, so a token adds
coefficient · E / N · Σ_e f_e · ∂p_e/∂logits to the gradient of its logits, which needs f of the whole step. A forward
pass without gradients over all micro-batches of the step counts first. Gradients are then added to the router logits in
the backward pass, so that nothing is kept of them and recomputed layers need nothing special.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whet.compat.transformers_private import router_logit_outputs
from whet.core.errors import WhetError


class RouterAuxLoss:
    """The routers of a model, with hooks that count what they choose and add the gradient of the loss."""

    def __init__(self, language_model: Any, coefficient: float) -> None:
        outputs = router_logit_outputs(language_model)
        own = configured_coefficient(language_model)
        if not outputs or own is None:
            reason = "it has no router, or balances its experts in another way"
            if own is not None:
                reason = "this version of transformers does not return its router logits"
            raise WhetError(
                f"train.router_aux_loss: {coefficient:g}, but transformers defines no such loss for "
                f"{type(language_model).__name__}: {reason}. Set train.router_aux_loss=0"
            )
        self.coefficient = coefficient
        self._experts, self._top_k = language_model.num_experts, language_model.num_experts_per_tok
        self._is_counting = False
        self._is_document: Tensor | None = None
        self._sums = torch.zeros(2, self._experts, dtype=torch.float64)  # choices, probabilities
        self._rows = torch.zeros((), dtype=torch.float64)  # document tokens × layers
        self._pull: Tensor | None = None
        """∂loss/∂p_e of one token, with coefficient and loss scale."""
        for router, index in outputs:
            router.register_forward_hook(partial(self._after_router, index))

    def select_tokens(self, is_document: Tensor) -> None:
        """Which tokens [T] of the next forward pass are not padding."""
        self._is_document = is_document

    def count(self, forward_passes: Callable[[], None], reduce_: Callable[[Tensor], Any], scale: float) -> Tensor:
        """Run all forward passes of a step and count; `reduce_` sums over ranks, in place. Returns the loss of the
        step, without its coefficient. `scale` is the loss scale of the gradients."""
        self._sums.zero_()
        self._rows.zero_()
        self._is_counting = True
        try:
            with torch.no_grad():
                forward_passes()
        finally:
            self._is_counting = False
        numbers = torch.cat([self._sums.flatten(), self._rows[None]])
        reduce_(numbers)
        rows = numbers[-1].clamp(min=1)
        shares, probabilities = numbers[:-1].view(2, self._experts) / rows
        self._pull = shares * (self.coefficient * scale * self._experts) / rows
        return self._experts * (shares * probabilities).sum()

    def _after_router(self, index: int, router: nn.Module, inputs: Any, output: Any) -> Any:
        """Count the choices, or return the output with the gradient of the loss attached."""
        logits = output[index] if isinstance(output, tuple) else output
        if self._is_counting:
            self._count_choices(logits)
            return None
        if self._pull is None or not torch.is_grad_enabled() or not logits.requires_grad:
            return None
        assert self._is_document is not None
        if not isinstance(output, tuple):
            return _AddGradient.apply(output, logits, self._is_document, self._pull)
        place = next(place for place, part in enumerate(output) if place != index and _is_differentiable(part))
        carrier = _AddGradient.apply(output[place], logits, self._is_document, self._pull)
        return (*output[:place], carrier, *output[place + 1 :])

    def _count_choices(self, logits: Tensor) -> None:
        if logits.shape[-1] != self._experts:
            raise WhetError(
                f"train.router_aux_loss: {self.coefficient:g}, but the routers of this model give "
                f"{logits.shape[-1]} logits for {self._experts} experts, a form that whet does not know. "
                "Set train.router_aux_loss=0"
            )
        if self._sums.device != logits.device:
            self._sums, self._rows = self._sums.to(logits.device), self._rows.to(logits.device)
        assert self._is_document is not None
        is_document = self._is_document.double()
        probabilities = _softmax(logits.reshape(-1, self._experts))
        chosen = probabilities.topk(self._top_k, dim=-1).indices
        weights = is_document[:, None].expand(-1, self._top_k)
        self._sums[0].scatter_add_(0, chosen.flatten(), weights.flatten())
        self._sums[1] += is_document @ probabilities.double()
        self._rows += is_document.sum()


def configured_coefficient(language_model: Any) -> float | None:
    """The coefficient in the model's config.json; None if transformers defines no such loss for the model."""
    has_loss = all(hasattr(language_model, name) for name in _ATTRIBUTES)
    return float(language_model.router_aux_loss_coef) if has_loss else None


_ATTRIBUTES = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")


def _is_differentiable(part: Any) -> bool:
    return isinstance(part, Tensor) and part.requires_grad


def _softmax(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)


class _AddGradient(torch.autograd.Function):
    """Forward: the identity of `carrier`, which the layer uses. Backward: adds the gradient of the loss to the router
    logits, which it may not use."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, logits: Tensor, is_document: Tensor, pull: Tensor) -> Tensor:
        ctx.save_for_backward(logits, is_document, pull)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        logits, is_document, pull = ctx.saved_tensors
        p = _softmax(logits).view(len(is_document), -1)
        pull = pull.to(p.dtype)
        gradient = p * (pull - (p * pull).sum(-1, keepdim=True)) * is_document[:, None]
        return grads[0], gradient.view(logits.shape).to(logits.dtype), None, None
