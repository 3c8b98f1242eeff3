"""How wrong a float32 result may be: a normwise limit per accuracy class, and a bound for every single element."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from codegen.problem import ALL_GRADIENTS, GRADIENTS, check_wants
from tuner.errors import InputError
from tuner.inputs import Gradients, Inputs
from tuner.reference import Array64, normalised, row_chunks, scale_and_shift, zeros

U = 2.0**-24
"""Unit roundoff of float32: what sums and statistics are kept in, whatever the accuracy class."""

C = 3.0
"""Safety factor of the per-element bound. Correct float32 kernels stay below it with 1."""

ROUNDINGS = 8
"""Roundings an element meets outside its sums: dn, gamma, both means, two differences, rstd (2 ulp), the last product."""

UNDERFLOW = 2.0**-126
"""The smallest normal float32; hardware may flush anything smaller to zero."""


@dataclass(frozen=True, slots=True)
class AccuracyClass:
    """What a kernel may lose.

    Attributes:
        limit: largest relative Frobenius error of a gradient (see normwise_scales). Measured, nearly independent of depth:
            float32 and its emulations by three or six 16-bit products 2e-7 to 1e-6, by three bf16 products 4.4e-6;
            single tf32 products 2.9e-4; single bf16 products 2e-3.
        operand_roundoff: unit roundoff of the operands of its products, 0 where they are float32.
    """

    limit: float
    operand_roundoff: float


ACCURACY = {
    "fp32": AccuracyClass(2e-6, 0.0),
    "tf32": AccuracyClass(1e-3, 2.0**-11),
    "fp16": AccuracyClass(1.5e-3, 2.0**-11),
    "bf16": AccuracyClass(8e-3, 2.0**-8),
}
"""The accuracy classes, by the name `--accuracy` takes."""


def accuracy_class(name: str) -> AccuracyClass:
    """The class of that name.

    Raises:
        InputError: there is none.
    """
    if name not in ACCURACY:
        raise InputError(f"{name!r} is no accuracy class; choose from {', '.join(ACCURACY)}")
    return ACCURACY[name]


@np.errstate(invalid="ignore")
def bounds(inputs: Inputs, wants: frozenset[str] = ALL_GRADIENTS, accuracy: str = "fp32",
           counts: Array64 | None = None) -> Gradients:
    """How far each element of each wanted gradient may lie from the exact one, float64, of the gradients' shapes.

    A first-order analysis of rounding with random signs. With u = 2^-24 and, per row,
    k = u*max|x|*rstd (what rounding the mean costs xhat), ex = u*(|xhat| + 1) + k, A = |dy| @ |w|, D = A*|gamma|:

        dx:     C*rstd*(e(max(O,H))*(D + mean D + |xhat|*mean(D|xhat|))
                        + ex*mean(D|xhat|) + |xhat|*mean(D*ex) + (D + mean D)*k)
        dgamma: C*sum_m(e(M+O)*A*|xhat| + A*ex)                   dbeta: C*e(M+O)*sum_m A
        dw:     C*|dy|^T @ (e(M)*(|xhat||gamma| + |beta|) + ex*|gamma|)      db: C*e(M)*sum_m |dy|

    e(n) = u*sqrt(n + 8) is the error of a sum of n terms and of the roundings around it. Classes whose products round their
    operands to roundoff v add 2v to it, and v*|xhat| to ex. The bound follows the conditioning of each element but grows
    loose with depth: it finds local faults, and never judges alone.

    `counts` [M] says how often each row occurs (see Repeated); None: once.

    Raises:
        InvalidProblem: `wants` is empty or names something else.
        InputError: there is no such accuracy class.
    """
    check_wants(wants)
    v = accuracy_class(accuracy).operand_roundoff
    depth = float(inputs.rows if counts is None else counts.sum())

    def e(terms: float) -> float:
        return U * math.sqrt(terms + ROUNDINGS) + 2.0 * v

    results = zeros(inputs, wants)
    gamma, beta = (np.abs(vector) for vector in scale_and_shift(inputs))
    w = np.abs(inputs.w.astype(np.float64))
    for rows in row_chunks(inputs):
        dy = np.abs(inputs.dy[rows].astype(np.float64))
        counted = dy if counts is None else dy * counts[rows, None]
        xhat, rstd = normalised(inputs, rows)
        xhat = np.abs(xhat)
        k = U * np.abs(inputs.x[rows]).max(axis=1, keepdims=True) * rstd
        ex = U * (xhat + 1.0) + k + v * xhat
        if "db" in wants:
            results["db"] += C * e(depth) * counted.sum(axis=0)
        if "dw" in wants:
            results["dw"] += C * counted.T @ (e(depth) * (xhat * gamma + beta) + ex * gamma)
        if wants.isdisjoint(("dx", "dgamma", "dbeta")):
            continue
        a = dy @ w
        if "dx" in wants:
            d = a * gamma
            spread = d + d.mean(axis=1, keepdims=True)
            dot = np.mean(d * xhat, axis=1, keepdims=True)
            dot_error = np.mean(d * ex, axis=1, keepdims=True)
            results["dx"][rows] = C * rstd * (
                e(max(inputs.out, inputs.hidden)) * (spread + xhat * dot) + ex * dot + xhat * dot_error + spread * k)
        if counts is not None:
            a *= counts[rows, None]
        if "dgamma" in wants:
            results["dgamma"] += C * np.sum(a * (e(depth + inputs.out) * xhat + ex), axis=0)
        if "dbeta" in wants:
            results["dbeta"] += C * e(depth + inputs.out) * a.sum(axis=0)
    for array in results.values():
        array += UNDERFLOW
    return Gradients(**results)


def normwise_scales(inputs: Inputs, counts: Array64 | None = None) -> dict[str, float]:
    """The Frobenius norm each gradient has on average over the signs of dy, by name; of dx, that of its first term.

    The error of a gradient is put in relation to this or to the gradient's own norm, whichever is larger. The two
    agree unless the result cancels: a sum over few elements that comes out near zero by chance, or dx where its three
    terms cancel by necessity (H = 2). There no float32 kernel can keep digits relative to the result.
    """
    gamma, beta = scale_and_shift(inputs)
    w = inputs.w.astype(np.float64) ** 2
    w_sum, w_scaled = w.sum(axis=1), w @ gamma**2
    squares = dict.fromkeys(GRADIENTS, 0.0)
    for rows in row_chunks(inputs):
        dy = inputs.dy[rows].astype(np.float64) ** 2
        counted = dy if counts is None else dy * counts[rows, None]
        xhat, rstd = normalised(inputs, rows)
        normed = xhat * gamma + beta
        squares["dx"] += float(np.sum(rstd[:, 0] ** 2 * (counted @ w_scaled)))
        squares["dgamma"] += float(np.sum((counted @ w) * xhat * xhat))
        squares["dbeta"] += float(np.sum(counted @ w_sum))
        squares["dw"] += float(np.sum(counted.sum(axis=1) * np.sum(normed * normed, axis=1)))
        squares["db"] += float(counted.sum())
    return {name: math.sqrt(square) for name, square in squares.items()}
