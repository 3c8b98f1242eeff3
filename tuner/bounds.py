"""How wrong a result may be: a normwise limit per accuracy class, and a bound for every single element."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from codegen.dtypes import ACCURACIES, CLASS_ERRORS, OWN_CLASS
from codegen.problem import ALL_GRADIENTS, GRADIENTS, check_wants
from tuner.errors import InputError
from tuner.inputs import AnyFloats, Gradients, Inputs
from tuner.reference import Array64, normalised, row_chunks, scale_and_shift, zeros

U = 2.0**-24
"""Unit roundoff of float32: what sums and statistics are kept in, whatever the accuracy class."""

C = 3.0
"""Safety factor of the per-element bound. Correct float32 kernels stay below it with 1."""

ROUNDINGS = 8
"""Roundings an element meets outside its sums: dn, gamma, both means, two differences, rstd (2 ulp), the last product."""

UNDERFLOW = 2.0**-126
"""The smallest normal float32; hardware may flush anything smaller to zero."""

OPERAND_ROUNDINGS = 5
"""Most roundings of operands that meet in one product: of dy, w, dn, and of xhat twice, in the last term of dx."""


@dataclass(frozen=True, slots=True)
class Format:
    """What rounding to a data type does.

    Attributes:
        roundoff: the largest relative error, half the distance of neighbours just above 1.
        underflow: the largest absolute error where numbers grow so small that the relative one no longer holds; 0 where sums in
            float32 have that limit too.
        largest: the largest finite value.
    """

    roundoff: float
    underflow: float
    largest: float

    @property
    def overflow(self) -> float:
        """The smallest magnitude that rounds to infinity: half a step beyond the largest value."""
        return self.largest * (1.0 + self.roundoff / (2.0 - 2.0 * self.roundoff))


FORMATS = {
    "float32": Format(U, 0.0, (2.0 - 2.0**-23) * 2.0**127),
    "bfloat16": Format(2.0**-8, 0.0, (2.0 - 2.0**-7) * 2.0**127),
    "float16": Format(2.0**-11, 2.0**-25, (2.0 - 2.0**-10) * 2.0**15),
}
"""The data types of results, by name (codegen.dtypes)."""


def _higher_orders(roundoff: float) -> float:
    """A roundoff r whose multiples bound products of roundings: (1 + roundoff)^n - 1 <= n*r for n <= OPERAND_ROUNDINGS."""
    return roundoff / (1.0 - OPERAND_ROUNDINGS * roundoff)


@dataclass(frozen=True, slots=True)
class AccuracyClass:
    """What a kernel may lose.

    Attributes:
        limit: largest relative Frobenius error of a gradient (see normwise_scales). Measured, nearly independent of depth:
            float32 and its emulations by three or six 16-bit products 2e-7 to 1e-6, by three bf16 products 4.4e-6;
            single tf32 products 2.9e-4; single bf16 products 2e-3.
        operand_roundoff: unit roundoff of the operands of its products, 0 where they are float32.
        operand_underflow: their largest absolute error (see Format).
    """

    limit: float
    operand_roundoff: float
    operand_underflow: float = 0.0

    def operand_errors(self, dtype: str) -> tuple[float, float]:
        """Relative and absolute error of an operand that had this data type before: none where that is no finer."""
        exact = FORMATS[dtype].roundoff >= self.operand_roundoff
        return (0.0, 0.0) if exact else (_higher_orders(self.operand_roundoff), self.operand_underflow)


ACCURACY = {
    "fp32": AccuracyClass(CLASS_ERRORS["fp32"], 0.0),
    "tf32": AccuracyClass(CLASS_ERRORS["tf32"], 2.0**-11),
    "fp16": AccuracyClass(CLASS_ERRORS["fp16"], FORMATS["float16"].roundoff, FORMATS["float16"].underflow),
    "bf16": AccuracyClass(CLASS_ERRORS["bf16"], FORMATS["bfloat16"].roundoff),
}
"""The accuracy classes, by the name `--accuracy` takes."""


def accuracy_class(name: str) -> AccuracyClass:
    """The class of that name.

    Raises:
        InputError: there is none.
    """
    if name not in ACCURACY:
        raise InputError(f"{name!r} is no accuracy class; choose from {', '.join(ACCURACIES)}")
    return ACCURACY[name]


@np.errstate(invalid="ignore")
def bounds(inputs: Inputs, wants: frozenset[str] = ALL_GRADIENTS, accuracy: str = "",
           counts: Array64 | None = None) -> Gradients:
    """How far each element of each wanted gradient may lie from the exact one, float64, of the gradients' shapes.

    Sums and statistics are kept in float32. A first-order analysis of their rounding with random signs: with u = 2^-24 and, per
    row, k = C*u*max|x|*rstd (what rounding the mean costs xhat), A = |dy| @ |w|, D = A*|gamma|, e(n) = C*u*sqrt(n + 8) (the error
    of a sum of n terms and of the roundings around it), dn has the error E(n) = e(n)*A, xhat has ex = C*u*(|xhat| + 1) + k, and

        dx:     rstd*(g + mean g + |xhat|*mean(g*|xhat|) + ex*mean(D*|xhat|) + |xhat|*mean(D*ex) + (D + mean D)*k)
                with g = E(max(O,H))*|gamma|
        dgamma: sum_m(E(M+O)*|xhat| + A*ex)                   dbeta: sum_m E(M+O)
        dw:     |dy|^T @ (e(M)*(|xhat||gamma| + |beta|) + ex*|gamma|)      db: e(M)*sum_m |dy|

    Classes whose products round their operands add to that the worst case, without a factor. Rounding t to a format of roundoff
    v and underflow f loses at most r(t) = v*|t| + f; v and f are 0 for what has that format, or a coarser one, already.
    Of the two forms of each gradient (by dn, or by G = dy^T @ xhat), whichever loses more counts:

        E grows by r(dy) @ |w| + |dy| @ r(w)      the operands of dn = dy @ w; of w in dgamma = sum_o w*G and dbeta = db @ w;
               and r(dn) in the type of dx        where that has 16 bits, dn may be kept in it until its row is complete
        ex grows by v*|xhat|                      xhat as an operand, of G and of the dot products over a row
        dw grows by r(dy)^T @ (|xhat||gamma| + |beta|) + v*|dy|^T @ |beta|      dy beside xhat, or xhat*gamma + beta as an operand
        db grows by sum_m r(dy)                   db as the product of dy and ones

    v/(1 - 5v) in place of v covers the products of roundings (Higham, Accuracy and Stability of Numerical Algorithms, lemma
    3.1). Rounding the result itself is for rounded_bound. The bound follows the conditioning of each element but grows loose with
    depth: it finds local faults, and never judges alone.

    `accuracy` empty stands for the class of the data type. `counts` [M]: how often each row occurs (see Repeated); None: once.

    Raises:
        InvalidProblem: `wants` is empty or names something else.
        InputError: there is no such accuracy class.
    """
    check_wants(wants)
    kind = accuracy_class(accuracy or OWN_CLASS[inputs.dtype])
    v = _higher_orders(kind.operand_roundoff)
    (v_dy, f_dy), (v_w, f_w) = kind.operand_errors(inputs.dtype), kind.operand_errors(inputs.param_dtype)
    kept = FORMATS[inputs.dtype]
    v_dn = 0.0 if inputs.dtype == "float32" else _higher_orders(kept.roundoff)
    depth = float(inputs.rows if counts is None else counts.sum())

    def e(terms: float) -> float:
        return C * U * math.sqrt(terms + ROUNDINGS)

    results = zeros(inputs, wants)
    gamma, beta = (np.abs(vector) for vector in scale_and_shift(inputs))
    w = np.abs(inputs.w.astype(np.float64))
    w_sum = w.sum(axis=0)
    for rows in row_chunks(inputs):
        dy = np.abs(inputs.dy[rows].astype(np.float64))
        counted = dy if counts is None else dy * counts[rows, None]
        times = np.ones(len(dy)) if counts is None else counts[rows]
        xhat, rstd = normalised(inputs, rows)
        xhat = np.abs(xhat)
        k = C * U * np.abs(inputs.x[rows].astype(np.float64)).max(axis=1, keepdims=True) * rstd
        ex = C * U * (xhat + 1.0) + k + v * xhat
        if "db" in wants:
            results["db"] += (e(depth) + v_dy) * counted.sum(axis=0) + f_dy * times.sum()
        if "dw" in wants:
            normed = xhat * gamma + beta
            results["dw"] += counted.T @ ((e(depth) + v_dy) * normed + ex * gamma + v * beta)
            if f_dy:
                results["dw"] += f_dy * (times @ normed)
        if wants.isdisjoint(("dx", "dgamma", "dbeta")):
            continue
        a = dy @ w
        rounding = (v_dy + v_w + v_dn) * a
        rounding += f_dy * w_sum + f_w * dy.sum(axis=1, keepdims=True) + kept.underflow
        if "dx" in wants:
            d = a * gamma
            g = (e(max(inputs.out, inputs.hidden)) * a + rounding) * gamma
            results["dx"][rows] = rstd * (
                g + _mean(g) + xhat * _mean(g * xhat) + ex * _mean(d * xhat) + xhat * _mean(d * ex) + (d + _mean(d)) * k)
        if "dgamma" in wants:
            results["dgamma"] += times @ ((e(depth + inputs.out) * a + rounding) * xhat + a * ex)
        if "dbeta" in wants:
            results["dbeta"] += times @ (e(depth + inputs.out) * a + rounding)
    for array in results.values():
        array += UNDERFLOW
    return Gradients(**results)


def _mean(values: Array64) -> Array64:
    """Of each row [rows, 1]."""
    mean: Array64 = values.mean(axis=1, keepdims=True)
    return mean


def rounded_bound(bound: AnyFloats, value: AnyFloats, dtype: str) -> AnyFloats:
    """The bound of a result that is rounded to its data type at the end. For float32 `bound` counts that already."""
    if dtype == "float32":
        return bound
    kind = FORMATS[dtype]
    widened: AnyFloats = bound + kind.roundoff * (np.abs(value) + bound) + kind.underflow
    return widened


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
