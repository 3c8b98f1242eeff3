"""The exact probe: what it claims to be exact is, in every order, arithmetic and data type, and a single row shows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from codegen.dtypes import DTYPES
from codegen.problem import GRADIENTS, Problem
from tests.numpy_kernels import PLAIN, all_but, twice
from tests.numpy_matrix import ARITHMETIC, MatrixKernel
from tuner.compare import build_case
from tuner.executors import Run
from tuner.inputs import Gradients, Inputs
from tuner.probe import balanced, exact_gradients, probe_inputs
from tuner.reference import reference
from tuner.validate import Validator

ALL = frozenset(GRADIENTS)
PARAMETERS = ALL - {"dx"}


@pytest.mark.parametrize(("hidden", "out", "exact"), [
    (8, 16, "dx dgamma dbeta dw db"), (64, 64, "dx dgamma dbeta dw db"), (6, 5, "dgamma dbeta dw db"),
    (5, 6, "dgamma dbeta dw db"), (65536, 64, "dgamma dbeta dw db"), (1, 3, "dx dgamma dbeta dw db"),
])
def test_what_the_probe_claims_exact_is_exact(hidden: int, out: int, exact: str) -> None:
    inputs = probe_inputs(40, hidden, out)
    assert exact_gradients(inputs) == frozenset(exact.split())
    right = reference(inputs).present()
    for name in exact.split():
        np.testing.assert_array_equal(right[name], right[name].astype(np.float32))


@pytest.mark.parametrize("hidden", [1, 2, 3, 4, 5, 6, 7, 9, 11, 64, 229, 8117])
def test_statistics_are_exact_in_every_row(hidden: int) -> None:
    """In float32, with the variance as a sum divided by H, or times 1/H."""
    inputs = probe_inputs(30, hidden, 2)
    assert not inputs.x.sum(axis=1).any()
    squares = np.square(inputs.x).sum(axis=1)
    eps = np.float32(inputs.eps)
    np.testing.assert_array_equal(squares / np.float32(hidden) + eps, 4)
    np.testing.assert_array_equal(squares * (np.float32(1) / np.float32(hidden)) + eps, 4)
    if hidden > 2:
        assert np.ptp(inputs.x, axis=0).all(), "a column that is the same in all rows"
        assert np.count_nonzero(inputs.x == 0, axis=1).max() <= 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 5, 16, 229])
def test_the_probe_is_the_same_in_every_data_type(dtype: str, hidden: int) -> None:
    plain, other = probe_inputs(40, hidden, 6), probe_inputs(40, hidden, 6, dtype=dtype)
    assert other.dtype == other.param_dtype == dtype
    for name in ("dy", "x", "gamma", "beta", "w"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(other, name).astype(np.float32))


@pytest.mark.parametrize(("dtype", "largest_out"), [("bfloat16", 512), ("float16", 4096)])
def test_dx_is_exact_while_dn_fits_its_data_type(dtype: str, largest_out: int) -> None:
    """dn grows as sqrt(5*O), about four times of which the largest of 1,280 reaches: 200 and 570; and 400 and 2,300 beyond."""
    assert exact_gradients(probe_inputs(40, 32, largest_out, dtype=dtype)) == ALL
    assert exact_gradients(probe_inputs(40, 32, 32 * largest_out, dtype=dtype)) == PARAMETERS


@pytest.mark.parametrize("order", ["forward", "backward", "shuffled", "halves"])
@pytest.mark.parametrize("hidden", [16, 15])
def test_the_probe_is_exact_in_every_order_of_summation(order: str, hidden: int) -> None:
    """One float32 accumulator each, over 65,536 rows."""
    inputs = balanced(probe_inputs(1021, hidden, 32), 65536).expand()
    right = reference(inputs, PARAMETERS).present()
    at = np.arange(inputs.rows)
    at = {"forward": at, "backward": at[::-1], "shuffled": np.random.default_rng(0).permutation(at),
          "halves": at.reshape(2, -1).T.ravel()}[order]
    dy, xhat = inputs.dy[at], inputs.x[at] * np.float32(0.5)
    dn = np.zeros(xhat.shape, np.float32)
    for o in range(inputs.out):
        dn += dy[:, o:o + 1] * inputs.w[o]
    assert inputs.gamma is not None and inputs.beta is not None
    n = xhat * inputs.gamma + inputs.beta
    np.testing.assert_array_equal(np.cumsum(dn * xhat, axis=0)[-1], right["dgamma"])
    np.testing.assert_array_equal(np.cumsum(dn, axis=0)[-1], right["dbeta"])
    np.testing.assert_array_equal(np.cumsum(dy, axis=0)[-1], right["db"])
    for o in range(0, inputs.out, 8):
        np.testing.assert_array_equal(np.cumsum(dy[:, o:o + 1] * n, axis=0)[-1], right["dw"][o])


@pytest.mark.parametrize("promote", [256, None])
@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize(("rows", "hidden", "out"), [(4096, 16, 8), (31, 15, 4096)])
def test_the_probe_is_exact_in_every_arithmetic(name: str, promote: int | None, rows: int, hidden: int, out: int) -> None:
    """Rounded operands, split and scaled ones, truncated sums, promoted or not."""
    data = balanced(probe_inputs(101, hidden, out), rows)
    case = build_case("probe", data, ALL, exact=exact_gradients(data.base))
    kernel = MatrixKernel(replace(ARITHMETIC[name], promote=promote))
    assert case.judge(kernel(case.inputs, case.wants)).reason is None


@pytest.mark.parametrize(("base", "rows"), [(7, 7), (7, 5), (7, 70), (7, 77), (7, 79), (1, 9), (5, 0)])
def test_the_signs_of_rows_that_repeat_are_balanced(base: int, rows: int) -> None:
    data = balanced(probe_inputs(base, 4, 3), rows)
    assert data.rows == rows
    assert data.base.rows == min(base, rows)
    assert set(np.unique(data.signs)) <= {-1, 1}
    full = data.signs[:rows - rows % base].reshape(-1, base)
    assert set(np.abs(full.sum(axis=0))) <= ({0, 2} if len(full) % 2 == 0 else {1})


def test_signs_are_in_random_order() -> None:
    """No row's signs are another's, and no stretch of rows cancels by construction."""
    data = balanced(probe_inputs(13, 4, 3), 13 * 64)
    full = data.signs.reshape(64, 13)
    assert len(np.unique(full, axis=1).T) == 13
    sums = full.reshape(8, 8, 13).sum(axis=1)
    assert np.count_nonzero(sums) > sums.size / 2
    assert np.any(balanced(data.base, data.rows, seed=1).signs != data.signs)


def one_of_many(fault: Run) -> Run:
    """The fault at large row counts alone."""
    return lambda inputs, wants: (fault if inputs.rows > 1000 else PLAIN)(inputs, wants)


@pytest.mark.parametrize(("rows", "dtype", "param_dtype", "accuracy"), [
    (262144, "float32", "", ""), (262144, "bfloat16", "", ""), (65536, "float32", "", "bf16"), (65536, "bfloat16", "float32", ""),
    (65536, "float16", "", "")])
def test_one_row_among_many_shows(rows: int, dtype: str, param_dtype: str, accuracy: str) -> None:
    problem = Problem(rows, 64, 64, dtype, PARAMETERS, param_dtype=param_dtype, accuracy=accuracy)
    judge = Validator(problem)
    for fault in (all_but(lambda rows: rows - 100), twice(lambda rows: rows // 3)):
        reason = judge.validate(one_of_many(fault)).reason
        assert reason is not None and "where exactly" in reason and "(exact probe, " in reason


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_one_row_shows_in_each_gradient_alone(name: str) -> None:
    """In bfloat16, with one output: where there is least to see. The sums would hide a row if they grew with the row count."""
    data = balanced(probe_inputs(1021, 2, 1, dtype="bfloat16"), 1_000_000)
    case = build_case("probe", data, frozenset((name,)), exact=exact_gradients(data.base))
    for skipped in (0, 12_345, 500_000, 999_900):
        got = all_but(partial(lambda row, _: row, skipped))(case.inputs, case.wants)
        assert "where exactly" in (case.judge(got).reason or "")


def results_rounded_twice(inputs: Inputs, wants: frozenset[str]) -> Gradients:
    """Faulty: the sums of the first half of the rows are kept in the data type of the results."""
    half = inputs.rows // 2
    second = Inputs(inputs.dy[half:], inputs.x[half:], inputs.gamma, inputs.beta, inputs.w, inputs.eps)
    parts = PLAIN(inputs.first(half), PARAMETERS).present(), PLAIN(second, PARAMETERS).present()
    return Gradients(**{name: parts[0][name] + parts[1][name] for name in parts[0]})


@pytest.mark.parametrize(("dtype", "out"), [("bfloat16", 16), ("float16", 1024)])
def test_sums_of_16_bits_show(dtype: str, out: int) -> None:
    """Where they exceed the whole numbers that the data type can hold."""
    data = balanced(probe_inputs(1021, 32, out, dtype=dtype), 4000)
    case = build_case("probe", data, PARAMETERS, exact=exact_gradients(data.base))
    assert case.judge(PLAIN(case.inputs, case.wants)).reason is None
    assert "where exactly" in (case.judge(results_rounded_twice(case.inputs, case.wants)).reason or "")
