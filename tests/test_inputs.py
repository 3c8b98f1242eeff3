"""What the arrays of a pass may look like, and what is said where they may not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tuner.errors import InputError, InputTypeError
from tuner.inputs import Gradients, Inputs, as_eps, random_inputs

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


@pytest.mark.parametrize("name", ["dy", "x", "gamma", "beta", "w"])
@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, ">f4"])
def test_n9_another_dtype_is_refused_by_name(name: str, dtype: Any) -> None:
    changed = arrays(**{name: arrays()[name].astype(dtype)})
    for build in (Inputs, Inputs.from_arrays):
        with pytest.raises(InputTypeError, match=rf"^{name} must be float32, not "):
            build(**changed)


@pytest.mark.parametrize("name", ["dy", "x", "w"])
@pytest.mark.parametrize("value", [None, [[1.0]]])
def test_what_is_no_array_is_refused_by_name(name: str, value: object) -> None:
    for build in (Inputs, Inputs.from_arrays):
        with pytest.raises(InputTypeError, match=rf"^{name} must be a NumPy array"):
            build(**arrays(**{name: value}))


@pytest.mark.parametrize(("changes", "message"), [
    ({"x": SIX.x[:, :7].copy()}, r"x has the shape \(6, 7\)"),
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
