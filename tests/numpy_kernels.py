"""The backward pass in float32 NumPy, correct and with planted faults: what the validator is tested on.

A `Kernel` is the plain two-pass algorithm taken apart: each field is one of its choices, and a fault replaces one of them.
`SPOILERS` are faults of the results instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tuner.executors.arrays import output_specs
from tuner.inputs import AnyFloats, Array32, Gradients, Inputs

BLOCK = 4096
"""Rows summed into one float32 number at a time; the blocks' sums are added up after."""

Product = Callable[[AnyFloats, AnyFloats], Array32]


def two_pass(x: Array32, eps: np.float32) -> tuple[Array32, Array32]:
    """Mean and rstd [rows, 1]: two passes, and the mean corrected by what rounding left of it."""
    mean = x.mean(axis=1, keepdims=True)
    mean += (x - mean).mean(axis=1, keepdims=True)
    return mean, 1 / np.sqrt(np.square(x - mean).mean(axis=1, keepdims=True) + eps)


def one_pass(x: Array32, eps: np.float32) -> tuple[Array32, Array32]:
    """Faulty: E[x^2] - E[x]^2, not even negative."""
    mean = x.mean(axis=1, keepdims=True)
    return mean, 1 / np.sqrt(np.maximum(np.square(x).mean(axis=1, keepdims=True) - mean * mean, np.float32(0)) + eps)


def unbiased(x: Array32, eps: np.float32) -> tuple[Array32, Array32]:
    """Faulty: divides by H - 1."""
    mean, _ = two_pass(x, eps)
    variance = np.square(x - mean).sum(axis=1, keepdims=True) / np.float32(max(x.shape[1] - 1, 1))
    return mean, 1 / np.sqrt(variance + eps)


def float32_product(a: AnyFloats, b: AnyFloats) -> Array32:
    product: Array32 = np.matmul(a, b, dtype=np.float32)
    return product


def rounded(a: AnyFloats, bits: int) -> Array32:
    """`a` to the nearest float32 of `bits` significant bits (bf16 8, tf32 11), ties to even."""
    drop = 24 - bits
    pattern = np.ascontiguousarray(a, np.float32).view(np.uint32)
    pattern = pattern + np.uint32((1 << (drop - 1)) - 1) + ((pattern >> np.uint32(drop)) & np.uint32(1))
    return (pattern >> np.uint32(drop) << np.uint32(drop)).view(np.float32)


def tf32_product(a: AnyFloats, b: AnyFloats) -> Array32:
    return float32_product(rounded(a, 11), rounded(b, 11))


def bf16_product(a: AnyFloats, b: AnyFloats) -> Array32:
    return float32_product(rounded(a, 8), rounded(b, 8))


def bf16x3_product(a: AnyFloats, b: AnyFloats) -> Array32:
    """Three products of bf16 halves: sixteen significant bits of each operand, two short of what class fp32 needs."""
    a_high, b_high = rounded(a, 8), rounded(b, 8)
    a_low, b_low = rounded(a - a_high, 8), rounded(b - b_high, 8)
    small = float32_product(a_high, b_low) + float32_product(a_low, b_high)
    return small + float32_product(a_high, b_high)


def two_level_sum(a: Array32) -> Array32:
    """Sum over the rows: chains of 256, then the sum of those."""
    total = np.zeros(a.shape[1], np.float32)
    for i in range(0, len(a), 256):
        total += np.cumsum(a[i:i + 256], axis=0)[-1]
    return total


def one_chain_sum(a: Array32) -> Array32:
    """Too coarse for long sums: one float32 accumulator from the first row to the last."""
    total: Array32 = np.cumsum(a, axis=0)[-1]
    return total


@dataclass(frozen=True)
class Kernel:
    """float32 all through, in the order of the definition: 16-bit inputs are widened first, results rounded at the end.

    Attributes:
        statistics: mean and rstd of rows.
        product: the two matrix products.
        row_sum: dgamma, dbeta and db's sums over the rows.
        mean_term: factor of mean_h(dn*gamma) in dx; 1 is right.
        uses_gamma, uses_beta: whether gamma counts in dx and dw, and beta in dw.
        row_order: the order in which the parameter gradients take the rows, as indices; left out or repeated rows are faults.
    """

    statistics: Callable[[Array32, np.float32], tuple[Array32, Array32]] = two_pass
    product: Product = float32_product
    row_sum: Callable[[Array32], Array32] = two_level_sum
    mean_term: float = 1.0
    uses_gamma: bool = True
    uses_beta: bool = True
    row_order: Callable[[int], NDArray[np.int64]] | None = None

    def __call__(self, inputs: Inputs, wants: frozenset[str]) -> Gradients:
        ones, zeros = np.ones(inputs.hidden, np.float32), np.zeros(inputs.hidden, np.float32)
        gamma = widened(inputs.gamma) if inputs.gamma is not None and self.uses_gamma else ones
        beta = widened(inputs.beta) if inputs.beta is not None and self.uses_beta else zeros
        dy, x, w = widened(inputs.dy), widened(inputs.x), widened(inputs.w)
        mean, rstd = self.statistics(x, np.float32(inputs.eps))
        xhat = (x - mean) * rstd
        dn = self.product(dy, w)
        results: dict[str, Array32] = {}
        if "dx" in wants:
            g = dn * gamma
            row_mean = np.float32(self.mean_term) * g.mean(axis=1, keepdims=True)
            results["dx"] = rstd * (g - row_mean - xhat * (g * xhat).mean(axis=1, keepdims=True))
        if self.row_order is not None:
            order = self.row_order(inputs.rows)
            dy, dn, xhat = dy[order], dn[order], xhat[order]
        if "dgamma" in wants:
            results["dgamma"] = self.row_sum(dn * xhat)
        if "dbeta" in wants:
            results["dbeta"] = self.row_sum(dn)
        if "dw" in wants:
            n = xhat * gamma + beta
            results["dw"] = np.zeros(w.shape, np.float32)
            for i in range(0, len(dy), BLOCK):
                results["dw"] += self.product(dy[i:i + BLOCK].T, n[i:i + BLOCK])
        if "db" in wants:
            results["db"] = self.row_sum(dy)
        specs = output_specs(inputs, wants)
        return Gradients(**{name: array.astype(specs[name].dtype, copy=False) for name, array in results.items()})


