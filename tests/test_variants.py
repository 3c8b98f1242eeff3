"""Every variant, every reduction, on every executor, on shapes that kernels of this kind have failed on in public."""

from __future__ import annotations

import numpy as np
import pytest

from codegen.config import Config
from codegen.limits import TARGETS, target
from codegen.problem import GRADIENTS, Problem, Shape
from codegen.reduction import columns
from codegen.render import render
from codegen.space import make_config, valid_configs, why_inexact, why_refused
from codegen.variants import VARIANTS
from tests import cases
from tests.configs import ALWAYS_FIT
from tests.variant_cases import (
    EACH,
    LIMITS,
    accuracy_of,
    as_parameters,
    assert_right,
    compiled,
    config_of,
    each_config,
    fitted,
    in_turn,
    is_emulated,
    on_shapes,
)
from tuner.executors import Executor
from tuner.inputs import random_inputs
from tuner.validate import Validator

RAGGED_THIN = [shape for number, shape in enumerate(cases.RAGGED_COVERING) if (number // 6 + number) % 3 == 1]
"""A third of the covering set, with every H, every O and every row count."""

ROW_VARIANTS = [config for config in EACH if not is_emulated(config.variant)]
# All of the set where running a case costs little.
RAGGED = [pair for name in VARIANTS
          for pair in in_turn(cases.RAGGED_COVERING if name.startswith("row_") else RAGGED_THIN, name)]


@as_parameters(RAGGED)
def test_s1_ragged_sizes(host_executor: Executor, shape: Shape, config: Config) -> None:
    assert_right(host_executor, config, random_inputs(shape.rows, shape.hidden, shape.out))


@pytest.mark.cuda
@pytest.mark.parametrize("config", EACH, ids=str)
@pytest.mark.parametrize("shape", cases.RAGGED_ALL, ids=str)
def test_s1_ragged_sizes_full_product(cuda_executor: Executor, shape: Shape, config: Config) -> None:
    chosen = fitted(config, shape)
    if chosen is None:
        assert config.variant not in ALWAYS_FIT
    else:
        assert_right(cuda_executor, chosen, random_inputs(shape.rows, shape.hidden, shape.out))


@pytest.mark.parametrize("shape", [*cases.RAGGED_COVERING, *cases.VERY_LARGE_HIDDEN, *cases.PAST_65535_COLUMNS], ids=str)
def test_some_variant_runs_every_shape(shape: Shape) -> None:
    """Others may refuse it, with a reason: w fits into no shared memory, or a row into no registers."""
    for config in EACH:
        if fitted(config, shape) is None:
            assert config.variant not in ALWAYS_FIT
            assert why_refused(Problem.of(shape), config, LIMITS)


@each_config
def test_s2_only_the_number_of_rows_counts(executor: Executor, config: Config) -> None:
    chosen = fitted(config, cases.SAME_ROWS[0])
    assert chosen is not None
    texts = {render(Problem.of(shape), chosen).text for shape in cases.SAME_ROWS}
    assert len(texts) == 1
    assert_right(executor, chosen, random_inputs(6, 8, 5))


# What numbers blocks and rows is the same at all three; each reduction has one past the edge, each variant all.
PAST_ROWS = [(cases.PAST_65535_ROWS[1], config) for first in ROW_VARIANTS if (config := fitted(first, cases.PAST_65535_ROWS[1]))]
PAST_ROWS += [pair for name in VARIANTS for pair in in_turn(cases.PAST_65535_ROWS, name)]


@as_parameters(list(dict.fromkeys(PAST_ROWS)))
def test_s3_past_65535_rows(executor: Executor, shape: Shape, config: Config) -> None:
    assert_right(executor, config, random_inputs(shape.rows, shape.hidden, shape.out))


@on_shapes(cases.PAST_65535_COLUMNS)
def test_s3_past_65535_columns(executor: Executor, shape: Shape, config: Config) -> None:
    assert_right(executor, config, random_inputs(shape.rows, shape.hidden, shape.out))


@on_shapes(cases.VERY_LARGE_HIDDEN)
def test_s6_very_large_hidden(executor: Executor, shape: Shape, config: Config) -> None:
    assert_right(executor, config, random_inputs(shape.rows, shape.hidden, shape.out))


@each_config
@pytest.mark.parametrize("shape", cases.NO_ROWS, ids=str)
def test_s7_no_rows(executor: Executor, config: Config, shape: Shape) -> None:
    chosen = fitted(config, shape)
    assert chosen is not None
    got = assert_right(executor, chosen, random_inputs(0, shape.hidden, shape.out))
    assert got.dx is not None and got.dx.shape == (0, shape.hidden)
    for name in GRADIENTS[1:]:
        assert not getattr(got, name).any(), name
    assert_right(executor, chosen, random_inputs(3, shape.hidden, shape.out))  # no error was left behind


def sampled(shape: Shape, variant: str, count: int) -> list[Config]:
    """Valid configs of a variant, drawn at random."""
    valid = valid_configs(Problem.of(shape), LIMITS, [variant])
    rng = np.random.default_rng([shape.hidden, shape.out])
    return [valid[i] for i in rng.choice(len(valid), min(count, len(valid)), replace=False)]


ODD_SHAPES = (Shape(1, 300, 6, 7), Shape(3, 7, 5, 7), Shape(1, 40, 6, 5), Shape(1, 77, 7, 3), Shape(1, 9, 31, 13),
              Shape(2, 65, 34, 9))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_a_sample_of_the_whole_space(executor: Executor, shape: Shape, variant: str) -> None:
    inputs = random_inputs(shape.rows, shape.hidden, shape.out)
    for config in sampled(shape, variant, 3 if is_emulated(variant) else 8):
        assert_right(executor, config, inputs)


@pytest.mark.parametrize("reduction", VARIANTS["row_shared"].choices["reduction"])
@pytest.mark.parametrize("tile", VARIANTS["row_shared"].choices["tile"])
def test_every_tile_on_padded_rows(executor: Executor, tile: str, reduction: str) -> None:
    for hidden in (5, 6, 7):
        config = config_of("row_shared", reduction, tile=tile, lanes=4, vector=1)
        assert why_refused(Problem(300, hidden, 7), config, LIMITS) is None
        assert_right(executor, config, random_inputs(300, hidden, 7))


@on_shapes([Shape(1, 14, 16, 32768), Shape(1, 5, 33, 5000)])
def test_sums_over_many_outputs_keep_the_accuracy_class(executor: Executor, shape: Shape, config: Config) -> None:
    """With few rows of every kind of data: that many outputs are sums long enough, and the hard rows' usual number costs most."""
    problem = Problem.of(shape, accuracy=accuracy_of(config))
    assert why_inexact(problem, config) is None
    verdict = Validator(problem, hard_rows=shape.rows).validate(compiled(executor, problem, config).run)
    assert verdict.ok, verdict.reason


def test_offsets_in_a_chain_of_rows_stay_in_32_bits() -> None:
    for hidden, out in ((3_000_000, 2), (2, 3_000_000), (2**31 - 1, 1), (8, 16)):
        assert columns(Problem(10, hidden, out), 128)["CHAIN"] * max(hidden, out) < 2**31


def test_long_float32_chains_are_inexact() -> None:
    atomic = make_config("row_thread")
    assert why_inexact(Problem(4096, 8, 16), atomic) is None
    assert why_inexact(Problem(65536, 8, 16), atomic) is not None
    assert why_inexact(Problem(65536, 8, 16, wants=frozenset({"dx"})), atomic) is None


@pytest.mark.parametrize("arch", TARGETS)
def test_p5_what_a_gpu_cannot_run_is_refused_with_a_reason(arch: str) -> None:
    limits, problem = target(arch), Problem(4096, 256, 192)
    config = config_of("row_shared", "two_pass", threads=512, tile="8x8", grads="identity")
    reason = why_refused(problem, config, limits)
    if limits.shared_per_block < 4 * 256 * 192:
        assert reason is not None and "shared memory" in reason
    for valid in valid_configs(problem, limits)[::29]:
        for launch in render(problem, valid).plan.launches:
            assert launch.shared_bytes <= limits.shared_per_block and launch.block <= limits.max_threads


def test_p5_more_than_48_kb_of_shared_memory(executor: Executor) -> None:
    config = fitted(config_of("row_shared", "two_pass", threads=256), Shape(1, 300, 128, 96))
    assert config is not None
    assert render(Problem(300, 128, 96), config).plan.launches[0].shared_bytes > 48 * 1024
    assert_right(executor, config, random_inputs(300, 128, 96))
