"""Every variant on data that costs careless kernels their digits, in every arithmetic and data type."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from codegen.config import Config
from codegen.problem import ALL_GRADIENTS, GRADIENTS, Problem, Shape
from codegen.space import why_not
from codegen.tensors import BY_NAME
from tests import cases
from tests.adversarial import KINDS, adversarial_inputs
from tests.configs import OF_FLOAT32
from tests.variant_cases import (
    EVERY,
    LIMITS,
    SINGLY,
    accuracy_of,
    as_parameters,
    assert_right,
    compiled,
    every_config,
    fitted,
    label,
    narrowed,
    other_way,
    problem_of,
    singly_changed,
    typed_configs,
)
from tuner.compare import build_case
from tuner.executors import Executor
from tuner.inputs import Repeated, hard_inputs, random_inputs
from tuner.validate import Validator


@singly_changed
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
    """The whole validator takes the config, at fewer columns where its variant takes no more."""
    shape = narrowed(Shape(1, problem.rows, problem.hidden, problem.out), config.variant)
    problem = replace(problem, hidden=shape.hidden, out=shape.out)
    chosen = fitted(config, shape, problem.dtype, problem.param_dtype)
    assert chosen is not None
    verdict = Validator(problem).validate(compiled(executor, problem, chosen).run)
    assert verdict.ok, verdict.reason
    assert set(verdict.errors) == set(GRADIENTS)


@as_parameters([*((cases.VALIDATED[0], config) for config in EVERY), *((cases.VALIDATED[1], config) for config in SINGLY)])
def test_v1_the_whole_validator_accepts(executor: Executor, shape: Shape, config: Config) -> None:
    accept(executor, config, Problem.of(shape, accuracy=accuracy_of(config)))


def candidates(shape: Shape) -> list[Config]:
    """What EVERY becomes on a large shape, of what is worth trying there."""
    fits = ((fitted(config, shape), Problem.of(shape, accuracy=accuracy_of(config))) for config in EVERY)
    return [config for config, problem in fits if config is not None and why_not(problem, config, LIMITS) is None]


LARGE = [(shape, config) for shape in cases.VALIDATED[2:] for config in dict.fromkeys(candidates(shape))]


@pytest.mark.cuda
@as_parameters(LARGE)
def test_v1_the_whole_validator_accepts_large_shapes(cuda_executor: Executor, shape: Shape, config: Config) -> None:
    accept(cuda_executor, config, Problem.of(shape, accuracy=accuracy_of(config)))


@pytest.mark.parametrize(("shape", "without"), [
    # w takes more than there is on chip, or rows are too many
    (cases.VALIDATED[2], {"row_shared", "weight_stream", "weight_ahead", "weight_mma", "tile_mma", "tile_wgmma"}),
    (cases.VALIDATED[3], {"weight_stream", "weight_ahead", "weight_mma"}),
], ids=[str(shape) for shape in cases.VALIDATED[2:]])
def test_v1_few_variants_are_no_candidates_for_large_shapes(shape: Shape, without: set[str]) -> None:
    assert set(OF_FLOAT32) - {config.variant for on, config in LARGE if on == shape} == without


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
    chosen = fitted(config, Shape(1, 131, 40, 24))
    assert chosen is not None
    assert_right(executor, chosen, hard_inputs(131, 40, 24))


@typed_configs
def test_hard_rows_in_16_bits(executor: Executor, config: Config, dtype: str, param_dtype: str) -> None:
    chosen = fitted(config, Shape(1, 131, 40, 24), dtype, param_dtype)
    assert chosen is not None
    assert_right(executor, chosen, hard_inputs(131, 40, 24, dtype=dtype, param_dtype=param_dtype))


@pytest.mark.parametrize("config", [config for config in EVERY if config in SINGLY or other_way(config)], ids=label)
@pytest.mark.parametrize("kind", KINDS)
def test_adversarial_rows_stay_inside_the_class(executor: Executor, config: Config, kind: str) -> None:
    """Normwise and element by element, relative to the gradients that this data has."""
    inputs = adversarial_inputs(kind, 300, 40, 24)
    problem = problem_of(config, inputs)
    case = build_case(kind, Repeated(inputs, np.ones(inputs.rows, np.int8)), ALL_GRADIENTS, problem.accuracy, inputs=inputs,
                      normwise=True)
    assert case.judge(compiled(executor, problem, config).run(inputs, ALL_GRADIENTS)).reason is None
