"""How products of float values are made of products that the hardware has: the one table of it.

The templates _mma.cu.j2 and _gemm_whole.cu.j2 follow it.
"""

from __future__ import annotations

WHOLE = frozenset(("tf32", "tf32x3", "ffma"))
"""The arithmetics whose operands are float values as they stand in memory, not planes of 16-bit numbers."""

PLANES = {"bf16": 1, "bf16x3": 2, "bf16x6": 3, "fp16": 1, "fp16x3": 2, "tf32": 1, "tf32x3": 2, "ffma": 1}
"""Into how many numbers each arithmetic takes a value apart: of 16 bits, of tf32, or the value itself."""

FINEST_CLASS = {"fp16x3": "fp32", "bf16x6": "fp32", "tf32x3": "fp32", "ffma": "fp32", "bf16x3": "tf32", "fp16": "tf32",
                "tf32": "tf32", "bf16": "bf16"}
"""The finest accuracy class that each arithmetic on float32 data can meet."""

OWN_ARITHMETIC = {"float16": "fp16", "bfloat16": "bf16"}
"""The arithmetic of 16-bit data, whose products are those of its own type."""


def products(arithmetic: str) -> int:
    """Products for one of the values: those of numbers whose places, counted from 0, add up to less than PLANES."""
    planes = PLANES[arithmetic]
    return planes * (planes + 1) // 2


def matrix_steps(arithmetic: str) -> int:
    """Products of tensor cores over a depth of 16: 16-bit numbers go in steps of 16, those of tf32 of 8. None for ffma."""
    return 0 if arithmetic == "ffma" else products(arithmetic) * (2 if arithmetic in WHOLE else 1)


def value_bytes(arithmetic: str) -> int:
    """Bytes of shared memory that a value of an operand takes."""
    return 4 if arithmetic in WHOLE else 2 * PLANES[arithmetic]
