"""The validator rejects each planted fault with a reason, and accepts what is right."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import tuner.compare
from codegen.problem import GRADIENTS, Problem, Shape
from tests import numpy_kernels as kernels
from tests.cases import LITERALS, VALIDATED, Literal, array
from tests.numpy_kernels import PLAIN
from tuner.bounds import ACCURACY, bounds
from tuner.compare import bound_fault, build_case
from tuner.errors import DeviceLost, InputError, LaunchError
from tuner.executors import Run
from tuner.inputs import AnyFloats, Gradients, Inputs, Repeated, random_inputs
from tuner.reference import reference
from tuner.validate import Validator, Verdict

ALL = frozenset(GRADIENTS)
SMALL = Shape(4, 4, 8, 16)
FAULTS: dict[str, Run] = {**kernels.FAULTY_KERNELS, **{name: kernels.spoiled(s) for name, s in kernels.SPOILERS.items()}}


@cache
def validator(shape: Shape, accuracy: str = "") -> Validator:
    return Validator(Problem.of(shape, accuracy=accuracy))


def reason_of(verdict: Verdict) -> str:
    """The reason of a verdict that must be a rejection."""
    assert not verdict.ok
    assert verdict.reason
    return verdict.reason


def is_probe(inputs: Inputs) -> bool:
    """By its eps, which nothing else has."""
    return inputs.eps >= 2.0


def on_other_data_than_the_probe(change: Callable[[AnyFloats], AnyFloats]) -> Run:
    """The plain kernel, right on the exact probe, with all its results changed elsewhere."""
    def run(inputs: Inputs, wants: frozenset[str]) -> Gradients:
        right = PLAIN(inputs, wants)
        return right if is_probe(inputs) else Gradients(**{name: change(a) for name, a in right.present().items()})
    return run


# The whole: planted faults and correct kernels at the four sizes of V1.

@pytest.mark.parametrize("shape", VALIDATED, ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_v1_rejects(fault: str, shape: Shape) -> None:
    reason_of(validator(shape).validate(FAULTS[fault]))


@pytest.mark.parametrize("shape", VALIDATED, ids=str)
@pytest.mark.parametrize("name", kernels.ACCEPTED_KERNELS)
def test_v1_accepts(name: str, shape: Shape) -> None:
    verdict = validator(shape).validate(kernels.ACCEPTED_KERNELS[name])
    assert verdict.ok, verdict.reason
    assert verdict.reason is None
    assert verdict.errors.keys() == ALL
    assert all(error.normwise <= ACCURACY["fp32"].limit and error.bound_ratio <= 1.0 for error in verdict.errors.values())


@pytest.mark.parametrize("literal", LITERALS, ids=lambda literal: literal.name)
def test_v1_accepts_correct_results_on_difficult_data(literal: Literal) -> None:
    assert bound_fault(literal.inputs, PLAIN(literal.inputs, ALL)) is None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", [Shape(1, 1, 4, 1), Shape(1, 3, 4, 1), Shape(1, 2, 1, 1), Shape(1, 1, 2, 1), Shape(1, 37, 2, 5),
                                   Shape(1, 2, 3, 1), Shape(1, 7, 1, 300), Shape(1, 1, 8117, 3)], ids=str)
def test_v1_accepts_correct_results_at_difficult_sizes(shape: Shape, seed: int) -> None:
    verdict = Validator(Problem.of(shape), seed=seed).validate(PLAIN)
    assert verdict.ok, verdict.reason


# (a) The exact probe.

def skipping_one_of_many(inputs: Inputs, wants: frozenset[str]) -> Gradients:
    kernel = kernels.all_but(lambda rows: rows - 100) if inputs.rows > 1000 else PLAIN
    return kernel(inputs, wants)


def test_the_probe_sees_one_skipped_row_that_passes_the_bound() -> None:
    shape, parameters = Shape(1, 262144, 16, 16), ALL - {"dx"}
    inputs = random_inputs(shape.rows, shape.hidden, shape.out)
    assert bound_fault(inputs, skipping_one_of_many(inputs, parameters), parameters) is None
    reason = reason_of(validator(shape).validate(skipping_one_of_many))
    assert "where exactly" in reason
    assert reason.endswith("(exact probe, 262139 rows)")


def test_the_probe_sees_one_skipped_row_where_hidden_is_odd() -> None:
    reason = reason_of(validator(Shape(1, 65536, 5, 3)).validate(skipping_one_of_many))
    assert reason.startswith("dgamma[0]")
    assert reason.endswith("(exact probe, 65521 rows)")


def test_an_exact_mismatch_is_located_and_counted() -> None:
    def run(inputs: Inputs, wants: frozenset[str]) -> Gradients:
        right = PLAIN(inputs, wants)
        if right.dx is not None and inputs.rows == 4999:
            right.dx[3001, 5] += 1
            right.dx[4998] += 1
        return right
    reason = reason_of(validator(Shape(5, 1000, 8, 3)).validate(run))
    assert re.fullmatch(r"dx\[3001,5\]: (\S+) where exactly (\S+) is right, and 8 more differ \(exact probe, 4999 rows\)", reason)


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_probe_sees_a_single_unit_in_the_last_place(name: str) -> None:
    def run(inputs: Inputs, wants: frozenset[str]) -> Gradients:
        right = PLAIN(inputs, wants)
        if is_probe(inputs):
            result = right.present()[name]
            result.flat[-1] = np.nextafter(result.flat[-1], np.float32(np.inf))
        return right
    assert "where exactly" in reason_of(validator(SMALL).validate(run))


# (b) The accuracy class.

def test_the_normwise_error_is_relative_to_the_norm_of_the_result() -> None:
    """Here all terms have one sign, so that each result is larger than it is on average over the signs of dy."""
    rows, hidden, out = 100, 6, 40
    base = replace(random_inputs(7, hidden, out), dy=np.ones((7, out), np.float32), beta=np.full(hidden, 3, np.float32),
                   w=np.tile(array([1, 2, 4, 8, 16, 32]), (out, 1)))
    data = Repeated(base, np.ones(rows, np.int8))
    case = build_case("data", data, ALL, "fp32", normwise=True)
    right = reference(case.inputs).present()
    got = Gradients(**{name: (value * 1.001).astype(np.float32) for name, value in right.items()})
    assert case.judge(got).normwise == pytest.approx(dict.fromkeys(GRADIENTS, 1e-3), rel=1e-3)


def test_one_float32_chain_of_65536_terms_is_refused() -> None:
    verdict = validator(Shape(1, 65536, 16, 16)).validate(replace(PLAIN, row_sum=kernels.one_chain_sum))
    assert "accuracy class fp32 allows 2e-06 (random data, 65536 rows)" in reason_of(verdict)
    assert 2e-6 < verdict.errors["db"].normwise < 2e-5


@pytest.mark.parametrize("accuracy", ACCURACY)
def test_the_limit_of_each_class_from_both_sides(accuracy: str) -> None:
    shape, limit = Shape(1, 512, 32, 16), ACCURACY[accuracy].limit

    def verdict(error: float) -> Verdict:
        def run(inputs: Inputs, wants: frozenset[str]) -> Gradients:
            return (wrong if inputs.rows == shape.rows else PLAIN)(inputs, wants)
        wrong = on_other_data_than_the_probe(lambda result: result * np.float32(1 + error))
        return validator(shape, accuracy).validate(run)

    assert verdict(0.8 * limit).ok
    assert f"accuracy class {accuracy}" in reason_of(verdict(1.2 * limit))


# (c) The per-element bound.

def test_one_pass_variance_is_refused_by_the_hard_rows() -> None:
    verdict = validator(Shape(1, 512, 256, 16)).validate(replace(PLAIN, statistics=kernels.one_pass))
    assert reason_of(verdict).endswith(" times the bound (hard data, 257 rows)")
    assert verdict.errors["dx"].bound_ratio > 1.0


def test_one_pass_variance_is_refused_on_large_means() -> None:
    kernel = replace(PLAIN, statistics=kernels.one_pass)
    for literal in LITERALS[:2]:
        assert bound_fault(literal.inputs, kernel(literal.inputs, ALL)) is not None


def test_the_worst_element_among_repeated_rows_is_named() -> None:
    def run(inputs: Inputs, wants: frozenset[str]) -> Gradients:
        right = PLAIN(inputs, wants)
        if inputs.rows == 70_000 and not is_probe(inputs):
            assert right.dx is not None
            expected.append(float(right.dx[69_001, 3]))
            right.dx[69_001, 3] += np.float32(3e-4)
            right.dx[5_000, 2] -= np.float32(1e-4)
        return right
    expected: list[float] = []
    reason = reason_of(validator(Shape(70, 1000, 8, 4)).validate(run))
    found = re.fullmatch(
        r"dx\[69001,3\]: \S+ where (\S+) \+- \S+ is right, \S+ times the bound \(random data, 70000 rows\)", reason)
    assert found
    assert float(found[1]) == pytest.approx(expected[0], rel=1e-5)


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_bound_of_each_element_from_both_sides(name: str) -> None:
    inputs, wants = random_inputs(150, 24, 10), frozenset((name,))
    right, bound = reference(inputs, wants).present()[name], bounds(inputs, wants).present()[name]
    place = np.unravel_index(right.size * 2 // 3, right.shape)

    def fault(multiple: float) -> str | None:
        got = right.copy()
        got[place] += multiple * bound[place]
        return bound_fault(inputs, Gradients(**{name: got.astype(np.float32)}), wants)

    assert fault(0.9) is None
    assert fault(-0.9) is None
    index = ",".join(str(i) for i in place)
    pattern = rf"{name}\[{index}\]: \S+ where \S+ \+- \S+ is right, \S+ times the bound \(the given data, 150 rows\)"
    for multiple in (1.1, -1.1):
        assert re.fullmatch(pattern, fault(multiple) or "")


def test_places_of_non_finite_values_count_and_their_kind_does_not() -> None:
    inputs = random_inputs(6, 4, 3)
    inputs.dy[2, 1] = np.inf
    with np.errstate(invalid="ignore"):
        right = PLAIN(inputs, ALL)
    assert right.dx is not None
    assert bound_fault(inputs, right) is None
    right.dx[2] = [np.nan, -np.inf, np.inf, np.nan]
    assert bound_fault(inputs, right) is None
    right.dx[2, 3] = 1.0
    assert bound_fault(inputs, right) == "dx[2,3]: 1 where nan is right (the given data, 6 rows)"


def test_places_of_non_finite_values_come_before_all_else() -> None:
    def run(inputs: Inputs, wants: frozenset[str]) -> Gradients:
        right = PLAIN(inputs, wants)
        assert right.dx is not None and right.db is not None
        right.dx[0, 0] += 100
        right.db[3] = np.nan
        return right
    assert reason_of(validator(SMALL).validate(run)).startswith("db[3]: nan where ")


# What the validator promises its callers.

def test_only_wanted_gradients_are_asked_for_and_no_others_tolerated() -> None:
    wants = frozenset(("dx", "db"))
    judge = Validator(Problem.of(SMALL, wants=wants))
    verdict = judge.validate(PLAIN)
    assert verdict.ok, verdict.reason
    assert verdict.errors.keys() == wants
    assert reason_of(judge.validate(lambda inputs, _: PLAIN(inputs, ALL))).startswith("dbeta is there, but was not asked for")


def test_a_launch_error_is_a_failed_test_and_other_errors_pass() -> None:
    def failing(error: Exception) -> Run:
        def run(inputs: Inputs, wants: frozenset[str]) -> Gradients:
            raise error
        return run
    assert reason_of(validator(SMALL).validate(failing(LaunchError("row_warp: misaligned address")))) == \
        "row_warp: misaligned address (exact probe, 1 row)"
    for error in (ZeroDivisionError(), DeviceLost("the GPU cannot be used by this process any more")):
        with pytest.raises(type(error)):
            validator(SMALL).validate(failing(error))


@pytest.mark.parametrize("fault", ["wrong", "refused"])
def test_a_kernel_must_be_right_in_every_variation(fault: str) -> None:
    seen: list[int] = []

    def varied(inputs: Inputs, wants: frozenset[str]) -> Gradients:
        seen.append(inputs.rows)
        if fault == "refused":
            raise LaunchError("row_warp: block 0, thread 3: read before x")
        result = PLAIN(inputs, wants)
        assert result.db is not None
        result.db[0] += 1.0
        return result

    verdict = validator(SMALL).validate(PLAIN, {"in order": PLAIN, "in reverse order": varied})
    assert reason_of(verdict).endswith("(exact probe, 61 rows); in reverse order")
    assert seen == [61]
    assert set(verdict.errors) == ALL
    assert validator(SMALL).validate(PLAIN, {"in order": PLAIN}).ok


def test_a_run_cannot_change_the_inputs_of_those_after_it() -> None:
    def run(inputs: Inputs, wants: frozenset[str]) -> Gradients:
        inputs.x[0, 0] = 7.0
        return PLAIN(inputs, wants)
    with pytest.raises(ValueError, match="read-only"):
        validator(SMALL).validate(run)


@pytest.mark.parametrize(("rows", "cap", "expected"), [
    (1, None, (1, 61, 257)), (16, None, (1, 16, 61, 257)), (61, None, (1, 59, 61, 257)), (2048, None, (1, 257, 2039, 2048)),
    (2048, 96 * 64 * 8, (1, 89, 96)), (2048, 10, (1,)),
])
def test_row_counts_and_their_cap(rows: int, cap: int | None, expected: tuple[int, ...]) -> None:
    judge = Validator(Problem(rows, 64, 8), max_multiply_adds=cap)
    spent: list[int] = []

    def run(inputs: Inputs, wants: frozenset[str]) -> Gradients:
        spent.append(inputs.rows * inputs.hidden * inputs.out)
        return PLAIN(inputs, wants)

    verdict = judge.validate(run)
    assert verdict.ok, verdict.reason
    assert verdict.rows == expected
    assert cap is None or max(spent) <= max(cap, 64 * 8)


def test_a_rejection_says_which_row_counts_were_run() -> None:
    assert validator(SMALL).validate(FAULTS["all zero"]).rows == (1,)


def test_references_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(*args: object) -> Gradients:
        calls.append(1)
        return reference(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(tuner.compare, "reference", counted)
    judge = Validator(Problem.of(SMALL))
    assert not calls
    for _ in range(3):
        assert judge.validate(PLAIN).ok
    assert len(calls) == len(judge.probe_rows) + 2


def test_an_error_relative_to_nothing_is_infinite() -> None:
    """With H = 1 dgamma is zero, and so is all it could be relative to."""
    ones = on_other_data_than_the_probe(np.ones_like)
    verdict = Validator(Problem(5, 1, 1, wants=frozenset(("dgamma",)))).validate(ones)
    assert math.isinf(verdict.errors["dgamma"].normwise)


def test_nothing_to_validate_is_refused() -> None:
    with pytest.raises(InputError, match="without rows"):
        Validator(Problem(0, 8, 4))
