"""Document attention: a token attends to the tokens before it in its own document, and to no other.

Each back-end is registered with transformers under its own name; model code is not changed. A batch is one row of T
tokens (shape letters: H heads, K key-value heads, T tokens, E head dimension, V head dimension of values). Document
boundaries come with each forward pass as a keyword argument, which transformers passes through to the attention.
"""

from whet.model.attention.backends import (
    cudnn_attention_forward,
    eager_attention_forward,
    fa4_attention_forward,
    flex_attention_forward,
    sdpa_attention_forward,
    short_attention_forward,
    varlen_attention_forward,
)
from whet.model.attention.dispatch import (
    CUDNN_MIN_LENGTH,
    FA4_MIN_LENGTH,
    LayerAttention,
    choose_backend,
    current_backend,
    describe_backend,
    inspect_attention,
    install_backend,
    native_attention,
    needs_document_spans,
    registered_name,
    supports_fullgraph,
    unsupported_attention,
    use_native_attention,
)
from whet.model.attention.interface import (
    AttentionSpec,
    Documents,
    PackedDocuments,
    PackingError,
    current_documents,
    document_kwargs,
)

__all__ = [
    "CUDNN_MIN_LENGTH",
    "FA4_MIN_LENGTH",
    "AttentionSpec",
    "Documents",
    "LayerAttention",
    "PackedDocuments",
    "PackingError",
    "choose_backend",
    "cudnn_attention_forward",
    "current_backend",
    "current_documents",
    "describe_backend",
    "document_kwargs",
    "eager_attention_forward",
    "fa4_attention_forward",
    "flex_attention_forward",
    "inspect_attention",
    "install_backend",
    "native_attention",
    "needs_document_spans",
    "registered_name",
    "sdpa_attention_forward",
    "short_attention_forward",
    "supports_fullgraph",
    "unsupported_attention",
    "use_native_attention",
    "varlen_attention_forward",
]
