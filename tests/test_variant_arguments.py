"""Every variant with gradients that are not wanted, parameters that are absent and statistics that were saved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from codegen.config import Config
from codegen.problem import ALL_GRADIENTS, GRADIENTS, Problem, Shape
from tests.configs import OF_FLOAT32
from tests.variant_cases import (
    EACH,
    TYPED,
    accuracy_of,
    assert_right,
    compiled,
    each_config,
    fitted,
    is_emulated,
    label,
    problem_of,
)
from tuner.compare import bound_fault
from tuner.executors import Executor
from tuner.inputs import Gradients, Inputs, random_inputs

SHAPE = Shape(1, 37, 20, 12)


ALL = (1 << len(GRADIENTS)) - 1
ONES = [1 << bit for bit in range(len(GRADIENTS))]
MASKS = [(variant, mask) for variant in OF_FLOAT32 for mask in (
    dict.fromkeys([*ONES, *(ALL ^ one for one in ONES), ALL]) if is_emulated(variant) else range(1, ALL + 1))]
"""Which gradients are wanted: every mask; where a variant is emulated, those that have any two wanted or not in every way."""


@pytest.mark.parametrize(("variant", "mask"), MASKS)
def test_every_mask_of_wanted_gradients(executor: Executor, variant: str, mask: int) -> None:
    wants = frozenset(name for bit, name in enumerate(GRADIENTS) if mask >> bit & 1)
    own = [config for config in EACH if config.variant == variant]
    config = fitted(own[mask % len(own)], SHAPE)
    assert config is not None
    inputs = random_inputs(37, 20, 12)
    got = assert_right(executor, config, inputs, wants)
    assert {name for name in GRADIENTS if getattr(got, name) is not None} == wants
    # The kernel of all five gradients, asked for some: null pointers are not written to.
    rest = compiled(executor, problem_of(config, inputs), config).run(inputs, wants)
    assert {name for name in GRADIENTS if getattr(rest, name) is not None} == wants
    assert bound_fault(inputs, rest, wants, accuracy_of(config)) is None
    if config["reduction"] != "atomic" and variant.startswith("row_"):
        for name in wants:
            np.testing.assert_array_equal(getattr(rest, name), getattr(got, name), err_msg=name)


# db may come from the products of G, which dbeta and db alone do not need: by a kernel of their own, and by that of all five.
SUMS_ALONE = [frozenset(names) for names in (("dbeta",), ("db",), ("db", "dbeta"), ("dx", "dbeta"), ("dgamma", "db"))]
IN_EVERY_WAY = [(config, "float32", "float32") for config in EACH if is_emulated(config.variant)]
IN_EVERY_WAY += [case for case in TYPED if is_emulated(case[0].variant) and case[1] == case[2]]


@pytest.mark.parametrize(("config", "dtype", "param_dtype"), [
    pytest.param(*case, id="-".join((label(case[0]), case[1]))) for case in IN_EVERY_WAY])
def test_sums_of_dy_without_products(executor: Executor, config: Config, dtype: str, param_dtype: str) -> None:
    inputs = random_inputs(37, 20, 12, dtype=dtype, param_dtype=param_dtype)
    chosen = fitted(config, SHAPE, dtype, param_dtype)
    assert chosen is not None
    accuracy = accuracy_of(chosen, dtype)
    for wants in SUMS_ALONE:
        rest = compiled(executor, problem_of(chosen, inputs), chosen).run(inputs, wants)
        assert bound_fault(inputs, rest, wants, accuracy) is None, wants
    for wants in SUMS_ALONE[:3]:
        assert_right(executor, chosen, inputs, wants)


@each_config
@pytest.mark.parametrize("absent", ["gamma", "beta", "gamma beta"])
def test_absent_gamma_and_beta(executor: Executor, config: Config, absent: str) -> None:
    inputs = random_inputs(37, 20, 12)
    given = {name: None if name in absent else getattr(inputs, name) for name in ("gamma", "beta")}
    wants = ALL_GRADIENTS - {f"d{name}" for name in absent.split()}
    chosen = fitted(config, SHAPE)
    assert chosen is not None
    assert_right(executor, chosen, Inputs(inputs.dy, inputs.x, given["gamma"], given["beta"], inputs.w, inputs.eps), wants)


@each_config
def test_saved_statistics_are_used(executor: Executor, config: Config) -> None:
    inputs = random_inputs(37, 20, 12)
    chosen = fitted(config, SHAPE)
    assert chosen is not None
    program = compiled(executor, Problem(37, 20, 12, accuracy=accuracy_of(chosen)), chosen)
    mean, variance = inputs.x.mean(1, dtype=np.float64), inputs.x.var(1, dtype=np.float64)
    rstd = 1 / np.sqrt(variance + inputs.eps)
    saved = replace(inputs, mean=mean.astype(np.float32), rstd=rstd.astype(np.float32))
    assert bound_fault(inputs, program.run(saved, ALL_GRADIENTS), accuracy=accuracy_of(chosen)) is None
    # Twice the saved rstd is twice the xhat, and so twice the dgamma; halving it is exact.
    doubled = program.run(replace(saved, rstd=2 * saved.rstd), ALL_GRADIENTS)
    assert bound_fault(inputs, doubled, accuracy=accuracy_of(chosen)) is not None
    assert doubled.dgamma is not None
    halved = Gradients(dgamma=doubled.dgamma / 2)
    assert bound_fault(inputs, halved, frozenset({"dgamma"}), accuracy_of(chosen)) is None
