"""The root module of training: a causal language model whose forward pass returns its loss."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from whet.model.attention import PackedDocuments, document_kwargs, needs_document_spans
from whet.model.experts.routing import ExpertLoad
from whet.model.loss.linear_cross_entropy import LossSum, linear_cross_entropy
from whet.model.loss.output_head import read_output_head
from whet.model.loss.router_aux_loss import RouterAuxLoss
from whet.model.modules import model_body

_T = TypeVar("_T")


class LossModel(nn.Module):
    """Returns the sum of −log p over supervised tokens. The head is computed at supervised positions only."""

    def __init__(
        self, language_model: nn.Module, smoothing: float = 0.0, z_loss: float = 0.0, router_aux_loss: float = 0.0
    ) -> None:
        super().__init__()
        self.language_model = language_model
        self.smoothing = smoothing
        self.z_loss = z_loss
        self.router_aux_loss = RouterAuxLoss(language_model, router_aux_loss) if router_aux_loss else None
        self.expert_load: ExpertLoad | None = None
        """Counts the tokens of experts in training."""
        self.unpacked = ""
        """Why each row is one document and the model uses its native attention; empty if documents are packed."""
        self.pads = False
        """Of an unpacked model: whether documents share a batch, padded on the right; otherwise each is a batch."""
        self.rope_switch: int | None = None
        """Longer documents have another rotary embedding, so that they share no batch with shorter ones."""
        self.is_stochastic = False
        """Whether training draws random numbers, as for dropout."""

    @functools.cached_property
    def trainable_parameters(self) -> list[nn.Parameter]:
        """Cached: a model with adapters has thousands of modules, and walking them delays every step."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def forward(self, batch: Any, weight: float = 1.0) -> LossSum:
        """`batch` is a PackedBatch. `weight` is 1 ÷ the supervised tokens of the whole step, so that gradients of all
        micro-batches and ranks only need to be summed."""
        hidden = self.hidden_of_batch(batch)
        supervised = hidden.index_select(0, batch.supervised_at)
        targets = batch.labels.index_select(0, batch.supervised_at)
        head = read_output_head(self.language_model)
        return linear_cross_entropy(supervised, head, targets, weight, self.smoothing, self.z_loss)

    def hidden_of_batch(self, batch: Any) -> Tensor:
        """Last hidden states [T, E] of a PackedBatch; of an unpacked model, without the padding."""
        if self.unpacked:
            return self._hidden_of_documents(batch)
        if self.router_aux_loss is not None:
            self.router_aux_loss.select_tokens(batch.is_document())
        return self.hidden(batch.tokens, batch.positions, batch.cu_seqlens, batch.max_seqlen, batch.cu_seqlens_host)

    def _hidden_of_documents(self, batch: Any) -> Tensor:
        ends = batch.cu_seqlens_host[1 : max(1, len(batch.documents)) + 1]
        lengths = [end - start for start, end in itertools.pairwise((0, *ends))]
        parts = batch.tokens[: ends[-1]].split(lengths)
        if not self.pads:
            return torch.cat([self.hidden_unpacked([part]) for part in parts])
        switch = self.rope_switch or ends[-1]
        groups = [list(group) for _, group in itertools.groupby(parts, key=lambda part: len(part) > switch)]
        return torch.cat([self.hidden_unpacked(group) for group in groups])

    def with_full_weights(self, compute: Callable[[], _T]) -> _T:
        """Call `compute`. Under FSDP the root's own weights are unsharded inside this method, as in forward."""
        return compute()

    def hidden(
        self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor, max_seqlen: int, cu_seqlens_host: Sequence[int]
    ) -> Tensor:
        """Last hidden states [T, E] of a row of packed documents."""
        with_spans = needs_document_spans(self.language_model)
        kwargs = document_kwargs(cu_seqlens, max_seqlen, cu_seqlens_host, with_spans)
        with PackedDocuments(kwargs["documents"]):
            output = model_body(self.language_model)(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False, **kwargs
            )
        hidden: Tensor = output.last_hidden_state
        return hidden[0]

    def hidden_unpacked(self, documents: Sequence[Tensor]) -> Tensor:
        """Last hidden states [T, E] of documents, with the model's native attention. Shorter ones are padded on the
        right, which changes nothing in a causal model: no token depends on those after it."""
        padded = nn.utils.rnn.pad_sequence(list(documents), batch_first=True)
        if self.router_aux_loss is not None:
            ones = [torch.ones_like(document, dtype=torch.bool) for document in documents]
            self.router_aux_loss.select_tokens(nn.utils.rnn.pad_sequence(ones, batch_first=True).flatten())
        hidden: Tensor = model_body(self.language_model)(input_ids=padded, use_cache=False).last_hidden_state
        return torch.cat([row[: len(document)] for row, document in zip(hidden, documents, strict=True)])
