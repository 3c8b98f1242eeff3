"""The exact probe: data on which float32 arithmetic makes no error at all, so that results are compared for equality.

Every row of x is +-1 in equal numbers and eps is 3: the mean is 0, the variance 1, rstd = 1/2 and xhat = +-1/2, all exact
(a variance computed as sum * (1/H) is off by 2^-24 at most, and adding 3 rounds that away). dy is +-1 or +-2, w is
-1, 1 or 2, beta is +-2 or +-3, gamma +-1/2, +-1 or +-2. No value is zero, so each row, each column and each product
counts: one row skipped or taken twice changes the parameter gradients. Each value needs at most five
bits, so operands rounded to tf32, bf16 or fp16 are exact as well.

Why the sums are exact: their terms are whole numbers of units (1/4 in dw, 1/2 in dgamma, 1 in dbeta and db), and a float32 holds
whole numbers up to 2^24. The signs of dy are random, so any part of a sum, chosen in whatever order a kernel works, is a
random sum. The largest are dgamma's, whose M*O terms have a mean square of 5 units: its standard deviation is sqrt(5*M*O)
units. For M*O = 4e10, dy of 160 GB, that is 4.5e5, a 37th of 2^24. Hence the claim holds for every size that
fits a device, and for every order of summation that does not look at the signs first.

dx is exact as well where H is a power of two, as long as its terms, in units of 1/(8H), stay below 2^24; where they do not
(H = 4096 with O = 4096), dx is judged by its bound. For odd H one element of each row of x is 0 and rstd is not 1/2:
dbeta and db, which do not depend on x, are still exact, and the others are judged by their bound.
"""

from __future__ import annotations

import numpy as np

from tuner.inputs import Array32, Inputs
from tuner.reference import normalised, row_chunks, scale_and_shift

MANTISSA = 2.0**24
"""Whole numbers up to here are exact in float32."""


def probe_inputs(rows: int, hidden: int, out: int, seed: int = 0) -> Inputs:
    """The exact probe's data."""
    rng = np.random.default_rng([seed, 3])

    def one_of(values: tuple[float, ...], *shape: int) -> Array32:
        return rng.choice(np.asarray(values, np.float32), shape)

    x = np.zeros((rows, hidden), np.float32)
    x[:, :hidden // 2] = 1.0
    x[:, (hidden + 1) // 2:] = -1.0
    return Inputs(
        dy=one_of((-2, -1, 1, 2), rows, out), x=rng.permuted(x, axis=1), gamma=one_of((-2, -1, -0.5, 0.5, 1, 2), hidden),
        beta=one_of((-3, -2, 2, 3), hidden), w=one_of((-1, 1, 2), out, hidden), eps=3.0)


def exact_gradients(inputs: Inputs) -> frozenset[str]:
    """The gradients that every correct kernel computes without error on this probe."""
    hidden = inputs.hidden
    if hidden % 2:
        return frozenset(("dbeta", "db"))
    exact = {"dgamma", "dbeta", "dw", "db"}
    if hidden & (hidden - 1) == 0 and 8 * hidden * _largest_dx_terms(inputs) <= MANTISSA:
        exact.add("dx")
    return frozenset(exact)


def _largest_dx_terms(inputs: Inputs) -> float:
    """The largest |dn*gamma| + |mean_h(dn*gamma)| + |xhat * mean_h(dn*gamma*xhat)| of any row."""
    gamma, _ = scale_and_shift(inputs)
    w = inputs.w.astype(np.float64)
    largest = 0.0
    for rows in row_chunks(inputs):
        g = inputs.dy[rows] @ w * gamma
        xhat, _ = normalised(inputs, rows)
        terms = np.abs(g).max(axis=1) + np.abs(g.mean(axis=1)) + 0.5 * np.abs(np.mean(g * xhat, axis=1))
        largest = max(largest, float(terms.max()))
    return largest
