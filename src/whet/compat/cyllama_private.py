"""Internals of cyllama, seen in 0.2.18: what it knows of llama.cpp and does not offer."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

_STRUCT_SIZE = 56
"""Of llama_model_quantize_params: four ints, six bools, four pointers; the object ends with it."""
_FTYPE, _IMATRIX = 4, 24
"""Where the type and the pointer to the importance matrix are in it."""


def load_llama_model(file: str, settings: Any) -> Any:
    """A model whose context returns logits: that reads `n_vocab` of its model, which LlamaModel lacks."""
    from cyllama.llama.llama_cpp import LlamaModel

    class ModelWithVocabulary(LlamaModel):
        @property
        def n_vocab(self) -> int:
            return self.get_vocab().n_vocab

    return ModelWithVocabulary(file, settings)


class _Entry(ctypes.Structure):
    """llama_model_imatrix_data; a list of them ends with a name that is NULL."""

    _fields_ = (("name", ctypes.c_char_p), ("data", ctypes.POINTER(ctypes.c_float)), ("size", ctypes.c_size_t))


def set_importance_matrix(settings: Any, matrix: Mapping[str, np.ndarray[Any, Any]]) -> object:
    """Give LlamaModelQuantizeParams an importance matrix, which it has no setter for. Keep what this returns until
    the model is quantized."""
    start = id(settings) + type(settings).__basicsize__ - _STRUCT_SIZE
    if ctypes.c_int.from_address(start + _FTYPE).value != settings.ftype:
        raise RuntimeError("this version of cyllama takes no importance matrix")
    entries = (_Entry * (len(matrix) + 1))()
    kept = [np.ascontiguousarray(values, dtype=np.float32) for values in matrix.values()]
    for entry, name, values in zip(entries, matrix, kept, strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    ctypes.c_void_p.from_address(start + _IMATRIX).value = ctypes.addressof(entries)
    return entries, kept
