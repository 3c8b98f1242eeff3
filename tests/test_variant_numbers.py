"""Every variant on data that costs careless kernels their digits, in every arithmetic and data type."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from codegen.config import Config
from codegen.problem import ALL_GRADIENTS, GRADIENTS, Problem, Shape
from codegen.space import why_not
from codegen.tensors import BY_NAME
from codegen.variants import VARIANTS
from tests import cases
from tests.variant_cases import EVERY, LIMITS, accuracy_of, assert_right, compiled, every_config, fitted, typed_configs
from tuner.compare import build_case
from tuner.executors import Executor
from tuner.inputs import Inputs, Repeated, hard_inputs, random_inputs
from tuner.validate import Validator


@every_config
@pytest.mark.parametrize("literal", cases.LITERALS, ids=lambda literal: literal.name)
def test_n1_n3_n4_literal_values(executor: Executor, config: Config, literal: cases.Literal) -> None:
    inputs = literal.inputs
    chosen = fitted(config, Shape(1, inputs.rows, inputs.hidden, inputs.out))
    assert chosen is not None
    got = assert_right(executor, chosen, inputs)
    if accuracy_of(chosen) != "fp32":
        return
    for name, values in literal.expected.items():
        result = getattr(got, name).ravel()[:len(values)]
        # Without rounding in the mean, which kernels carry in two floats, the bound is below 1e-5 of each of these values.
        if name in literal.exact:
            assert result.tolist() == list(values), name
        else:
            np.testing.assert_allclose(result, values, rtol=1e-5, err_msg=name)


def accept(executor: Executor, config: Config, problem: Problem) -> None:
    """The whole validator takes the config."""
    chosen = fitted(config, Shape(1, problem.rows, problem.hidden, problem.out), problem.dtype, problem.param_dtype)
    assert chosen is not None
    verdict = Validator(problem).validate(compiled(executor, problem, chosen).run)
    assert verdict.ok, verdict.reason
    assert set(verdict.errors) == set(GRADIENTS)


@every_config
@pytest.mark.parametrize("shape", cases.VALIDATED[:2], ids=str)
def test_v1_the_whole_validator_accepts(executor: Executor, config: Config, shape: Shape) -> None:
    accept(executor, config, Problem.of(shape, accuracy=accuracy_of(config)))


@pytest.mark.cuda
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", cases.VALIDATED[2:], ids=str)
def test_v1_the_whole_validator_accepts_large_shapes(cuda_executor: Executor, variant: str, shape: Shape) -> None:
    """Of those configs that are candidates there."""
    for config in (config for config in EVERY if config.variant == variant):
        problem = Problem.of(shape, accuracy=accuracy_of(config))
        chosen = fitted(config, shape)
        if chosen is not None and why_not(problem, chosen, LIMITS) is None:
            accept(cuda_executor, chosen, problem)


@typed_configs
def test_n9_16_bit_data_is_accumulated_in_float32(executor: Executor, config: Config, dtype: str, param_dtype: str) -> None:
    accept(executor, config, Problem(142, 229, 33, dtype, param_dtype=param_dtype))


@typed_configs
def test_n9_results_have_the_data_types_of_their_tensors(executor: Executor, config: Config, dtype: str,
                                                         param_dtype: str) -> None:
    got = assert_right(executor, config, random_inputs(300, 40, 24, dtype=dtype, param_dtype=param_dtype))
    for name, array in got.present().items():
        assert array.dtype.name == BY_NAME[name].dtype(dtype, param_dtype), name


@every_config
def test_hard_rows(executor: Executor, config: Config) -> None:
    chosen = fitted(config, Shape(1, 131, 48, 24))
    assert chosen is not None
    assert_right(executor, chosen, hard_inputs(131, 48, 24))


@typed_configs
def test_hard_rows_in_16_bits(executor: Executor, config: Config, dtype: str, param_dtype: str) -> None:
    chosen = fitted(config, Shape(1, 131, 48, 24), dtype, param_dtype)
    assert chosen is not None
    assert_right(executor, chosen, hard_inputs(131, 48, 24, dtype=dtype, param_dtype=param_dtype))


def adversarial(name: str) -> Inputs:
    """Data on which products of scaled or split values lose digits where ordinary float32 ones do not."""
    base = random_inputs(300, 40, 24)
    rng = np.random.default_rng(7)
    if name == "large mean":
        return replace(base, x=base.x + np.float32(1000.0))
    if name == "constant rows":
        x = base.x.copy()
        x[::2] = x[::2, :1]
        return replace(base, x=x)
    if name == "gradients of 1e-7":
        return replace(base, dy=base.dy * np.float32(1e-7))
    decades = rng.uniform(-12.0, 0.0, base.dy.shape if name == "dy over 12 decades" else (len(base.dy), 1))
    return replace(base, dy=(base.dy * 10.0 ** decades).astype(np.float32))


@every_config
@pytest.mark.parametrize("name", ["large mean", "constant rows", "dy over 12 decades", "rows of dy over 12 decades",
                                  "gradients of 1e-7"])
def test_adversarial_rows_stay_inside_the_class(executor: Executor, config: Config, name: str) -> None:
    """Normwise and element by element, relative to the gradients that this data has."""
    inputs = adversarial(name)
    accuracy = accuracy_of(config)
    problem = Problem(inputs.rows, inputs.hidden, inputs.out, accuracy=accuracy)
    got = compiled(executor, problem, config).run(inputs, ALL_GRADIENTS)
    # With a mean of 1000 and a deviation near 1, no float32 mean is better than 3e-5 of the deviation.
    normwise = name != "large mean"
    case = build_case(name, Repeated(inputs, np.ones(inputs.rows, np.int8)), ALL_GRADIENTS, accuracy, inputs=inputs,
                      normwise=normwise)
    assert case.judge(got).reason is None
