"""How products of float values are made of products that tensor cores have: the one table of it (templates/_mma.cu.j2)."""

from __future__ import annotations

PLANES = {"bf16": 1, "bf16x3": 2, "bf16x6": 3, "fp16": 1, "fp16x3": 2}
"""Into how many 16-bit numbers each arithmetic takes a value apart."""

FINEST_CLASS = {"fp16x3": "fp32", "bf16x6": "fp32", "bf16x3": "tf32", "fp16": "tf32", "bf16": "bf16"}
"""The finest accuracy class that each arithmetic on float32 data can meet."""

OWN_ARITHMETIC = {"float16": "fp16", "bfloat16": "bf16"}
"""The arithmetic of 16-bit data, whose products are those of its own type."""


def products(arithmetic: str) -> int:
    """16-bit products for one of the values: those of planes whose numbers, counted from 0, add up to less than PLANES."""
    planes = PLANES[arithmetic]
    return planes * (planes + 1) // 2
