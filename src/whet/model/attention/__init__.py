"""Document attention: a token attends to the tokens before it in its own document, and to no other.

Each back-end is registered with transformers under a name of its own; models stay as they are. The batch has one row of
T tokens (shape letters: B = 1, H heads, K key-value heads, T tokens, E head width, V head width of values); where
documents begin comes with each forward pass as a keyword argument, which transformers hands through to the attention.
"""

from whet.model.attention.ask import Ask, Documents, described
from whet.model.attention.choose import LONG, choose
from whet.model.attention.flexible import flex
from whet.model.attention.install import (
    compiles_through,
    install,
    leave,
    name_of,
    plain,
    served_by,
    serving,
    wants_spans,
)
from whet.model.attention.long_documents import cudnn
from whet.model.attention.look import Asked, look, unserved
from whet.model.attention.per_document import per_document_sdpa
from whet.model.attention.reference import eager
from whet.model.attention.short_documents import short
from whet.model.attention.variable_length import varlen

__all__ = [
    "LONG",
    "Ask",
    "Asked",
    "Documents",
    "choose",
    "compiles_through",
    "cudnn",
    "described",
    "eager",
    "flex",
    "install",
    "leave",
    "look",
    "name_of",
    "per_document_sdpa",
    "plain",
    "served_by",
    "serving",
    "short",
    "unserved",
    "varlen",
    "wants_spans",
]
