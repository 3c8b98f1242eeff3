"""The float64 reference against finite differences, the identities of the operation, and itself in other arrangements."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from codegen.errors import InvalidProblem
from codegen.problem import GRADIENTS
from tests.cases import LITERALS, NO_ROWS, SAME_ROWS, Literal
from tuner.bounds import bounds, normwise_scales
from tuner.inputs import AnyFloats, Gradients, Inputs, Repeated, hard_inputs, random_inputs, repeated
from tuner.probe import probe_inputs
from tuner.reference import Array64, reference

ALL = frozenset(GRADIENTS)


def assert_close(got: Gradients, right: Gradients, rtol: float = 1e-12) -> None:
    """Equal up to rounding in float64, relative to each gradient's largest element."""
    assert got.present().keys() == right.present().keys()
    for name, array in right.present().items():
        assert got.present()[name].shape == array.shape
        scale = np.abs(array).max(initial=0.0)
        np.testing.assert_allclose(got.present()[name], array, rtol=0, atol=rtol * scale, err_msg=name)


def forward(inputs: Inputs, at: dict[str, Array64]) -> Array64:
    """y = Linear(LayerNorm(x)) [M, O] at the float64 parameters `at`."""
    x = at["x"]
    mean = x.mean(axis=1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=1, keepdims=True)
    y: Array64 = ((x - mean) / np.sqrt(variance + inputs.eps) * at["gamma"] + at["beta"]) @ at["w"].T + at["b"]
    return y


@pytest.mark.parametrize(("rows", "hidden", "out"), [(3, 5, 4), (1, 2, 3), (4, 1, 2), (2, 7, 1)])
def test_all_five_gradients_are_the_finite_differences_of_the_forward(rows: int, hidden: int, out: int) -> None:
    """With the step h = eps^(1/3) a central difference errs by about h^2 = 4e-11, relative to the loss and its derivatives."""
    inputs = random_inputs(rows, hidden, out)
    dy = inputs.dy.astype(np.float64)
    at = {name: getattr(inputs, name).astype(np.float64) for name in ("x", "gamma", "beta", "w")} | {"b": np.zeros(out)}
    step = np.finfo(np.float64).eps ** (1 / 3)
    right = reference(inputs).present()
    for parameter, name in (("x", "dx"), ("gamma", "dgamma"), ("beta", "dbeta"), ("w", "dw"), ("b", "db")):
        difference = np.empty(at[parameter].shape)
        for place in np.ndindex(difference.shape):
            value, losses = at[parameter][place], []
            for moved in (value - step, value + step):
                at[parameter][place] = moved
                losses.append(np.sum(dy * forward(inputs, at)))
            at[parameter][place] = value
            difference[place] = (losses[1] - losses[0]) / (2 * step)
        np.testing.assert_allclose(right[name], difference, rtol=0, atol=1e-9 * (1 + np.abs(difference).max()), err_msg=name)


def test_the_parameter_gradients_follow_from_one_product() -> None:
    """G = dy^T @ xhat gives dw, dgamma and dbeta, and dy @ (w @ gamma) the mean of dn*gamma, without dn."""
    inputs = random_inputs(200, 48, 12)
    dy, x, w = (array.astype(np.float64) for array in (inputs.dy, inputs.x, inputs.w))
    assert inputs.gamma is not None and inputs.beta is not None
    gamma, beta = inputs.gamma.astype(np.float64), inputs.beta.astype(np.float64)
    rstd = 1 / np.sqrt(x.var(axis=1, keepdims=True) + inputs.eps)
    xhat = (x - x.mean(axis=1, keepdims=True)) * rstd
    g, db, d = dy.T @ xhat, dy.sum(axis=0), dy @ w * gamma
    mean = (dy @ (w @ gamma) / 48)[:, None]
    assert_close(reference(inputs), Gradients(
        dx=rstd * (d - mean - xhat * np.mean(d * xhat, axis=1, keepdims=True)), dgamma=np.sum(w * g, axis=0), dbeta=db @ w,
        dw=g * gamma + np.outer(db, beta), db=db))


@pytest.mark.parametrize("literal", LITERALS, ids=lambda literal: literal.name)
def test_literal_right_values(literal: Literal) -> None:
    right = reference(literal.inputs).present()
    for name, expected in literal.expected.items():
        np.testing.assert_allclose(right[name].ravel()[:len(expected)], expected, rtol=literal.rtol, err_msg=name)


def test_the_gradients_are_linear_in_dy() -> None:
    inputs = random_inputs(9, 6, 5)
    doubled = reference(replace(inputs, dy=2 * inputs.dy)).present()
    assert_close(Gradients(**doubled), Gradients(**{name: 2 * array for name, array in reference(inputs).present().items()}))


def test_leading_dimensions_do_not_matter() -> None:
    flat = random_inputs(6, 8, 5)
    for shape in SAME_ROWS:
        inputs = Inputs.from_arrays(flat.dy.reshape(shape.batch, shape.seq, 5), flat.x.reshape(shape.batch, shape.seq, 8),
                                    flat.gamma, flat.beta, flat.w, flat.eps)
        assert_close(reference(inputs), reference(flat), rtol=0)


@pytest.mark.parametrize("shape", NO_ROWS, ids=str)
def test_no_rows(shape: object) -> None:
    inputs = random_inputs(0, 8, 4)
    for result in (reference(inputs), bounds(inputs)):
        assert result.dx is not None and result.dx.shape == (0, 8)
    right = reference(inputs).present()
    assert {name: array.shape for name, array in right.items()} == {
        "dx": (0, 8), "dgamma": (8,), "dbeta": (8,), "dw": (4, 8), "db": (4,)}
    assert not any(array.any() for array in right.values())


