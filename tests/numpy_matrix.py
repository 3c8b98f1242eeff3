"""Matrix products as tensor cores work them out, in NumPy, and the backward pass made of them.

What is modelled is what costs digits: operands rounded to their format, in planes, and sums truncated while they accumulate. One
instruction adds a few exact products to a float32 accumulator: all addends are aligned to the largest of them, what lies
below its last bit (and GUARD_BITS more) is cut off, and so is the sum (Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of
NVIDIA tensor cores", 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tests.numpy_kernels import rounded, two_level_sum, widened
from tuner.executors.arrays import output_specs
from tuner.inputs import AnyFloats, Array32, Gradients, Inputs
from tuner.reference import Array64

GUARD_BITS = 1
"""Bits kept below the last one of the largest addend: none on Volta, one on Ampere, two or more on Hopper."""

SCALED_MAXIMUM = 15
"""Scaled operands are below 2^15: half of what float16 holds."""

SIGNIFICAND = 24


def truncated(a: Array64) -> Array64:
    """Towards zero to the 24 significant bits of a float32."""
    return (a.view(np.uint64) & ~np.uint64((1 << 53 - SIGNIFICAND) - 1)).view(np.float64)


def multiply_add(sums: Array64, a: Array32, b: Array32) -> Array64:
    """One instruction: float32 sums [M, N] and a [M, K] @ b [K, N]."""
    products = a[:, None, :].astype(np.float64) * b.T[None, :, :].astype(np.float64)
    largest = np.maximum(np.abs(products).max(axis=2), np.abs(sums))
    quantum = np.ldexp(1.0, np.frexp(largest)[1] - SIGNIFICAND - GUARD_BITS)
    products /= quantum[:, :, None]
    return truncated((np.trunc(products, out=products).sum(axis=2) + np.trunc(sums / quantum)) * quantum)


def to_bf16(a: AnyFloats) -> Array32:
    return rounded(a, 8)


def to_tf32(a: AnyFloats) -> Array32:
    return rounded(a, 11)


def to_fp16(a: AnyFloats) -> Array32:
    with np.errstate(over="ignore"):
        return a.astype(np.float16).astype(np.float32)


@dataclass(frozen=True)
class Arithmetic:
    """How a product is taken; called with two float32 matrices it gives a float32 one.

    Attributes:
        to_plane: rounds to the format of the operands.
        products: the planes of both operands that are multiplied, in that order; plane 0 is the high part.
        k_step: depth of one instruction.
        promote: depth after which sums move to ordinary float32 additions; None: never.
        scales: powers of two that bring operands close to 2^SCALED_MAXIMUM, for each `promote` of depth anew: one for each row of
            the one and each column of the other ("lines"), or one for each operand ("tiles", too few); empty: none.
    """

    to_plane: Callable[[AnyFloats], Array32]
    products: tuple[tuple[int, int], ...] = ((0, 0),)
    k_step: int = 16
    promote: int | None = 256
    scales: Literal["", "lines", "tiles"] = ""

    def __call__(self, a: AnyFloats, b: AnyFloats, largest_b: float | None = None) -> Array32:
        """a [M, K] @ b [K, N]; with `largest_b`, which nothing in b exceeds, all of b has the scale that follows from it."""
        total = np.zeros((a.shape[0], b.shape[1]), np.float32)
        step = self.promote or max(a.shape[1], 1)
        for start in range(0, a.shape[1], step):
            left, right = widened(a[:, start:start + step]), widened(b[start:start + step])
            if not self.scales:
                total += self._chunk(left, right)
                continue
            rows, columns = (1, 0) if self.scales == "lines" else (None, None)
            of_left = scale(np.abs(left).max(axis=rows, keepdims=True))
            of_right = scale(np.abs(right).max(axis=columns, keepdims=True) if largest_b is None else np.array([[largest_b]]))
            total += np.ldexp(self._chunk(np.ldexp(left, of_left), np.ldexp(right, of_right)), -of_left - of_right)
        return total

    def _chunk(self, a: Array32, b: Array32) -> Array32:
        left, right = self._planes(a), self._planes(b)
        sums = np.zeros((a.shape[0], b.shape[1]))
        for k in range(0, a.shape[1], self.k_step):
            part = slice(k, k + self.k_step)
            for i, j in self.products:
                sums = multiply_add(sums, left[i][:, part], right[j][part])
        return sums.astype(np.float32)

    def _planes(self, a: Array32) -> list[Array32]:
        planes = []
        for _ in range(1 + max(i for i, _ in self.products)):
            planes.append(self.to_plane(a))
            a = a - planes[-1]
        return planes


def scale(largest: AnyFloats) -> NDArray[np.int64]:
    """Exponents of the powers of two that bring `largest` into [2^14, 2^15); 0 for zero."""
    return np.where(largest > 0, SCALED_MAXIMUM - np.frexp(largest)[1], 0)


TWO_PLANES = ((1, 0), (0, 1), (0, 0))
THREE_PLANES = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))

ARITHMETIC = {
    "tf32": Arithmetic(to_tf32, k_step=8),
    "tf32x3": Arithmetic(to_tf32, TWO_PLANES, k_step=8),
    "bf16": Arithmetic(to_bf16),
    "bf16x3": Arithmetic(to_bf16, TWO_PLANES),
    "bf16x6": Arithmetic(to_bf16, THREE_PLANES),
    "fp16": Arithmetic(to_fp16, scales="lines"),
    "fp16x3": Arithmetic(to_fp16, TWO_PLANES, scales="lines"),
    "fp16 without scales": Arithmetic(to_fp16),
}
"""By name, all with sums promoted every 256. bfloat16 data is multiplied by "bf16", float16 data by "fp16 without scales"."""


def normalised(x: Array32, eps: np.float32) -> tuple[Array32, Array32]:
    """xhat and rstd. What rounding leaves of the mean is taken off after it, so that it costs nothing where the mean is large."""
    deviation = x - x.mean(axis=1, keepdims=True)
    deviation -= deviation.mean(axis=1, keepdims=True)
    rstd = 1 / np.sqrt(np.square(deviation).mean(axis=1, keepdims=True) + eps)
    return deviation * rstd, rstd


@dataclass(frozen=True)
class MatrixKernel:
    """The backward pass by two matrix products, dn = dy @ w and G = dy^T @ xhat; results are rounded to the types of the data.

    Attributes:
        arithmetic: of both.
        keeps_dn: rounds dn to the data type of x, as a kernel does that keeps it in dx until a row is complete.
    """

    arithmetic: Arithmetic
    keeps_dn: bool = False

    def __call__(self, given: Inputs, wants: frozenset[str]) -> Gradients:
        inputs = given.rounded_to("float32")
        ones, zeros = np.ones(inputs.hidden, np.float32), np.zeros(inputs.hidden, np.float32)
        gamma, beta = ones if inputs.gamma is None else inputs.gamma, zeros if inputs.beta is None else inputs.beta
        xhat, rstd = normalised(widened(inputs.x), np.float32(inputs.eps))
        results: dict[str, AnyFloats] = {}
        if "dx" in wants:
            dn = self.arithmetic(inputs.dy, inputs.w)
            g = (dn.astype(given.x.dtype).astype(np.float32) if self.keeps_dn else dn) * gamma
            dot = (dn * gamma * xhat).mean(axis=1, keepdims=True)
            results["dx"] = rstd * (g - (dn * gamma).mean(axis=1, keepdims=True) - xhat * dot)
        product = self.arithmetic(np.ascontiguousarray(inputs.dy.T), xhat, math.sqrt(inputs.hidden))
        db = two_level_sum(widened(inputs.dy))
        results |= {"dgamma": two_level_sum(widened(inputs.w * product)), "dbeta": two_level_sum(widened(db[:, None] * inputs.w)),
                    "dw": product * gamma + np.outer(db, beta), "db": db}
        return Gradients(**{name: results[name].astype(spec.dtype) for name, spec in output_specs(given, wants).items()})
