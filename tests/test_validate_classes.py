"""The validator in every accuracy class and data type: what it rejects, what it accepts, and at which depth."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from codegen.dtypes import CLASS_ERRORS
from codegen.problem import GRADIENTS, Problem, Shape
from tests import numpy_kernels as kernels
from tests.cases import VALIDATED
from tests.numpy_kernels import PLAIN
from tests.numpy_matrix import ARITHMETIC, MatrixKernel
from tuner.compare import bound_fault
from tuner.dtypes import NUMPY
from tuner.executors import Run
from tuner.executors.arrays import output_specs
from tuner.inputs import AnyFloats, Gradients, Inputs, random_inputs
from tuner.validate import Validator, Verdict

ALL = frozenset(GRADIENTS)

Kind = tuple[str, str, str]
"""Data type, that of the parameters, accuracy class."""

KINDS: tuple[Kind, ...] = (
    ("float32", "float32", "tf32"), ("float32", "float32", "fp16"), ("float32", "float32", "bf16"),
    ("bfloat16", "bfloat16", "bf16"), ("bfloat16", "float32", "bf16"),
    ("float16", "float16", "fp16"), ("float16", "float32", "fp16"), ("float16", "float16", "bf16"))
"""But float32 in class fp32, which test_validate.py is about."""

OF_CLASS_FP32 = frozenset(("tf32 products", "bf16x3 products"))
"""Faults in class fp32 alone."""


def harmless(kind: Kind) -> frozenset[str]:
    """What is no fault there: gradients wrong by less than their rounding, and a one-pass variance of values of so few bits.

    Their squares are exact in float32, and a class with 8 bits of its own does not see what the sums of these lose.
    """
    dtype, param_dtype, accuracy = kind
    scaled = frozenset(("dgamma * 1.001", "dbeta * 1.001")) if param_dtype != "float32" else frozenset()
    return scaled | ({"one-pass variance"} if dtype != "float32" and accuracy == "bf16" else frozenset())


@lru_cache(maxsize=8)
def validator(rows: int, hidden: int, out: int, kind: Kind) -> Validator:
    dtype, param_dtype, accuracy = kind
    return Validator(Problem(rows, hidden, out, dtype, param_dtype=param_dtype, accuracy=accuracy))


def judged(shape: Shape, kind: Kind, run: Run) -> Verdict:
    return validator(shape.rows, shape.hidden, shape.out, kind).validate(run)


def rejected(verdict: Verdict) -> str:
    """The reason of a verdict that must be a rejection."""
    assert not verdict.ok
    assert verdict.reason
    return verdict.reason


def text(kind: Kind) -> str:
    dtype, param_dtype, accuracy = kind
    return f"{dtype}-{param_dtype}-{accuracy}"


# V1 in every class and data type.

FAULTS: dict[str, Run] = {
    **{name: kernel for name, kernel in kernels.FAULTY_KERNELS.items() if name not in OF_CLASS_FP32},
    **{name: kernels.spoiled(spoiler) for name, spoiler in kernels.SPOILERS.items()},
}


@pytest.mark.parametrize("shape", VALIDATED, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=text)
def test_v1_rejects(kind: Kind, shape: Shape) -> None:
    judge = validator(shape.rows, shape.hidden, shape.out, kind)
    assert not {name for name in FAULTS.keys() - harmless(kind) if judge.validate(FAULTS[name]).ok}


@pytest.mark.parametrize("shape", VALIDATED, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=text)
def test_v1_accepts(kind: Kind, shape: Shape) -> None:
    verdict = judged(shape, kind, PLAIN)
    assert verdict.ok, verdict.reason
    assert verdict.errors.keys() == ALL


@pytest.mark.parametrize("kind", KINDS, ids=text)
@pytest.mark.parametrize("shape", [Shape(1, 1, 4, 1), Shape(1, 2, 1, 1), Shape(1, 37, 2, 5), Shape(1, 2, 3, 1),
                                   Shape(1, 7, 1, 300), Shape(1, 1, 2001, 3)], ids=str)
def test_v1_accepts_correct_results_at_difficult_sizes(kind: Kind, shape: Shape) -> None:
    for seed in range(3):
        problem = Problem.of(shape, dtype=kind[0], param_dtype=kind[1], accuracy=kind[2])
        verdict = Validator(problem, seed=seed).validate(PLAIN)
        assert verdict.ok, verdict.reason


# What each test sees of a parameter gradient that is wrong by a little.

def scaled(name: str, factor: float) -> Run:
    """The plain kernel, one gradient multiplied before it is rounded to its data type."""
    def wrong(inputs: Inputs, wants: frozenset[str]) -> Gradients:
        right = PLAIN(inputs.rounded_to("float32"), wants).present()
        right[name] = right[name] * np.float32(factor)
        return Gradients(**{name: right[name].astype(spec.dtype) for name, spec in output_specs(inputs, wants).items()})
    return wrong


@pytest.mark.parametrize("name", ["dgamma", "dbeta", "dw", "db"])
def test_a_thousandth_is_seen_by_the_exact_probe_alone_in_class_bf16(name: str) -> None:
    """The class allows 8e-3 and the bound no less, but float32 results of the probe are exact in this class, too."""
    kind, run = ("float32", "float32", "bf16"), scaled(name, 1.001)
    reason = rejected(judged(Shape(1, 512, 32, 16), kind, run))
    assert re.match(rf"{name}\[.*where exactly .*\(exact probe, ", reason)
    elsewhere = judged(Shape(1, 512, 32, 16), kind, lambda inputs, wants: (run if inputs.eps < 1 else PLAIN)(inputs, wants))
    assert elsewhere.ok
    assert 5e-4 < elsewhere.errors[name].normwise < 1.01e-3


@pytest.mark.parametrize(("dtype", "hidden_in_rounding", "seen"), [("bfloat16", 1.0005, 1.005), ("float16", 1.00005, 1.001)])
def test_16_bit_gradients_show_what_exceeds_their_rounding(dtype: str, hidden_in_rounding: float, seen: float) -> None:
    """Exact results below 2^8 (bfloat16) or 2^11 units (float16) absorb a factor nearer to 1 than their roundoff."""
    kind = (dtype, dtype, "bf16")
    assert judged(Shape(1, 16, 8, 4), kind, scaled("dgamma", hidden_in_rounding)).ok
    assert "exact probe" in rejected(judged(Shape(1, 16, 8, 4), kind, scaled("dgamma", seen)))


# The accuracy class, from both sides, at several depths.

DEEP = {depth: (Shape(1, depth, 8, 8), Shape(1, 8, 8, depth)) for depth in (256, 2304, 12288)}
"""Sums that long over rows, in G, and over outputs, in dn."""


def deep(depth: int, kind: Kind, name: str, promote: int | None) -> list[Verdict]:
    kernel: Run = PLAIN if name == "float32" else MatrixKernel(replace(ARITHMETIC[name], promote=promote))
    return [judged(shape, kind, kernel) for shape in DEEP[depth]]


@pytest.mark.parametrize("depth", DEEP)
@pytest.mark.parametrize(("name", "accuracy"), [
    ("float32", "fp32"), ("tf32x3", "fp32"), ("bf16x6", "fp32"), ("fp16x3", "fp32"),
    ("tf32", "tf32"), ("fp16", "tf32"), ("bf16x3", "tf32"), ("fp16", "fp16"), ("bf16", "bf16")])
def test_promoted_products_are_accepted_in_their_class(name: str, accuracy: str, depth: int) -> None:
    for verdict in deep(depth, ("float32", "float32", accuracy), name, 256):
        assert verdict.ok, verdict.reason
        assert max(error.normwise for error in verdict.errors.values()) <= CLASS_ERRORS[accuracy]


@pytest.mark.parametrize("depth", DEEP)
@pytest.mark.parametrize(("name", "accuracy", "least"), [
    ("tf32", "fp32", 2e-4), ("fp16", "fp32", 2e-4), ("bf16", "fp32", 1e-3), ("bf16x3", "fp32", 3e-6), ("bf16", "tf32", 1e-3),
    ("bf16", "fp16", 1.5e-3)])
def test_rounded_operands_are_refused_in_a_finer_class(name: str, accuracy: str, least: float, depth: int) -> None:
    for verdict in deep(depth, ("float32", "float32", accuracy), name, 256):
        found = re.fullmatch(r"(\w+): relative Frobenius error (\S+), where accuracy class (\w+) allows (\S+) \(random data, .*",
                             rejected(verdict))
        assert found, verdict.reason
        assert float(found[2]) == pytest.approx(verdict.errors[found[1]].normwise, rel=0.01)
        assert float(found[2]) > least
        assert found[3] == accuracy and float(found[4]) == CLASS_ERRORS[accuracy]


@pytest.mark.parametrize("name", ["tf32x3", "bf16x6", "fp16x3"])
def test_truncated_sums_are_refused_where_they_are_long(name: str) -> None:
    """Without promotion the error grows with the depth: a chain of 256 is in class fp32, one of 12,288 is far from it."""
    kind: Kind = ("float32", "float32", "fp32")
    for verdict in deep(256, kind, name, None):
        assert verdict.ok, verdict.reason
    for verdict in deep(12288, kind, name, None):
        assert "accuracy class fp32 allows 2e-06" in rejected(verdict)
        assert max(error.normwise for error in verdict.errors.values()) > 5e-6


# 16-bit data in its own class.

NATIVE = {"bfloat16": "bf16", "float16": "fp16 without scales"}


@pytest.mark.parametrize("keeps_dn", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[0] != "float32"], ids=text)
@pytest.mark.parametrize("shape", [Shape(1, 2304, 16, 16), Shape(1, 61, 16, 2304), Shape(4, 75, 129, 40), Shape(1, 4, 8, 16),
                                   Shape(1, 71, 1, 3)], ids=str)
def test_native_products_are_accepted(shape: Shape, kind: Kind, keeps_dn: bool) -> None:
    """Also of a kernel that keeps dn in 16 bits until a row is complete."""
    verdict = judged(shape, kind, MatrixKernel(ARITHMETIC[NATIVE[kind[0]]], keeps_dn))
    assert verdict.ok, verdict.reason
    assert max(error.normwise for error in verdict.errors.values()) < 0.5 * CLASS_ERRORS[kind[2]]


def test_float16_without_scales_is_refused_for_float32_data() -> None:
    """Its range is too short for the hard data."""
    verdict = judged(Shape(1, 300, 32, 16), ("float32", "float32", "fp16"), np.errstate(invalid="ignore")(
        MatrixKernel(ARITHMETIC["fp16 without scales"]).__call__))
    assert "nan where" in rejected(verdict) and "hard data" in rejected(verdict)


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[0] != "float32"], ids=text)
def test_results_must_have_their_data_type(kind: Kind, name: str) -> None:
    own = kind[0] if name == "dx" else kind[1]
    other = "float32" if own != "float32" else "float16"

    def run(inputs: Inputs, wants: frozenset[str]) -> Gradients:
        right = PLAIN(inputs, wants).present()
        return Gradients(**right | {name: right[name].astype(NUMPY[other])})

    assert rejected(judged(Shape(1, 16, 8, 4), kind, run)) == f"{name} is {other} instead of {own} (exact probe, 1 row)"


def changed_at(place: tuple[int, ...], change: Callable[[AnyFloats], AnyFloats], inputs: Inputs) -> str | None:
    right = PLAIN(inputs, ALL)
    assert right.dx is not None
    right.dx[place] = change(right.dx[place])
    return bound_fault(inputs, right)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_wrong_element_is_named_in_16_bits_too(dtype: str) -> None:
    inputs = random_inputs(50, 24, 10, dtype=dtype)
    assert changed_at((31, 7), lambda value: value, inputs) is None
    fault = changed_at((31, 7), lambda value: value + type(value)(1), inputs)
    assert fault is not None and re.match(r"dx\[31,7\]: \S+ where \S+ \+- \S+ is right, \S+ times the bound", fault)


def test_results_beyond_float16_are_infinite() -> None:
    """db sums to 4 * 20,000. Near the largest number, 65,504, either will do, as sums may differ in their last bits."""
    def fault(value: float, got: float) -> str | None:
        dy = np.full((4, 1), value, np.float16)
        inputs = Inputs(dy, np.zeros((4, 2), np.float16), None, None, np.ones((1, 2), np.float16), 1e-5)
        return bound_fault(inputs, Gradients(db=np.array([got], np.float16)), frozenset(("db",)))

    assert fault(20_000, np.inf) is None
    assert fault(20_000, 65504) == "db[0]: 65504 where 80000 is right (the given data, 4 rows)"
    assert fault(15_000, np.inf) == "db[0]: inf where 60000 is right (the given data, 4 rows)"
    assert fault(15_000, 60_000) is None
    assert fault(16_384, np.inf) is None  # 65,536
    assert fault(16_376, 65504) is None
    assert fault(16_376, np.inf) is None
