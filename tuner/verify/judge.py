"""One quantity of a pass against what is right for it: its difference, its relative error, and whether they are allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from codegen.dtypes import CLASS_ERRORS, OWN_CLASS
from codegen.problem import ALL_GRADIENTS
from tuner.bounds import FORMATS, ROUNDINGS, C, U, rounded_bound
from tuner.compare import Target, build_case
from tuner.inputs import AnyFloats, Gradients, Inputs, Repeated
from tuner.reference import Array64, normalised, row_chunks, scale_and_shift

FORWARD = "forward"

NAMES: Mapping[str, str] = {
    "dx": "grad_input", "dgamma": "grad_ln_weight", "dbeta": "grad_ln_bias", "dw": "grad_linear_weight", "db": "grad_linear_bias"}
"""The gradients as users of PyTorch know them."""


@dataclass(frozen=True, slots=True)
class Figure:
    """How exact one quantity is.

    Attributes:
        name: FORWARD, or one of NAMES.
        difference: the largest difference of an element from the right value.
        error: the Frobenius norm of all differences relative to the norm of the quantity; NaN where there is no number.
        limit: the largest error allowed; None: only the bound of each element counts.
        ratio: the largest difference as a multiple of what that element is allowed.
        fault: why it is wrong, as a sentence; None where it is right.
    """

    name: str
    difference: float
    error: float
    limit: float | None
    ratio: float
    fault: str | None

    @property
    def ok(self) -> bool:
        """Whether it is right."""
        return self.fault is None


@dataclass(frozen=True, eq=False, slots=True)
class Expected:
    """What an independent computation in float64 found.

    Attributes:
        by: what computed it: "PyTorch 2.13.0 autograd, float64".
        y: [M, O].
        gradients: all five.
    """

    by: str
    y: Array64
    gradients: Gradients


def judge_forward(inputs: Inputs, bias: AnyFloats, y: AnyFloats, expected: Expected) -> Figure:
    """y [M, O] in the data type of x, or in float32, against the expected one."""
    value = expected.y
    bound = forward_bound(inputs, bias, value)
    norm = float(np.linalg.norm(value))
    dtype = "float32" if y.dtype == np.float32 else inputs.dtype
    limit = rounded_bound(bound, value, dtype)
    target = Target("y", value.shape, dtype, value, np.maximum(limit, U).astype(np.float32), None, norm)
    return _figure(FORWARD, target, y, None)


def judge_gradients(inputs: Inputs, got: Gradients, expected: Expected, accuracy: str = "") -> list[Figure]:
    """Every gradient against the expected one, by the accuracy class (empty: that of the data type) and the bound of each
    element, of tuner.bounds."""
    kind = accuracy or OWN_CLASS[inputs.dtype]
    case = build_case("random data", Repeated(inputs, np.ones(inputs.rows, np.int8)), ALL_GRADIENTS, kind, inputs=inputs,
                      normwise=True)
    right, found = expected.gradients.present(), got.present()
    figures = []
    for target in case.targets:
        value = right[target.name].reshape(target.value.shape)
        figures.append(_figure(NAMES[target.name], replace(target, value=value), found.get(target.name), CLASS_ERRORS[kind]))
    return figures


def _figure(name: str, target: Target, got: AnyFloats | None, limit: float | None) -> Figure:
    fault = target.form_fault(got)
    if got is None or fault is not None:
        return Figure(name, math.nan, math.nan, limit, math.nan, fault)
    fault = target.finiteness_fault(got)
    if fault is not None:
        return Figure(name, math.nan, math.nan, limit, math.nan, fault)
    error, worst = target.measure(got)
    fault = target.bound_fault(got, worst)
    if fault is None and limit is not None and error > limit:
        fault = f"{target.name}: relative Frobenius error {error:.3g}, where {limit:g} is allowed"
    difference = np.abs(got.reshape(target.value.shape).astype(np.float64) - target.value)
    return Figure(name, float(difference.max(initial=0.0)), error, limit, worst.ratio, fault)


def forward(inputs: Inputs, bias: AnyFloats) -> Array64:
    """y = Linear(LayerNorm(x)) + bias [M, O] in float64."""
    gamma, beta = scale_and_shift(inputs)
    w, y = inputs.w.astype(np.float64), np.empty((inputs.rows, inputs.out))
    for rows in row_chunks(inputs):
        xhat, _ = normalised(inputs, rows)
        y[rows] = (xhat * gamma + beta) @ w.T + bias.astype(np.float64)
    return y


def forward_bound(inputs: Inputs, bias: AnyFloats, y: Array64) -> Array64:
    """How far each element of y [M, O], whose exact value is given, may lie from it before it is rounded to its data type.

    Sums and statistics in float32, as in tuner.bounds: with n = xhat*gamma + beta, ex and e(H) from there, the bias added last,

        y: e(H) * |n| @ |w|^T + (ex*|gamma|) @ |w|^T + U*|y|

    and where the data has 16 bits, n and w rounded to it: 2v * |n| @ |w|^T more, v its unit roundoff. A bias of a wider type is
    rounded to it too: v*|bias| more.
    """
    gamma, beta = (np.abs(vector) for vector in scale_and_shift(inputs))
    w, bound = np.abs(inputs.w.astype(np.float64)), np.empty((inputs.rows, inputs.out))
    rounding = 0.0 if inputs.dtype == "float32" else 2.0 * FORMATS[inputs.dtype].roundoff
    e = C * U * math.sqrt(inputs.hidden + ROUNDINGS)
    for rows in row_chunks(inputs):
        xhat, rstd = normalised(inputs, rows)
        size = np.abs(xhat)
        k = C * U * np.abs(inputs.x[rows].astype(np.float64)).max(axis=1, keepdims=True) * rstd
        ex = C * U * (size + 1.0) + k
        bound[rows] = ((e + rounding) * (size * gamma + beta) + ex * gamma) @ w.T
    if inputs.param_dtype != inputs.dtype:
        bound += FORMATS[inputs.dtype].roundoff * np.abs(bias.astype(np.float64))
    return bound + U * np.abs(y)
