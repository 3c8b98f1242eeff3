"""What the arrays of a pass may look like, and what is said where they may not."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.cases import DATA_TYPES
from tests.numpy_kernels import rounded
from tuner.dtypes import NUMPY
from tuner.errors import InputError, InputTypeError
from tuner.inputs import Gradients, Inputs, as_eps, hard_inputs, random_inputs, repeated
from tuner.reference import reference

SIX = random_inputs(6, 8, 5)


def arrays(**changes: Any) -> dict[str, Any]:
    """The fields of SIX, some of them changed."""
    return {"dy": SIX.dy, "x": SIX.x, "gamma": SIX.gamma, "beta": SIX.beta, "w": SIX.w, "eps": SIX.eps} | changes


@pytest.mark.parametrize("eps", [1e-5, np.float32(1e-5), np.float64(1e-5), np.array(1e-5), np.array(1e-5, np.float32)], ids=repr)
def test_p3_eps_of_any_number_type_is_the_same(eps: object) -> None:
    assert as_eps(eps) == float(np.float32(1e-5))
    assert Inputs(**arrays(eps=eps)).eps == float(np.float32(1e-5))


def test_p3_whole_numbers_are_numbers() -> None:
    assert as_eps(3) == as_eps(np.int64(3)) == 3.0


@pytest.mark.parametrize("eps", ["1e-5", None, True, np.True_, 1e-5j, [1e-5], np.array([1e-5]), np.array("1e-5")], ids=repr)
def test_p3_other_types_are_refused(eps: object) -> None:
    with pytest.raises(InputTypeError, match="eps must be a number, not "):
        as_eps(eps)


@pytest.mark.parametrize("eps", [0, -1e-5, 0.0, float("nan"), float("inf"), 1e-60, 1e60, 10**400],
                         ids=lambda eps: str(eps)[:9])
def test_eps_that_float32_cannot_use_is_refused(eps: float) -> None:
    with pytest.raises(InputError, match="eps must be positive and finite in float32"):
        as_eps(eps)


def typed(dtype: str, param_dtype: str, **changes: str) -> dict[str, Any]:
    """The fields of SIX in these data types, single ones in others."""
    given = arrays()
    chosen = {"dy": dtype, "x": dtype, "gamma": param_dtype, "beta": param_dtype, "w": param_dtype} | changes
    return given | {name: given[name].astype(NUMPY[kind]) for name, kind in chosen.items()}


@pytest.mark.parametrize("name", ["dy", "x", "gamma", "beta", "w"])
@pytest.mark.parametrize("dtype", [np.float64, np.int16, np.uint16, np.int32, ">f4", ">f2", ml_dtypes.float8_e5m2], ids=str)
def test_n9_another_dtype_is_refused_by_name(name: str, dtype: Any) -> None:
    changed = arrays(**{name: arrays()[name].astype(dtype)})
    for build in (Inputs, Inputs.from_arrays):
        with pytest.raises(InputTypeError, match=rf"^{name} must be float32, float16 or bfloat16 \(ml_dtypes.bfloat16\), not "):
            build(**changed)


@pytest.mark.parametrize(("dtype", "param_dtype"), DATA_TYPES)
def test_n9_data_types_that_go_together_are_taken_as_they_are(dtype: str, param_dtype: str) -> None:
    given = typed(dtype, param_dtype)
    for build in (Inputs, Inputs.from_arrays):
        built = build(**given)
        assert (built.dtype, built.param_dtype) == (dtype, param_dtype)
        assert all(np.shares_memory(getattr(built, name), given[name]) for name in ("dy", "x", "gamma", "beta", "w"))
    without = Inputs(**given | {"gamma": None, "beta": None})
    assert (without.dtype, without.param_dtype) == (dtype, param_dtype)


@pytest.mark.parametrize(("given", "sentence"), [
    (typed("float32", "float32", dy="float16"), "dy is float16 but x is float32; both must have the same data type"),
    (typed("float16", "float16", dy="bfloat16"), "dy is bfloat16 but x is float16; both must have the same data type"),
    (typed("float32", "bfloat16"), "w must be float32 where x is float32, not bfloat16"),
    (typed("bfloat16", "float16"), "w must be bfloat16 or float32 where x is bfloat16, not float16"),
    (typed("float16", "float16", gamma="float32"),
     "gamma is float32 but w is float16; gamma, beta and w must have the same data type"),
    (typed("bfloat16", "float32", beta="bfloat16"),
     "beta is bfloat16 but w is float32; gamma, beta and w must have the same data type"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_n9_a_mix_is_refused_by_name(given: dict[str, Any], sentence: str) -> None:
    for build in (Inputs, Inputs.from_arrays):
        with pytest.raises(InputTypeError) as caught:
            build(**given)
        assert str(caught.value) == sentence


def test_n9_statistics_are_float32_whatever_the_data() -> None:
    given = typed("float16", "float16")
    saved = np.ones(6, np.float16)
    with pytest.raises(InputTypeError, match=r"^mean must be float32, not float16"):
        Inputs(**given, mean=saved, rstd=saved)


@pytest.mark.parametrize("generate", [random_inputs, hard_inputs])
@pytest.mark.parametrize(("dtype", "param_dtype"), DATA_TYPES)
def test_data_is_rounded_to_nearest_even(generate: Any, dtype: str, param_dtype: str) -> None:
    made = generate(9, 8, 5, 3, dtype=dtype, param_dtype=param_dtype)
    assert (made.dtype, made.param_dtype) == (dtype, param_dtype)
    if generate is random_inputs:
        exact = random_inputs(9, 8, 5, 3)
        for name in ("dy", "x", "gamma", "beta", "w"):
            wanted = getattr(exact, name)
            bits = {"float32": 24, "bfloat16": 8, "float16": 11}[dtype if name in ("dy", "x") else param_dtype]
            np.testing.assert_array_equal(getattr(made, name).astype(np.float32), rounded(wanted, bits) if bits < 24 else wanted)


@pytest.mark.parametrize(("rows", "hidden", "out"), [(257, 64, 512), (257, 2, 300), (257, 1, 16), (257, 1500, 3), (29, 3, 4000)])
@pytest.mark.parametrize("param_dtype", ["float16", "float32"])
def test_hard_data_stays_in_the_range_of_float16(rows: int, hidden: int, out: int, param_dtype: str) -> None:
    hard = hard_inputs(rows, hidden, out, dtype="float16", param_dtype=param_dtype)
    largest = float(np.finfo(np.float16).max)
    for name, array in reference(hard).present().items():
        assert np.abs(array).max() < largest / 2, name
    for name in ("dy", "x", "gamma", "beta", "w"):
        assert np.isfinite(getattr(hard, name)).all()
    assert np.median(np.abs(hard.dy[np.abs(hard.dy) > 0])) > 2.0**-14, "most of dy has all its digits"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_large_mean_still_vary_in_16_bits(dtype: str) -> None:
    row = hard_inputs(14, 64, 5, dtype=dtype).x[1].astype(np.float64)
    assert abs(row.mean()) > 50 * row.std() > 0
    assert len(np.unique(row)) > 5


def test_repeated_rows_keep_their_data_type() -> None:
    data = repeated(random_inputs(5, 4, 3, dtype="bfloat16", param_dtype="float32"), 12).expand()
    assert (data.rows, data.dtype, data.param_dtype) == (12, "bfloat16", "float32")
    signs = repeated(random_inputs(5, 4, 3), 12).signs
    np.testing.assert_array_equal(data.dy[7].astype(np.float32), signs[7] * data.dy[2].astype(np.float32) * signs[2])


@pytest.mark.parametrize("name", ["dy", "x", "w"])
@pytest.mark.parametrize("value", [None, [[1.0]]])
def test_what_is_no_array_is_refused_by_name(name: str, value: object) -> None:
    for build in (Inputs, Inputs.from_arrays):
        with pytest.raises(InputTypeError, match=rf"^{name} must be a NumPy array"):
            build(**arrays(**{name: value}))


@pytest.mark.parametrize(("changes", "message"), [
    ({"x": SIX.x[:, :7].copy()}, "the last dimension of x is 7"),
    ({"dy": SIX.dy[:, :4].copy()}, r"dy has the shape \(6, 4\)"),
    ({"dy": SIX.dy[:5]}, r"dy has the shape \(5, 5\)"),
    ({"gamma": np.ones(7, np.float32)}, r"gamma has the shape \(7,\)"),
    ({"beta": np.ones(1, np.float32)}, r"beta has the shape \(1,\)"),
    ({"gamma": np.ones((8, 1), np.float32)}, "gamma must have 1 dimension"),
    ({"w": np.ones(8, np.float32)}, "w must have 2 dimensions"),
    ({"w": np.ones((0, 8), np.float32), "dy": np.ones((6, 0), np.float32)}, "at least 1"),
    ({"w": np.ones((5, 0), np.float32), "x": np.ones((6, 0), np.float32)}, "at least 1"),
    ({"x": np.asfortranarray(SIX.x)}, "x must be C-contiguous"),
    ({"w": np.repeat(SIX.w, 2, axis=1)[:, ::2]}, "w must be C-contiguous"),
])
def test_shapes_and_layouts_that_describe_no_pass_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Inputs(**arrays(**changes))


def test_l1_l2_other_layouts_are_copied() -> None:
    strided = np.repeat(np.repeat(SIX.x, 2, axis=0), 3, axis=1)[::2, ::3]
    backward = SIX.dy[::-1].copy()[::-1]
    assert not strided.flags.c_contiguous and not backward.flags.c_contiguous
    built = Inputs.from_arrays(backward, strided, SIX.gamma, np.repeat(SIX.beta, 2)[::2] if SIX.beta is not None else None,
                               np.asfortranarray(SIX.w), SIX.eps)
    for name in ("dy", "x", "gamma", "beta", "w"):
        assert getattr(built, name).flags.c_contiguous
        np.testing.assert_array_equal(getattr(built, name), getattr(SIX, name))


def test_l1_an_expanded_gradient_is_written_out() -> None:
    dy = np.broadcast_to(np.float32(1), (2, 3, 5))
    over_rows = np.broadcast_to(SIX.dy[0], (2, 3, 5))
    x = SIX.x.reshape(2, 3, 8)
    np.testing.assert_array_equal(Inputs.from_arrays(**arrays(dy=dy, x=x)).dy, np.ones((6, 5)))
    np.testing.assert_array_equal(Inputs.from_arrays(**arrays(dy=over_rows, x=x)).dy, np.tile(SIX.dy[0], (6, 1)))


def test_contiguous_arrays_are_shared() -> None:
    built = Inputs.from_arrays(**arrays(dy=SIX.dy.reshape(3, 2, 5), x=SIX.x.reshape(3, 2, 8)))
    for name in ("dy", "x", "gamma", "beta", "w"):
        assert np.shares_memory(getattr(built, name), getattr(SIX, name))


@pytest.mark.parametrize("leading", [(), (0,), (6,), (0, 5), (3, 0), (2, 3), (1, 2, 3)])
def test_any_leading_dimensions(leading: tuple[int, ...]) -> None:
    built = Inputs.from_arrays(**arrays(dy=np.ones((*leading, 5), np.float32), x=np.ones((*leading, 8), np.float32)))
    rows = int(np.prod(leading))
    assert (built.rows, built.hidden, built.out) == (rows, 8, 5)
    assert built.dy.shape == (rows, 5)


def test_leading_dimensions_must_agree() -> None:
    with pytest.raises(InputError, match="leading dimensions"):
        Inputs.from_arrays(**arrays(dy=SIX.dy.reshape(3, 2, 5), x=SIX.x.reshape(2, 3, 8)))
    with pytest.raises(InputError, match="x must have at least one dimension"):
        Inputs.from_arrays(**arrays(x=np.array(1, np.float32)))


def test_gamma_and_beta_may_be_absent() -> None:
    for build in (Inputs, Inputs.from_arrays):
        built = build(**arrays(gamma=None, beta=None))
        assert built.gamma is None and built.beta is None


def test_present_gradients_come_in_their_order() -> None:
    some = Gradients(db=np.ones(2), dx=np.ones((3, 4)))
    assert list(some.present()) == ["dx", "db"]