def test_absent_gamma_and_beta_are_ones_and_zeros() -> None:
    inputs = random_inputs(7, 6, 5)
    absent = replace(inputs, gamma=None, beta=None)
    written = replace(inputs, gamma=np.ones(6, np.float32), beta=np.zeros(6, np.float32))
    assert_close(reference(absent), reference(written), rtol=0)
    assert_close(bounds(absent), bounds(written), rtol=0)
    assert normwise_scales(absent) == normwise_scales(written)


@pytest.mark.parametrize("wants", [{name} for name in GRADIENTS] + [{"dx", "dw"}, {"dgamma", "db"}], ids=sorted)
def test_only_wanted_gradients_are_there(wants: set[str]) -> None:
    inputs = random_inputs(7, 6, 5)
    for function in (reference, bounds):
        every = function(inputs).present()
        assert_close(function(inputs, frozenset(wants)), Gradients(**{name: every[name] for name in wants}), rtol=0)


def test_unknown_or_no_gradients_are_refused() -> None:
    for wants in ({"dz"}, set()):
        with pytest.raises(InvalidProblem):
            reference(random_inputs(2, 2, 2), frozenset(wants))
        with pytest.raises(InvalidProblem):
            bounds(random_inputs(2, 2, 2), frozenset(wants))


@pytest.mark.parametrize("inputs", [random_inputs(53, 6, 9), hard_inputs(53, 6, 9)], ids=["random", "hard"])
def test_chunks_do_not_show(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reference(inputs), bounds(inputs), normwise_scales(inputs)
    monkeypatch.setattr("tuner.reference.CHUNK_ELEMENTS", 100)
    assert_close(reference(inputs), whole[0])
    assert_close(bounds(inputs), whole[1])
    assert normwise_scales(inputs) == pytest.approx(whole[2], rel=1e-12)


def test_memory_does_not_grow_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen chunks need no more than four, and no more than a dozen temporaries of the stated size."""
    chunk = 1 << 18
    monkeypatch.setattr("tuner.reference.CHUNK_ELEMENTS", chunk)

    def peak(chunks: int) -> int:
        inputs, wants = random_inputs(chunks * chunk // 256, 256, 16), ALL - {"dx"}
        tracemalloc.start()
        reference(inputs, wants)
        bounds(inputs, wants)
        normwise_scales(inputs)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    few = peak(4)
    assert few < 12 * chunk * 8
    assert peak(16) < 1.01 * few


# Rows repeated.

@pytest.mark.parametrize("rows", [5, 29, 30, 200])
def test_repeated_rows_cost_no_more_than_their_base(rows: int) -> None:
    data = repeated(random_inputs(29, 6, 5), rows, seed=3)
    written = data.expand()
    assert written.rows == data.rows == rows
    assert_same_but_for_dx(reference(data.base, weights=data.weights), reference(written), data)
    assert_same_but_for_dx(bounds(data.base, counts=data.counts), bounds(written), replace(data, signs=np.abs(data.signs)))
    assert normwise_scales(data.base, data.counts) == pytest.approx(normwise_scales(written), rel=1e-12)


def assert_same_but_for_dx(base: Gradients, whole: Gradients, data: Repeated) -> None:
    """The base's gradients, its dx repeated with the signs, are those of all the rows."""
    assert base.dx is not None
    dx: AnyFloats = base.dx[np.arange(data.rows) % data.base.rows] * data.signs[:, None]
    assert_close(replace(base, dx=dx), whole)


def test_a_prefix_of_repeated_rows() -> None:
    data = repeated(random_inputs(29, 6, 5), 100)
    for rows in (1, 29, 64):
        prefix, whole = data.first(rows).expand(), data.expand().first(rows)
        np.testing.assert_array_equal(prefix.x, whole.x)
        np.testing.assert_array_equal(prefix.dy, whole.dy)


# The data is what it claims to be.

@pytest.mark.parametrize("hidden", [1, 2, 3, 64])
def test_random_inputs_are_well_conditioned(hidden: int) -> None:
    inputs = random_inputs(500, hidden, 8)
    assert inputs.gamma is not None and np.all((np.abs(inputs.gamma) >= 0.5) & (np.abs(inputs.gamma) <= 2.0))
    assert np.mean(inputs.x.mean(axis=1)) == pytest.approx(0.7, abs=0.1)
    deviation = inputs.x.std(axis=1)
    if hidden > 1:
        assert 0.49 < deviation.min() < 0.6 and 1.8 < deviation.max() < 2.01
    assert random_inputs(1, hidden, 1000).w.mean() > 0


def test_data_depends_on_its_seed_alone() -> None:
    for generate in (random_inputs, hard_inputs, probe_inputs):
        one, same, other = generate(20, 6, 5, 1), generate(20, 6, 5, 1), generate(20, 6, 5, 2)
        for name in ("dy", "x", "gamma", "beta", "w"):
            np.testing.assert_array_equal(getattr(one, name), getattr(same, name))
            assert np.any(getattr(one, name) != getattr(other, name))


@pytest.mark.parametrize(("hidden", "out"), [(1, 1), (2, 3), (16, 16), (100, 7), (1000, 4)])
def test_hard_inputs_have_finite_results(hidden: int, out: int) -> None:
    inputs = hard_inputs(257, hidden, out)
    for array in (*reference(inputs).present().values(), *bounds(inputs).present().values()):
        assert np.isfinite(array.astype(np.float32)).all()
