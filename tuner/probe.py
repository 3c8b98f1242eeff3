"""The exact probe: data on which float32 arithmetic makes no error at all, so that results are compared for equality.

Every row of x has the mean 0, and its variance and eps add up to 4, so rstd = 1/2, all exact:

    H even            x = +-1 in equal numbers               variance 1, eps 3, xhat = +-1/2
    H odd, from 3 on  x in triples +-(1, 1, -2), the rest     variance 2, eps 2, xhat = +-1/2, +-1
                      (2, -2, 0, 0) or (2, -2, 1, -1, 0)
    H = 1             x = 0                                   variance 0, eps 4, xhat = 0

(A variance computed as sum * (1/H) is off by 2^-24 of it at most, and adding eps rounds that away.) dy is +-1 or +-2, w is -1, 1
or 2, beta is +-2 or +-3, gamma +-1/2, +-1 or +-2. Each row, each column and each product counts: one row skipped or taken twice
changes the parameter gradients. Each value needs at most five bits, and so do xhat and xhat*gamma + beta: operands rounded to
tf32, bf16 or fp16 are exact, the low parts of split ones are zero, and scaling by powers of two changes nothing (scaled to what
float16 holds, products are below 2^32, and sums of 2^90 of them still within float32).

Why the sums are exact: their terms are whole numbers of units (1/4 in dw, 1/2 in dgamma, 1 in dbeta and db), and a float32 holds
whole numbers up to 2^24. Accumulators that truncate lose nothing either. The signs of rows that repeat are balanced and in random
order, so any part of a sum over M rows, chosen in whatever order a kernel works, is a random sum whose standard deviation is
that of M/4 rows at most. dgamma's M*O terms have a mean square of 10 units, dw's M terms one of 300 units (half and nearly that
for even H). For M*O = 4e10, dy of 160 GB, that is 3.2e5 units, a fiftieth of 2^24, and with O = 1 it is 1.7e6, a tenth. Hence the
claim holds for every size that fits a device, and for every order of summation that does not look at the signs first.

Results of 16 bits are the exact ones rounded once, to the nearest, at the end. Because the signs are balanced, whole sums are no
larger than those over the distinct rows, however often these repeat, so one row still shows after that rounding.

dx is exact as well where H is a power of two, as long as its terms, in units of 1/(8H), stay below 2^24; where they do not
(H = 4096 with O = 4096), dx is judged by its bound. A kernel may keep dn in the data type of dx until its row is complete, so for
16-bit data dn has to be exact in that, too.
"""

from __future__ import annotations

import numpy as np

from tuner.bounds import FORMATS, U
from tuner.inputs import Array32, Inputs, Repeated
from tuner.reference import normalised, row_chunks, scale_and_shift

MANTISSA = 1.0 / U
"""Whole numbers up to here are exact in float32."""


def probe_inputs(rows: int, hidden: int, out: int, seed: int = 0, *, dtype: str = "float32", param_dtype: str = "") -> Inputs:
    """Rows of the exact probe's data, all different; exact in every data type (Inputs.rounded_to)."""
    rng = np.random.default_rng([seed, 3])

    def one_of(values: tuple[float, ...], *shape: int) -> Array32:
        return rng.choice(np.asarray(values, np.float32), shape)

    x, eps = _balanced_rows(rng, rows, hidden)
    return Inputs(
        dy=one_of((-2, -1, 1, 2), rows, out), x=rng.permuted(x, axis=1), gamma=one_of((-2, -1, -0.5, 0.5, 1, 2), hidden),
        beta=one_of((-3, -2, 2, 3), hidden), w=one_of((-1, 1, 2), out, hidden), eps=eps).rounded_to(dtype, param_dtype)


def _balanced_rows(rng: np.random.Generator, rows: int, hidden: int) -> tuple[Array32, float]:
    """x with its values in order, and the eps that goes with it."""
    if hidden == 1:
        return np.zeros((rows, 1), np.float32), 4.0
    if hidden % 2 == 0:
        return np.tile(np.repeat(np.array([1, -1], np.float32), hidden // 2), (rows, 1)), 3.0
    rest = ((), (2, -2, 0, 0), (2, -2, 1, -1, 0))[hidden % 3]
    triples = (hidden - len(rest)) // 3
    signs = rng.choice(np.array([-1, 1], np.float32), (rows, triples))
    head = (signs[:, :, None] * np.array([1, 1, -2], np.float32)).reshape(rows, 3 * triples)
    return np.concatenate([head, np.tile(np.array(rest, np.float32), (rows, 1))], axis=1), 2.0


def balanced(base: Inputs, rows: int, seed: int = 0) -> Repeated:
    """`rows` rows out of the base's; in full repetitions, each has as many signs + as -, or one or two more, in random order."""
    period = min(base.rows, rows)
    full, rest = divmod(rows, max(period, 1))
    rng = np.random.default_rng([seed, 5])
    positive = full // 2 + rng.integers(0, 2, period)
    signs = np.where(np.arange(full)[:, None] < positive, np.int8(1), np.int8(-1))
    last = rng.integers(0, 2, rest, np.int8) * np.int8(2) - np.int8(1)
    return Repeated(base.first(period), np.concatenate([rng.permuted(signs, axis=0).ravel(), last]))


def exact_gradients(inputs: Inputs) -> frozenset[str]:
    """The gradients that every correct kernel computes without error on this probe, but for rounding the result."""
    exact = {"dgamma", "dbeta", "dw", "db"}
    if inputs.hidden & (inputs.hidden - 1) == 0 and _dx_is_exact(inputs):
        exact.add("dx")
    return frozenset(exact)


def _dx_is_exact(inputs: Inputs) -> bool:
    """Whether |dn*gamma| + |mean_h(dn*gamma)| + |xhat * mean_h(dn*gamma*xhat)| of each row is exact in float32, and dn in dx."""
    gamma, _ = scale_and_shift(inputs)
    w = inputs.w.astype(np.float64)
    largest_dn = 1.0 / FORMATS[inputs.dtype].roundoff
    for rows in row_chunks(inputs):
        dn = inputs.dy[rows].astype(np.float64) @ w
        g = dn * gamma
        xhat, _ = normalised(inputs, rows)
        terms = np.abs(g).max(axis=1) + np.abs(g.mean(axis=1)) + 0.5 * np.abs(np.mean(g * xhat, axis=1))
        if 8 * inputs.hidden * terms.max(initial=0.0) > MANTISSA or np.abs(dn).max(initial=0.0) > largest_dn:
            return False
    return True
