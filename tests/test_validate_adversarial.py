"""Class fp32 on adversarial data: emulated float32 arithmetic, here in NumPy, stays inside it; shortcuts do not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from codegen.problem import ALL_GRADIENTS
from tests.adversarial import KINDS, SHAPE, adversarial_inputs
from tests.numpy_kernels import PLAIN, one_pass
from tests.numpy_matrix import ARITHMETIC, MatrixKernel
from tuner.compare import Case, build_case
from tuner.executors import Run
from tuner.inputs import Repeated
from tuner.reference import reference


@cache
def case(kind: str) -> Case:
    inputs = adversarial_inputs(kind, *SHAPE)
    return build_case(kind, Repeated(inputs, np.ones(inputs.rows, np.int8)), ALL_GRADIENTS, inputs=inputs, normwise=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fp16x3", "bf16x6", "tf32x3"])
def test_emulated_float32_stays_inside_class_fp32(name: str, kind: str) -> None:
    """Each gradient within the limit of the class, as on ordinary data, and each element within its bound."""
    finding = case(kind).judge(MatrixKernel(ARITHMETIC[name])(case(kind).inputs, ALL_GRADIENTS))
    assert finding.reason is None
    assert finding.normwise.keys() == finding.ratios.keys() == ALL_GRADIENTS


@pytest.mark.parametrize("kind", KINDS)
def test_plain_float32_keeps_the_bound(kind: str) -> None:
    """A mean kept in one float32 number costs it the limit of the class where the mean is large."""
    finding = case(kind).judge(PLAIN(case(kind).inputs, ALL_GRADIENTS))
    assert max(finding.ratios.values()) <= 1.0
    assert (finding.reason is None) == (kind not in ("large mean", "everything at once"))


SHORTCUTS: dict[str, tuple[Run, tuple[str, ...]]] = {
    "one scale a tile": (
        MatrixKernel(replace(ARITHMETIC["fp16x3"], scales="tiles")),
        ("rows of dy over twelve decades", "tiny columns", "outliers", "everything at once")),
    "no scales": (
        MatrixKernel(replace(ARITHMETIC["fp16x3"], scales="")),
        ("rows of dy over twelve decades", "tiny columns", "gradients of 1e-7", "outliers", "everything at once")),
    "two planes of bf16": (MatrixKernel(ARITHMETIC["bf16x3"]), tuple(KINDS)),
    "one-pass variance": (replace(PLAIN, statistics=one_pass), ("large mean", "constant rows", "everything at once")),
}
"""With the data that finds each of them out."""


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, (_, kinds) in SHORTCUTS.items() for kind in kinds])
@np.errstate(over="ignore", invalid="ignore")
def test_shortcuts_do_not(name: str, kind: str) -> None:
    assert case(kind).judge(SHORTCUTS[name][0](case(kind).inputs, ALL_GRADIENTS)).reason is not None


@pytest.mark.parametrize("kind", KINDS)
def test_the_data_is_what_it_says(kind: str) -> None:
    """Finite, its results too; the same for the same seed; and unlike the random data it is made of."""
    inputs, again, other = (adversarial_inputs(kind, 30, 12, 9, seed) for seed in (0, 0, 1))
    for array in reference(inputs).present().values():
        assert np.isfinite(array.astype(np.float32)).all()
    for name in ("dy", "x", "gamma", "beta", "w"):
        np.testing.assert_array_equal(getattr(inputs, name), getattr(again, name))
        assert np.any(getattr(inputs, name) != getattr(other, name))
    size, mean = np.abs(inputs.dy), inputs.x.astype(np.float64).mean(axis=1)
    smallest, largest = {
        "dy over twelve decades": (1e-14, 10), "rows of dy over twelve decades": (1e-14, 10), "gradients of 1e-7": (1e-12, 1e-6),
        "tiny columns": (1e-15, 10), "outliers": (1e-5, 1e7), "everything at once": (1e-33, 1e-6)}.get(kind, (1e-5, 10))
    assert smallest <= size.min() and size.max() <= largest
    assert kind not in ("large mean",) or np.all(np.abs(mean - 1e4) < 2)
    assert kind not in ("constant rows", "everything at once") or np.count_nonzero(np.ptp(inputs.x, axis=1) == 0) == 20
