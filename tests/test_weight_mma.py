"""What is weight_mma's own: where it takes part, and every way of cutting w and the rows."""

from __future__ import annotations

import numpy as np
import pytest

from codegen.config import Config
from codegen.problem import GRADIENTS, Problem, Shape
from codegen.space import all_configs, valid_configs, why_refused
from codegen.variants import VARIANTS
from tests import cases
from tests.variant_cases import LIMITS, assert_right
from tuner.costmodel import predict
from tuner.executors import Executor
from tuner.inputs import random_inputs

CUT = Shape(1, 70, 100, 150)
"""Several tiles of rows, and several pieces of w both ways, all of them ragged, at any choice."""


def candidates(shape: str, dtype: str = "float32", param_dtype: str = "") -> list[Config]:
    return valid_configs(Problem.of(Shape.parse(shape), dtype=dtype, param_dtype=param_dtype), LIMITS, ["weight_mma"])


@pytest.mark.parametrize(("dtype", "param_dtype"), cases.DATA_TYPES)
def test_it_takes_part_where_rows_are_few_and_w_is_large(dtype: str, param_dtype: str) -> None:
    for shape in ("1,8,768,2304", "1,16,768,2304", "1,64,768,2304", "1,256,768,2304", "1,32,4096,4096"):
        assert 20 <= len(candidates(shape, dtype, param_dtype)) <= 600, shape
    for shape in ("4,4,8,16", "32,16,64,64", "8,1024,768,2304", "1,262144,128,128"):
        assert not candidates(shape, dtype, param_dtype), shape


def test_no_more_than_three_launches_which_read_w_and_write_dw_once() -> None:
    """Scratch memory holds no value of w or dw: nothing in it but dn is as large."""
    for config in candidates("1,16,768,2304"):
        plan = VARIANTS["weight_mma"].plan(Problem(16, 768, 2304), config.as_dict())
        assert len(plan.steps) == len(plan.launches) <= 3
        assert {buffer.name for buffer in plan.workspace if buffer.bytes(16, 132) >= 4 * 768 * 2304} <= {"dn_parts"}
        for gradient in ("db", "dw", "dbeta"):
            alone = VARIANTS["weight_mma"].plan(Problem(16, 768, 2304, wants=frozenset((gradient,))), config.as_dict())
            assert len(alone.launches) <= 2 and alone.workspace_bytes(16, 132) < 4 * 768 * 2304


@pytest.mark.parametrize("shape", ["1,16,768,2304", "1,64,768,2304"])
def test_the_search_starts_from_it_where_rows_are_few(shape: str) -> None:
    problem = Problem.of(Shape.parse(shape))

    def best(variant: str) -> float:
        return min(predict(problem, config, LIMITS).time_us for config in valid_configs(problem, LIMITS, [variant]))

    assert best("weight_mma") < min(best("gemm_mma"), best("gemm_wgmma"))


def sampled(dtype: str, count: int) -> list[Config]:
    """Configs drawn at random from all that can run, worth trying or not."""
    problem = Problem.of(CUT, dtype=dtype)
    runnable = [config for config in all_configs(["weight_mma"]) if why_refused(problem, config, LIMITS) is None]
    rng = np.random.default_rng(len(dtype))
    return [runnable[i] for i in rng.choice(len(runnable), count, replace=False)]


@pytest.mark.parametrize("config", sampled("float32", 10), ids=str)
def test_a_sample_of_all_pieces(executor: Executor, config: Config) -> None:
    assert_right(executor, config, random_inputs(CUT.rows, CUT.hidden, CUT.out))


@pytest.mark.parametrize("config", sampled("bfloat16", 4), ids=str)
def test_a_sample_of_all_pieces_in_16_bits(executor: Executor, config: Config) -> None:
    assert_right(executor, config, random_inputs(CUT.rows, CUT.hidden, CUT.out, dtype="bfloat16", param_dtype="bfloat16"))


@pytest.mark.parametrize("statistics", VARIANTS["weight_mma"].choices["statistics"])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_each_gradient_alone(executor: Executor, gradient: str, statistics: str) -> None:
    config = next(config for config in sampled("float32", 40) if config["statistics"] == statistics)
    assert_right(executor, config, random_inputs(CUT.rows, CUT.hidden, CUT.out), frozenset((gradient,)))
