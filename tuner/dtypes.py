"""The data types of codegen as NumPy has them."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from codegen.dtypes import DTYPES

DType = np.dtype[Any]

NUMPY = MappingProxyType({
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "uint8": np.dtype(np.uint8),
    "int32": np.dtype(np.int32),
})
"""By name: the data types of tensors, and those that only scratch buffers have."""

FLOAT32 = NUMPY["float32"]

POISON = 0x7FED7FED
"""What memory that nothing has written holds, in every 32 bits. A quiet NaN in float32, and each half of it in bfloat16 and in
float16, but none that arithmetic yields on a GPU (0x7fffffff, 0x7fff). As an index of 32 bits it lies 8.6e9 bytes behind a tensor
of four-byte elements, where there is none. cuda_on_host/memory.h has the same."""


def tensor_dtype(array: NDArray[Any]) -> str | None:
    """The name of the data type an array has, if tensors may have it. That of the other byte order has none."""
    return next((name for name in DTYPES if NUMPY[name] == array.dtype), None)


def as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The same memory as bytes [n]. NumPy's own buffers do not know every data type."""
    return array.reshape(-1).view(np.uint8)


def same_bits(first: NDArray[Any], second: NDArray[Any]) -> bool:
    """Whether two C-contiguous arrays hold the same bits, NaN and negative zeros included."""
    return first.nbytes == second.nbytes and bool(np.array_equal(_words(first), _words(second)))


def _words(array: NDArray[Any]) -> NDArray[Any]:
    """The same memory in the widest pieces it has a whole number of: fewer to compare."""
    width = next(width for width in (8, 4, 2, 1) if array.nbytes % width == 0)
    return as_bytes(array).view(f"u{width}")
