"""What a result may be wrong by: formats, classes, the per-element bound and the norms errors are relative to."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from codegen.dtypes import CLASS_ERRORS, DTYPES, OWN_CLASS
from codegen.problem import GRADIENTS
from tuner.bounds import ACCURACY, FORMATS, accuracy_class, bounds, normwise_scales, rounded_bound
from tuner.dtypes import NUMPY
from tuner.errors import InputError
from tuner.inputs import hard_inputs, random_inputs
from tuner.reference import Array64, reference

TYPES = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"),
         ("float16", "float32"))
"""Data types with those of their parameters."""

CLASSES = tuple((dtype, param, accuracy) for dtype, param in TYPES for accuracy, limit in CLASS_ERRORS.items()
                if limit >= CLASS_ERRORS[OWN_CLASS[dtype]])
"""Each with every class its results can meet."""


@pytest.mark.parametrize("name", DTYPES)
def test_formats_are_what_numpy_makes_of_them(name: str) -> None:
    kind, dtype = FORMATS[name], NUMPY[name]

    def rounded(value: float) -> float:
        with np.errstate(over="ignore"):
            return float(np.float64(value).astype(np.float32).astype(dtype))

    assert rounded(1 + 2 * kind.roundoff) == 1 + 2 * kind.roundoff
    assert rounded(1 + kind.roundoff) == 1
    assert rounded(kind.largest) == kind.largest
    assert math.isinf(rounded(kind.overflow))
    assert rounded(kind.largest + 0.49 * (kind.overflow - kind.largest)) == kind.largest
    if kind.underflow:
        assert rounded(2 * kind.underflow) == 2 * kind.underflow
        assert rounded(kind.underflow) == 0


def test_classes_are_those_of_codegen() -> None:
    assert {name: kind.limit for name, kind in ACCURACY.items()} == CLASS_ERRORS
    with pytest.raises(InputError, match="'fp64' is no accuracy class; choose from fp32, tf32, fp16, bf16"):
        accuracy_class("fp64")


def roundings(dtype: str, accuracy: str) -> tuple[float, float]:
    """Relative and absolute error of an operand of that data type in a product of that class."""
    bits = {"float32": 24, "bfloat16": 8, "float16": 11}[dtype]
    class_bits = {"fp32": 24, "tf32": 11, "fp16": 11, "bf16": 8}[accuracy]
    if bits <= class_bits:
        return 0.0, 0.0
    v = 2.0**-class_bits
    return v / (1 - 5 * v), 2.0**-25 if accuracy == "fp16" else 0.0


@pytest.mark.parametrize(("dtype", "param_dtype", "accuracy"), CLASSES)
def test_the_bound_is_its_formula(dtype: str, param_dtype: str, accuracy: str) -> None:
    """Element by element, as the docstring of `bounds` has it."""
    inputs = hard_inputs(9, 6, 4, dtype=dtype, param_dtype=param_dtype)
    m_count, h_count, o_count = 9, 6, 4
    assert inputs.gamma is not None and inputs.beta is not None
    dy, x, w, gamma, beta = (np.abs(array.astype(np.float64)) for array in (
        inputs.dy, inputs.x, inputs.w, inputs.gamma, inputs.beta))
    u, c = 2.0**-24, 3.0
    v = roundings("float32", accuracy)[0]
    (v_dy, f_dy), (v_w, f_w) = roundings(dtype, accuracy), roundings(param_dtype, accuracy)
    v_dn, f_dn = roundings("float32", OWN_CLASS[dtype])
    right = {name: np.full(array.shape, 2.0**-126) for name, array in reference(inputs).present().items()}

    def e(n: int) -> float:
        return c * u * math.sqrt(n + 8)

    for m in range(m_count):
        signed = inputs.x[m].astype(np.float64)
        rstd = 1 / np.sqrt(signed.var() + inputs.eps)
        xhat = np.abs(signed - signed.mean()) * rstd
        k = c * u * x[m].max() * rstd
        ex = [c * u * (t + 1) + k + v * t for t in xhat]
        a = [sum(dy[m, o] * w[o, h] for o in range(o_count)) for h in range(h_count)]
        lost = [sum((v_dy * dy[m, o] + f_dy) * w[o, h] + dy[m, o] * (v_w * w[o, h] + f_w) for o in range(o_count))
                + v_dn * a[h] + f_dn for h in range(h_count)]
        d = [a[h] * gamma[h] for h in range(h_count)]
        g = [(e(6) * a[h] + lost[h]) * gamma[h] for h in range(h_count)]
        mean_g, mean_d = np.mean(g), np.mean(d)
        dot_g, dot_d = (np.mean([values[h] * xhat[h] for h in range(h_count)]) for values in (g, d))
        dot_error = np.mean([d[h] * ex[h] for h in range(h_count)])
        for h in range(h_count):
            right["dx"][m, h] += rstd * (
                g[h] + mean_g + xhat[h] * dot_g + ex[h] * dot_d + xhat[h] * dot_error + (d[h] + mean_d) * k)
            error = e(9 + 4) * a[h] + lost[h]
            right["dgamma"][h] += error * xhat[h] + a[h] * ex[h]
            right["dbeta"][h] += error
            normed = xhat[h] * gamma[h] + beta[h]
            for o in range(o_count):
                right["dw"][o, h] += (dy[m, o] * (e(9) * normed + ex[h] * gamma[h] + v * beta[h])
                                      + (v_dy * dy[m, o] + f_dy) * normed)
        for o in range(o_count):
            right["db"][o] += e(9) * dy[m, o] + v_dy * dy[m, o] + f_dy
    for name, array in bounds(inputs, accuracy=accuracy).present().items():
        np.testing.assert_allclose(array, right[name], rtol=1e-9, err_msg=name)


@pytest.mark.parametrize(("dtype", "param_dtype"), TYPES)
def test_the_class_of_the_data_type_is_meant_where_none_is_named(dtype: str, param_dtype: str) -> None:
    inputs = random_inputs(9, 6, 4, dtype=dtype, param_dtype=param_dtype)
    named = bounds(inputs, accuracy=OWN_CLASS[dtype]).present()
    for name, array in bounds(inputs).present().items():
        np.testing.assert_array_equal(array, named[name])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_a_result_that_keeps_its_bound_keeps_the_widened_one(dtype: str) -> None:
    """Over all magnitudes of the type, its smallest ones among them, with errors that use up the bound."""
    rng = np.random.default_rng(0)
    value: Array64 = rng.standard_normal(100_000) * 2.0 ** rng.uniform(-30, 10, 100_000)
    bound: Array64 = np.abs(value) * 2.0 ** rng.uniform(-20, 0, len(value))
    widened = rounded_bound(bound, value, dtype)
    got = (value + bound * rng.choice([-1, 1], len(value))).astype(np.float32).astype(NUMPY[dtype]).astype(np.float64)
    slack = 2.0**-24 * (np.abs(value) + bound)  # of the float32 in between
    assert np.all(np.abs(got - value) <= widened + slack)
    assert np.all(widened <= bound + FORMATS[dtype].roundoff * 1.01 * (np.abs(value) + bound) + 2.0**-25)


def test_the_scales_are_the_mean_norms_over_the_signs_of_dy() -> None:
    inputs = random_inputs(2, 5, 3)
    assert inputs.gamma is not None
    rstd = 1 / np.sqrt(inputs.x.astype(np.float64).var(axis=1, keepdims=True) + inputs.eps)
    squares = dict.fromkeys(GRADIENTS, 0.0)
    for signs in product((-1, 1), repeat=6):
        flipped = replace(inputs, dy=inputs.dy * np.reshape(signs, (2, 3)).astype(np.float32))
        results = reference(flipped).present()
        results["dx"] = rstd * (flipped.dy.astype(np.float64) @ inputs.w * inputs.gamma)  # of dx, its first term
        for name, array in results.items():
            squares[name] += float(np.sum(array**2)) / 64
    assert normwise_scales(inputs) == pytest.approx({name: np.sqrt(square) for name, square in squares.items()}, rel=1e-6)
