"""Every variant, every reduction, on every executor: the cases that kernels of this kind have failed in public."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from codegen.config import Config, Value
from codegen.limits import TARGETS, target
from codegen.problem import ALL_GRADIENTS, GRADIENTS, Problem, Shape
from codegen.reduction import columns
from codegen.render import render
from codegen.space import make_config, valid_configs, why_inexact, why_refused
from codegen.variants import VARIANTS
from tests import cases
from tuner.compare import bound_fault, build_case
from tuner.executors import Executor, Program
from tuner.inputs import Gradients, Inputs, Repeated, hard_inputs, random_inputs
from tuner.validate import Validator

LIMITS = target("sm_90")

# Small values of each parameter, so that small shapes still make several blocks, tiles and splits.
SMALL: dict[str, dict[str, Value]] = {
    "row_thread": {"threads": 32},
    "row_warp": {"warps": 2, "rows": 2},
    "row_shared": {"threads": 64, "lanes": 32, "rows": 1, "tile": "4x4"},
}


def config_of(variant: str, reduction: str, **values: Value) -> Config:
    """A config of that variant and reduction with values that go together; `values` override."""
    splits = 16 if reduction in ("atomic", "two_pass") and (variant, reduction) != ("row_thread", "atomic") else 1
    chosen: dict[str, Value] = {**SMALL[variant], "reduction": reduction, "splits": splits}
    if "grads" in VARIANTS[variant].choices:
        chosen["grads"] = "identity" if reduction in ("column_blocks", "two_pass") else "direct"
    return make_config(variant, {**chosen, **values})


VARIANTS_AND_REDUCTIONS = [(name, str(reduction)) for name, variant in VARIANTS.items()
                           for reduction in variant.choices["reduction"]]
EVERY = [pytest.param(config_of(*pair), id="-".join(pair)) for pair in VARIANTS_AND_REDUCTIONS]
EVERY_DETERMINISTIC = [pytest.param(config_of(*pair), id="-".join(pair)) for pair in VARIANTS_AND_REDUCTIONS
                       if pair[1] != "atomic"]


def fitted(config: Config, shape: Shape) -> Config | None:
    """The config where it can run the shape; else the nearest of its variant and reduction that can; None where none can.

    A test that gets None has nothing to run; `test_only_row_shared_is_ever_out_of_room` says when that may be.
    """
    problem = Problem.of(shape)
    changes: list[dict[str, Value]] = [
        {}, {"splits": 4}, {"grads": "identity"}, {"lanes": 4}, {"lanes": 4, "threads": 128}, {"threads": 256}, {"threads": 512},
        {"threads": 256, "grads": "identity"}, {"threads": 512, "tile": "8x4", "grads": "identity"}]
    for change in changes:
        known = {name: value for name, value in change.items() if name in VARIANTS[config.variant].choices}
        if known.get("splits") and config["splits"] == 1:
            continue
        candidate = make_config(config.variant, {**config.as_dict(), **known})
        if why_refused(problem, candidate, LIMITS) is None:
            return candidate
    return None


@cache
def _programs(executor: Executor) -> dict[tuple[int, int, frozenset[str], Config], Program]:
    return {}


def compiled(executor: Executor, problem: Problem, config: Config) -> Program:
    """The program of a config; kept, as a source does not depend on the row count."""
    programs = _programs(executor)
    key = (problem.hidden, problem.out, problem.wants, config)
    if key not in programs:
        programs[key] = executor.compile(render(problem, config))
    return programs[key]


def assert_right(executor: Executor, config: Config, inputs: Inputs, wants: frozenset[str] = ALL_GRADIENTS) -> Gradients:
    """Runs the config and holds each element against its bound."""
    problem = Problem(inputs.rows, inputs.hidden, inputs.out, wants=wants)
    got = compiled(executor, problem, config).run(inputs, wants)
    fault = bound_fault(inputs, got, wants)
    assert fault is None, f"{config}: {fault}"
    return got


# --- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", EVERY)
@pytest.mark.parametrize("literal", cases.LITERALS, ids=lambda literal: literal.name)
def test_n1_n3_n4_literal_values(executor: Executor, config: Config, literal: cases.Literal) -> None:
    inputs = literal.inputs
    chosen = fitted(config, Shape(1, inputs.rows, inputs.hidden, inputs.out))
    assert chosen is not None
    got = assert_right(executor, chosen, inputs)
    for name, values in literal.expected.items():
        result = getattr(got, name).ravel()[:len(values)]
        # Without rounding in the mean, which kernels carry in two floats, the bound is below 1e-5 of each of these values.
        if name in literal.exact:
            assert result.tolist() == list(values), name
        else:
            np.testing.assert_allclose(result, values, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("config", EVERY)
@pytest.mark.parametrize("shape", [Shape(4, 4, 8, 16), Shape(2, 71, 229, 33)], ids=str)
def test_the_whole_validator_accepts(executor: Executor, config: Config, shape: Shape) -> None:
    chosen = fitted(config, shape)
    assert chosen is not None
    problem = Problem.of(shape)
    verdict = Validator(problem).validate(compiled(executor, problem, chosen).run)
    assert verdict.ok, verdict.reason
    assert set(verdict.errors) == set(GRADIENTS)


@pytest.mark.parametrize("config", EVERY)
def test_hard_rows(executor: Executor, config: Config) -> None:
    chosen = fitted(config, Shape(1, 131, 48, 24))
    assert chosen is not None
    assert_right(executor, chosen, hard_inputs(131, 48, 24))


# --- shapes ------------------------------------------------------------------------------------------------------


def with_every_config(shapes: Sequence[Shape]) -> pytest.MarkDecorator:
    """Each shape with the config of each variant and reduction that can run it."""
    pairs = [(shape, chosen, f"{shape}-{'-'.join(pair)}") for shape in shapes for pair in VARIANTS_AND_REDUCTIONS
             if (chosen := fitted(config_of(*pair), shape)) is not None]
    return pytest.mark.parametrize(("shape", "config"), [pytest.param(shape, config, id=name) for shape, config, name in pairs])


@with_every_config(cases.RAGGED_COVERING)
def test_s1_ragged_sizes(host_executor: Executor, shape: Shape, config: Config) -> None:
    assert_right(host_executor, config, random_inputs(shape.rows, shape.hidden, shape.out))


@pytest.mark.cuda
@with_every_config(cases.RAGGED_ALL)
def test_s1_ragged_sizes_full_product(cuda_executor: Executor, shape: Shape, config: Config) -> None:
    assert_right(cuda_executor, config, random_inputs(shape.rows, shape.hidden, shape.out))


def test_only_row_shared_is_ever_out_of_room() -> None:
    """Where a ragged case has no config, w fits no shared memory or a row no registers; the other variants run every shape."""
    for shape, (variant, reduction) in product(cases.RAGGED_ALL, VARIANTS_AND_REDUCTIONS):
        if fitted(config_of(variant, reduction), shape) is None:
            assert variant == "row_shared", (shape, variant, reduction)
            assert shape.hidden * shape.out > 32 * 512 or shape.hidden > 2000, (shape, reduction)


@pytest.mark.parametrize("config", EVERY)
def test_s2_only_the_number_of_rows_counts(executor: Executor, config: Config) -> None:
    chosen = fitted(config, cases.SAME_ROWS[0])
    assert chosen is not None
    texts = {render(Problem.of(shape), chosen).text for shape in cases.SAME_ROWS}
    assert len(texts) == 1
    assert_right(executor, chosen, random_inputs(6, 8, 5))


@pytest.mark.parametrize("config", EVERY)
@pytest.mark.parametrize("shape", cases.PAST_65535_ROWS, ids=str)
def test_s3_past_65535_rows(executor: Executor, config: Config, shape: Shape) -> None:
    chosen = fitted(config, shape)
    assert chosen is not None
    assert_right(executor, chosen, random_inputs(shape.rows, shape.hidden, shape.out))


@with_every_config(cases.PAST_65535_COLUMNS)
def test_s3_past_65535_columns(executor: Executor, shape: Shape, config: Config) -> None:
    assert_right(executor, config, random_inputs(shape.rows, shape.hidden, shape.out))


@with_every_config(cases.VERY_LARGE_HIDDEN)
def test_s6_very_large_hidden(executor: Executor, shape: Shape, config: Config) -> None:
    assert_right(executor, config, random_inputs(shape.rows, shape.hidden, shape.out))


def sampled(shape: Shape, count: int) -> list[Config]:
    """Valid configs of the shape, drawn from each variant alike."""
    valid = valid_configs(Problem.of(shape), LIMITS)
    rng = np.random.default_rng([shape.hidden, shape.out])
    configs = []
    for name in VARIANTS:
        own = [config for config in valid if config.variant == name]
        configs += [own[i] for i in rng.choice(len(own), min(count, len(own)), replace=False)]
    return configs


ODD_SHAPES = (Shape(1, 300, 6, 7), Shape(3, 7, 5, 7), Shape(1, 40, 6, 5), Shape(1, 77, 7, 3), Shape(1, 9, 31, 13),
              Shape(2, 65, 34, 9))


@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_a_sample_of_the_whole_space(executor: Executor, shape: Shape) -> None:
    inputs = random_inputs(shape.rows, shape.hidden, shape.out)
    for config in sampled(shape, 8):
        assert_right(executor, config, inputs)


@pytest.mark.parametrize("reduction", VARIANTS["row_shared"].choices["reduction"])
@pytest.mark.parametrize("tile", VARIANTS["row_shared"].choices["tile"])
def test_every_tile_on_padded_rows(executor: Executor, tile: str, reduction: str) -> None:
    for hidden in (5, 6, 7):
        config = config_of("row_shared", reduction, tile=tile, lanes=4, vector=1)
        assert why_refused(Problem(300, hidden, 7), config, LIMITS) is None
        assert_right(executor, config, random_inputs(300, hidden, 7))


@with_every_config([Shape(1, 14, 16, 32768), Shape(1, 5, 33, 5000)])
def test_sums_over_many_outputs_keep_the_accuracy_class(executor: Executor, shape: Shape, config: Config) -> None:
    problem = Problem.of(shape)
    assert why_inexact(problem, config) is None
    verdict = Validator(problem).validate(compiled(executor, problem, config).run)
    assert verdict.ok, verdict.reason


def test_offsets_in_a_chain_of_rows_stay_in_32_bits() -> None:
    for hidden, out in ((3_000_000, 2), (2, 3_000_000), (2**31 - 1, 1), (8, 16)):
        assert columns(Problem(10, hidden, out), 128)["CHAIN"] * max(hidden, out) < 2**31


def test_long_float32_chains_are_inexact() -> None:
    atomic = make_config("row_thread")
    assert why_inexact(Problem(4096, 8, 16), atomic) is None
    assert why_inexact(Problem(65536, 8, 16), atomic) is not None
    assert why_inexact(Problem(65536, 8, 16, wants=frozenset({"dx"})), atomic) is None


@pytest.mark.parametrize("config", EVERY)
@pytest.mark.parametrize("shape", cases.NO_ROWS, ids=str)
def test_s7_no_rows(executor: Executor, config: Config, shape: Shape) -> None:
    chosen = fitted(config, shape)
    assert chosen is not None
    got = assert_right(executor, chosen, random_inputs(0, shape.hidden, shape.out))
    assert got.dx is not None and got.dx.shape == (0, shape.hidden)
    for name in GRADIENTS[1:]:
        assert not getattr(got, name).any(), name
    assert_right(executor, chosen, random_inputs(3, shape.hidden, shape.out))  # no error was left behind


@pytest.mark.parametrize("arch", TARGETS)
def test_p5_what_a_gpu_cannot_run_is_refused_with_a_reason(arch: str) -> None:
    limits, problem = target(arch), Problem(4096, 256, 192)
    config = config_of("row_shared", "two_pass", threads=512, tile="8x8", grads="identity")
    reason = why_refused(problem, config, limits)
    if limits.shared_per_block < 4 * 256 * 192:
        assert reason is not None and "shared memory" in reason
    for valid in valid_configs(problem, limits)[::7]:
        for launch in render(problem, valid).plan.launches:
            assert launch.shared_bytes <= limits.shared_per_block and launch.block <= limits.max_threads


def test_p5_more_than_48_kb_of_shared_memory(executor: Executor) -> None:
    config = fitted(config_of("row_shared", "two_pass", threads=256), Shape(1, 300, 128, 96))
    assert config is not None
    assert render(Problem(300, 128, 96), config).plan.launches[0].shared_bytes > 48 * 1024
    assert_right(executor, config, random_inputs(300, 128, 96))


# --- wanted gradients, absent parameters, saved statistics -------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mask", range(1, 32))
def test_every_mask_of_wanted_gradients(executor: Executor, variant: str, mask: int) -> None:
    wants = frozenset(name for bit, name in enumerate(GRADIENTS) if mask >> bit & 1)
    reduction = ("two_pass", "atomic", "single_block")[mask % 3]
    config = fitted(config_of(variant, reduction), Shape(1, 37, 20, 12))
    assert config is not None
    inputs = random_inputs(37, 20, 12)
    got = assert_right(executor, config, inputs, wants)
    assert {name for name in GRADIENTS if getattr(got, name) is not None} == wants
    # The kernel of all five gradients, asked for some: null pointers are not written to.
    rest = compiled(executor, Problem(37, 20, 12), config).run(inputs, wants)
    assert {name for name in GRADIENTS if getattr(rest, name) is not None} == wants
    if reduction != "atomic":
        for name in wants:
            np.testing.assert_array_equal(getattr(rest, name), getattr(got, name), err_msg=name)


@pytest.mark.parametrize("config", EVERY)
@pytest.mark.parametrize("absent", ["gamma", "beta", "gamma beta"])
def test_absent_gamma_and_beta(executor: Executor, config: Config, absent: str) -> None:
    inputs = random_inputs(37, 20, 12)
    given = {name: None if name in absent else getattr(inputs, name) for name in ("gamma", "beta")}
    wants = ALL_GRADIENTS - {f"d{name}" for name in absent.split()}
    chosen = fitted(config, Shape(1, 37, 20, 12))
    assert chosen is not None
    assert_right(executor, chosen, Inputs(inputs.dy, inputs.x, given["gamma"], given["beta"], inputs.w, inputs.eps), wants)


@pytest.mark.parametrize("config", EVERY)
def test_saved_statistics_are_used(executor: Executor, config: Config) -> None:
    inputs = random_inputs(37, 20, 12)
    chosen = fitted(config, Shape(1, 37, 20, 12))
    assert chosen is not None
    program = compiled(executor, Problem(37, 20, 12), chosen)
    mean, variance = inputs.x.mean(1, dtype=np.float64), inputs.x.var(1, dtype=np.float64)
    rstd = 1 / np.sqrt(variance + inputs.eps)
    saved = replace(inputs, mean=mean.astype(np.float32), rstd=rstd.astype(np.float32))
    assert bound_fault(inputs, program.run(saved, ALL_GRADIENTS)) is None
    # Twice the saved rstd is twice the xhat, and so twice the dgamma.
    doubled = program.run(replace(saved, rstd=2 * saved.rstd), ALL_GRADIENTS)
    once = program.run(saved, ALL_GRADIENTS)
    np.testing.assert_allclose(doubled.dgamma, 2 * once.dgamma, rtol=1e-5, atol=1e-5)
    assert bound_fault(inputs, doubled) is not None


# --- reductions --------------------------------------------------------------------------------------------------


def widths(variant: str, hidden: int) -> list[Config]:
    """A config for every combination of the parameters that set how many threads share a sum, as far as they suit the length."""
    choices = VARIANTS[variant].choices
    names = [name for name in ("threads", "warps", "lanes", "vector") if name in choices]
    combinations = (dict(zip(names, values, strict=True)) for values in product(*(choices[name] for name in names)))
    configs = (config_of(variant, "two_pass", **values) for values in combinations)
    return [config for config in configs if why_refused(Problem(5, hidden, 3), config, LIMITS) is None]


@pytest.mark.parametrize(("variant", "hidden"), list(product(VARIANTS, cases.REDUCED_HIDDEN)))
def test_r1_every_width_of_a_reduction(executor: Executor, variant: str, hidden: int) -> None:
    configs = widths(variant, hidden)
    assert configs
    for config in configs:
        assert_right(executor, config, cases.counting_inputs(hidden))


@pytest.mark.parametrize("config", EVERY)
def test_r2_the_order_of_threads_does_not_matter(host_executor: Executor, config: Config) -> None:
    shape = cases.BARRIERS
    chosen = fitted(config, shape)
    assert chosen is not None
    inputs = random_inputs(shape.rows, shape.hidden, shape.out)
    program = compiled(host_executor, Problem.of(shape), chosen)
    results = [program.run(inputs, ALL_GRADIENTS, order=order)  # type: ignore[call-arg]
               for order in ("forward", "reverse", "shuffled:1")]
    for name, other in product(GRADIENTS, results[1:]):
        first, second = getattr(results[0], name), getattr(other, name)
        if chosen["reduction"] == "atomic" and name != "dx":
            np.testing.assert_allclose(first, second, rtol=0, atol=2e-6 * np.abs(first).max(), err_msg=name)
        else:
            np.testing.assert_array_equal(first, second, err_msg=name)
    assert_right(host_executor, chosen, inputs)


@pytest.mark.cuda
@pytest.mark.parametrize("config", EVERY)
def test_r2_a_hundred_runs_on_many_rows(cuda_executor: Executor, config: Config) -> None:
    shape = cases.BARRIERS_LARGE
    changes: dict[str, Value] = {"warps": 4} if config.variant == "row_warp" else {}
    chosen = fitted(make_config(config.variant, {**config.as_dict(), **changes}), shape)
    if chosen is None:
        assert config.variant == "row_shared"
        shape = Shape(1, 8192, 256, 64)
        chosen = fitted(make_config(config.variant, {**config.as_dict(), "threads": 256}), shape)
    assert chosen is not None
    inputs = random_inputs(shape.rows, shape.hidden, shape.out)
    program = compiled(cuda_executor, Problem.of(shape), chosen)
    case = build_case("data", Repeated(inputs, np.ones(inputs.rows, np.int8)), ALL_GRADIENTS, "fp32", inputs=inputs)
    for _ in range(100 if chosen.variant != "row_thread" else 5):  # a row_thread of this size takes a second
        reason = case.judge(program.run(inputs, ALL_GRADIENTS)).reason
        assert reason is None, reason


@pytest.mark.parametrize("config", EVERY)
def test_r3_outputs_are_set_and_not_added_to(executor: Executor, config: Config) -> None:
    chosen = fitted(config, Shape(1, 100, 24, 16))
    assert chosen is not None
    inputs = random_inputs(100, 24, 16)
    program = compiled(executor, Problem(100, 24, 16), chosen)
    for _ in range(2):
        got = program.run(inputs, ALL_GRADIENTS, prefill=7.0)  # type: ignore[call-arg]
        assert bound_fault(inputs, got) is None


@pytest.mark.parametrize("config", EVERY_DETERMINISTIC)
def test_r3_deterministic_kernels_repeat_their_bits(executor: Executor, config: Config) -> None:
    chosen = fitted(config, Shape(1, 300, 40, 24))
    assert chosen is not None
    assert why_refused(Problem(300, 40, 24, deterministic=True), chosen, LIMITS) is None
    inputs = random_inputs(300, 40, 24)
    program = compiled(executor, Problem(300, 40, 24), chosen)
    first = program.run(inputs, ALL_GRADIENTS)
    for _ in range(19):
        again = program.run(inputs, ALL_GRADIENTS)
        for name in GRADIENTS:
            np.testing.assert_array_equal(getattr(first, name), getattr(again, name), err_msg=name)
