"""The loss, inside the root module: the sum of −log p over supervised tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from whet.model.attention import document_kwargs, needs_document_spans
from whet.model.loss.linear_cross_entropy import LossSum, linear_cross_entropy
from whet.model.loss.output_head import read_output_head

_T = TypeVar("_T")


class LossModel(nn.Module):
    """A causal language model that answers with its loss. The head sees supervised positions only."""

    def __init__(self, language_model: nn.Module, smoothing: float = 0.0, z_loss: float = 0.0) -> None:
        super().__init__()
        self.language_model = language_model
        self.smoothing = smoothing
        self.z_loss = z_loss
        self.alone = False
        """Each batch is one document, and the model attends as it likes."""

    @functools.cached_property
    def trained(self) -> list[nn.Parameter]:
        """The weights that are learned. Looked for once: a model with adapters has thousands of modules, and in every
        step a GPU would wait meanwhile."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def forward(self, batch: Any, weight: float = 1.0) -> LossSum:
        """`batch` is a PackedBatch. `weight`: 1 ÷ the supervised tokens of the whole step, so that gradients of all
        micro-batches and ranks need only be summed."""
        if self.alone:  # without the padding, whose positions could change how positions are turned
            hidden = self.hidden_alone(batch.tokens[: batch.cu_seqlens_host[1]])
        else:
            hidden = self.hidden(
                batch.tokens, batch.positions, batch.cu_seqlens, batch.max_seqlen, batch.cu_seqlens_host
            )
        supervised = hidden.index_select(0, batch.supervised_at)
        targets = batch.labels.index_select(0, batch.supervised_at)
        head = read_output_head(self.language_model)
        return linear_cross_entropy(supervised, head, targets, weight, self.smoothing, self.z_loss)

    def within(self, compute: Callable[[], _T]) -> _T:
        """What `compute` gives, with this module's own weights whole: divided among processes, they are only inside
        its methods."""
        return compute()

    def hidden(
        self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor, longest: int, edges: Sequence[int]
    ) -> Tensor:
        """[T, E] of a row of packed documents."""
        body = self.language_model.base_model
        output = body(  # type: ignore[operator]
            input_ids=tokens[None], position_ids=positions[None], use_cache=False,
            **document_kwargs(cu_seqlens, longest, edges, by_token=needs_document_spans(self.language_model)),
        )  # fmt: skip
        return output.last_hidden_state[0]

    def hidden_alone(self, tokens: Tensor) -> Tensor:
        """[T, E] of one document, by the model's own attention."""
        return self.language_model.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]  # type: ignore[operator]