def widened(array: AnyFloats) -> Array32:
    return array.astype(np.float32, copy=False)


PLAIN = Kernel()
"""Correct: a plain float32 two-pass kernel with the mean correction."""


def all_but(row: Callable[[int], int]) -> Kernel:
    """Faulty: the parameter gradients leave out one row, row(M)."""
    return replace(PLAIN, row_order=lambda rows: np.delete(np.arange(rows), row(rows)))


def twice(row: Callable[[int], int]) -> Kernel:
    """Faulty: the parameter gradients count one row twice, row(M)."""
    return replace(PLAIN, row_order=lambda rows: np.append(np.arange(rows), row(rows)))


ACCEPTED_KERNELS: Mapping[str, Kernel] = {
    "plain": PLAIN,
    "rows last to first": replace(PLAIN, row_order=lambda rows: np.arange(rows)[::-1]),
    "rows shuffled": replace(PLAIN, row_order=lambda rows: np.random.default_rng(rows).permutation(rows)),
}

FAULTY_KERNELS: Mapping[str, Kernel] = {
    "mean term doubled": replace(PLAIN, mean_term=2.0),
    "mean term left out": replace(PLAIN, mean_term=0.0),
    "gamma left out": replace(PLAIN, uses_gamma=False),
    "dw without beta": replace(PLAIN, uses_beta=False),
    "unbiased variance": replace(PLAIN, statistics=unbiased),
    "one-pass variance": replace(PLAIN, statistics=one_pass),
    "first row left out": all_but(lambda rows: 0),
    "middle row left out": all_but(lambda rows: rows // 2),
    "last row twice": twice(lambda rows: rows - 1),
    "tf32 products": replace(PLAIN, product=tf32_product),
    "bf16x3 products": replace(PLAIN, product=bf16x3_product),
}

Spoiler = Callable[[Gradients], Gradients]


def _changed(**changes: Callable[[AnyFloats], None]) -> Spoiler:
    """Changes copies of the named gradients in place."""
    def spoil(right: Gradients) -> Gradients:
        copies = {name: right.present()[name].copy() for name in changes}
        for name, change in changes.items():
            change(copies[name])
        return replace(right, **copies)
    return spoil


def _everywhere(value: float) -> Spoiler:
    return lambda right: Gradients(**{name: np.full_like(array, value) for name, array in right.present().items()})


def put(value: float, *place: int | slice) -> Callable[[AnyFloats], None]:
    """A change that sets one place of an array."""
    def change(array: AnyFloats) -> None:
        array[place] = value
    return change


def _transposed(array: AnyFloats) -> None:
    array[...] = array.T.copy().reshape(array.shape)


def _scaled(factor: float) -> Callable[[AnyFloats], None]:
    def change(array: AnyFloats) -> None:
        array[...] = (widened(array) * np.float32(factor)).astype(array.dtype)
    return change


ALL = slice(None)
STALE = 7.0

SPOILERS: Mapping[str, Spoiler] = {
    "all NaN": _everywhere(np.nan),
    "all zero": _everywhere(0.0),
    "one NaN in dx": _changed(dx=put(np.nan, 0, -1)),
    "one NaN in dgamma": _changed(dgamma=put(np.nan, -1)),
    "one NaN in dbeta": _changed(dbeta=put(np.nan, 0)),
    "one NaN in dw": _changed(dw=put(np.nan, -1, 0)),
    "one infinity in db": _changed(db=put(np.inf, -1)),
    "dw transposed": _changed(dw=_transposed),
    "last row of dx unwritten": _changed(dx=put(STALE, -1)),
    "last column of dx unwritten": _changed(dx=put(STALE, ALL, -1)),
    "last row of dw unwritten": _changed(dw=put(STALE, -1)),
    "last column of dw unwritten": _changed(dw=put(STALE, ALL, -1)),
    "last element of dgamma unwritten": _changed(dgamma=put(STALE, -1)),
    "last element of dbeta unwritten": _changed(dbeta=put(STALE, -1)),
    "last element of db unwritten": _changed(db=put(STALE, -1)),
    "dgamma * 1.001": _changed(dgamma=_scaled(1.001)),
    "dbeta * 1.001": _changed(dbeta=_scaled(1.001)),
    "dx missing": lambda right: replace(right, dx=None),
    "dw in float64": lambda right: replace(right, dw=right.present()["dw"].astype(np.float64)),
    "dw in its transpose's shape": lambda right: replace(right, dw=np.ascontiguousarray(right.present()["dw"].T)),
    "db as a column": lambda right: replace(right, db=right.present()["db"][:, None]),
    "dx in Fortran order": lambda right: replace(right, dx=np.asfortranarray(right.present()["dx"])),
}


def spoiled(spoiler: Spoiler) -> Callable[[Inputs, frozenset[str]], Gradients]:
    """The plain kernel with its results spoiled."""
    return lambda inputs, wants: spoiler(PLAIN(inputs, wants))
