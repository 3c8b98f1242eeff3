"""A config of every variant, reduction and arithmetic, and running it. What a new variant offers is found by itself.

The tests of kernels draw from these:

    EACH   every variant of float32 data with every reduction, in the arithmetic of its defaults
    EVERY  the same in every arithmetic; float32, each held to the accuracy class that its arithmetic can meet
    SINGLY EACH, and each arithmetic with one reduction and in one way: where arithmetic and reduction meet nowhere but in sums
    TYPED  every variant with every reduction on 16-bit data, with parameters of both types
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from codegen.config import Config, Value
from codegen.dtypes import ACCURACIES, CLASS_ERRORS, OWN_CLASS
from codegen.limits import target
from codegen.problem import ALL_GRADIENTS, Problem, Shape
from codegen.render import render
from codegen.space import make_config, nearest_runnable, why_inexact
from codegen.variants import VARIANTS
from tests import cases
from tests.configs import OF_FLOAT32
from tuner.compare import bound_fault
from tuner.executors import Executor, Program
from tuner.inputs import Gradients, Inputs

LIMITS = target("sm_90")
SMALL_SHAPE = Shape(1, 300, 40, 24)

# Small values of each parameter, so that small shapes still make several blocks, tiles and splits. What stands here or in a
# variant's defaults and does not go together is changed as little as possible.
SMALL: dict[str, dict[str, Value]] = {
    "row_thread": {"threads": 32, "splits": 16},
    "row_warp": {"warps": 2, "rows": 2, "splits": 16},
    "row_shared": {"threads": 64, "lanes": 32, "rows": 1, "tile": "4x4", "splits": 16},
    "weight_stream": {"threads": 64, "rows": 2, "outs": 8, "unroll": 2},
    "weight_ahead": {"threads": 128, "across": 32, "rows": 2, "outs": 16, "unroll": 4},
    "tile_mma": {"rows": 32, "warps": 4, "stages": 2},
    "weight_mma": {"rows": 16, "outs": 32, "columns": 32, "warp_outs": 16, "blocks": 1},
    "gemm_mma": {"tile": "64x64", "warps": "2x2", "depth": 32, "stages": 2, "parts": 2, "group": 4},
    "gemm_wgmma": {"tile": "64x64", "groups": 1, "stages": 2, "parts": 2, "group": 4},
    "tile_wgmma": {"teams": 2, "stages": 3},
}

LONG_ROWS = 4096
LONG: dict[str, dict[str, Value]] = {"weight_ahead": {"across": 128}, "weight_stream": {"threads": 256}}
"""For rows longer than LONG_ROWS, where every block of SMALL's few columns would look at all of each row."""

OTHER_WAYS: dict[str, list[dict[str, Value]]] = {
    "weight_ahead": [{"waiting": "shared", "stores": "streaming", "launches": "overlapped"}],
    "weight_mma": [{"statistics": "block", "rows": 32, "outs": 64, "columns": 64, "warp_outs": 32, "blocks": 1}],
    "gemm_mma": [{"finish": "epilogue"}, {"split": "loop"}, {"split": "fragments"}],
    "gemm_wgmma": [{"finish": "epilogue", "groups": 2, "tile": "128x64", "depth": 32}, {"split": "fragments"},
                   {"split": "none", "halved": 8}]}
"""Parameters that change what a variant's kernels do, not only how much at once: beside the defaults, with one reduction each."""

NARROW = {"tile_wgmma": 101, "tile_cluster": 101}
"""Columns of x and of dy, as many as there can be where a variant takes no more than 128."""

KEPT = ("reduction", "arithmetic", "split")
"""What a config must keep when it is changed to fit a shape."""


def config_of(variant: str, reduction: str, arithmetic: Value | None = None, dtype: str = "float32", **values: Value) -> Config:
    """A config of that variant, reduction and arithmetic (None: that of its defaults) that goes together; `values` override."""
    found = _config(variant, reduction, arithmetic, dtype)
    assert found is not None, f"{variant} cannot use reduction={reduction}"
    return make_config(variant, {**found.as_dict(), **values})


@cache
def _config(variant: str, reduction: str, arithmetic: Value | None, dtype: str) -> Config | None:
    choices = VARIANTS[variant].choices
    chosen: dict[str, Value] = {**SMALL.get(variant, {}), "reduction": reduction}
    if arithmetic is not None:
        chosen["arithmetic"] = arithmetic
    if "grads" in choices:
        chosen["grads"] = "identity" if reduction in ("column_blocks", "two_pass") else "direct"
    return fitted(make_config(variant, chosen), SMALL_SHAPE, dtype, kept=("reduction", "arithmetic"))


@cache
def fitted(config: Config, shape: Shape, dtype: str = "float32", param_dtype: str = "",
           deterministic: bool = False, kept: tuple[str, ...] = KEPT) -> Config | None:
    """The config where it can run the shape; else the nearest of its variant, reduction and arithmetic that can; None: none.

    A test that gets None has nothing to run; `test_some_variant_runs_every_shape` says of which variants that may be.
    """
    problem = Problem.of(shape, dtype=dtype, param_dtype=param_dtype, accuracy=coarsest(dtype), deterministic=deterministic)
    if shape.hidden > LONG_ROWS:
        config = make_config(config.variant, {**config.as_dict(), **LONG.get(config.variant, {})})
    return nearest_runnable(problem, config, LIMITS, kept)


def narrowed(shape: Shape, variant: str) -> Shape:
    """The shape; with fewer columns where the variant takes no more."""
    most = NARROW.get(variant, max(shape.hidden, shape.out))
    return replace(shape, hidden=min(shape.hidden, most), out=min(shape.out, most))


def coarsest(dtype: str) -> str:
    """The accuracy class in which no arithmetic is too coarse for the data type."""
    return classes(dtype)[-1]


def classes(dtype: str) -> list[str]:
    """The accuracy classes that results of the data type can meet, finest first."""
    finest = CLASS_ERRORS[OWN_CLASS[dtype]]
    return sorted((name for name in ACCURACIES if CLASS_ERRORS[name] >= finest), key=CLASS_ERRORS.__getitem__)


@cache
def accuracy_of(config: Config, dtype: str = "float32") -> str:
    """The finest accuracy class that the config's arithmetic can meet, by its own account."""
    return next(name for name in classes(dtype) if why_inexact(Problem(8, 8, 8, dtype, accuracy=name), config) is None)


def is_emulated(variant: str) -> bool:
    """Whether its kernels use the tensor cores, whose work costs a CPU a hundred times what ordinary products do."""
    return "arithmetic" in VARIANTS[variant].choices


def pairs(variant: str) -> list[tuple[str, Value | None]]:
    """The reductions of a variant, each with the arithmetic of the defaults."""
    return [(str(reduction), None) for reduction in VARIANTS[variant].choices["reduction"]]


def triples(variant: str, dtype: str) -> list[tuple[str, Value | None]]:
    """The reductions of a variant with each arithmetic there is for the data type."""
    every = product(VARIANTS[variant].choices["reduction"], VARIANTS[variant].choices.get("arithmetic", (None,)))
    return [(str(reduction), arithmetic) for reduction, arithmetic in every
            if _config(variant, str(reduction), arithmetic, dtype) is not None]


def label(config: Config) -> str:
    """A config as part of a test's name."""
    parts = [config.variant, str(config["reduction"])]
    if is_emulated(config.variant):
        parts.append(str(config["arithmetic"]))
    return "-".join([*parts, *other_way(config)])


def other_way(config: Config) -> list[str]:
    """What is not as in the variant's defaults of what OTHER_WAYS names."""
    names = dict.fromkeys(name for values in OTHER_WAYS.get(config.variant, ()) for name in values)
    return [str(config[name]) for name in names if config[name] != VARIANTS[config.variant].defaults[name]]


def in_other_ways(config: Config, dtype: str = "float32") -> list[Config]:
    """The config, and where its reduction is that of the variant's defaults also in the other ways there are for it."""
    ways = OTHER_WAYS.get(config.variant, []) if config["reduction"] == VARIANTS[config.variant].defaults["reduction"] else []
    others = (in_way(config, values, dtype) for values in ways)
    return list(dict.fromkeys([config, *(other for other in others if other is not None)]))


def in_way(config: Config, values: dict[str, Value], dtype: str = "float32") -> Config | None:
    """The config with these values, and otherwise as near to it as goes together with them; None: none does."""
    problem = Problem.of(SMALL_SHAPE, dtype=dtype, accuracy=coarsest(dtype))
    return nearest_runnable(problem, make_config(config.variant, {**config.as_dict(), **values}), LIMITS, (*KEPT, *values))


EACH = [config for name in OF_FLOAT32 for pair in pairs(name) for config in in_other_ways(config_of(name, *pair))]
EVERY = [config for name in VARIANTS for triple in triples(name, "float32") for config in in_other_ways(config_of(name, *triple))]
SINGLY = list(dict.fromkeys((*EACH, *{
    (config.variant, config["arithmetic"]): config for config in reversed(EVERY)
    if is_emulated(config.variant) and config["reduction"] == VARIANTS[config.variant].defaults["reduction"]}.values())))
TYPED = [(config, dtype, param_dtype) for dtype, param_dtype in cases.DATA_TYPES[1:]
         for name in VARIANTS for triple in triples(name, dtype)
         for config in in_other_ways(config_of(name, *triple, dtype), dtype)
         if fitted(config, SMALL_SHAPE, dtype, param_dtype) is not None]

each_config = pytest.mark.parametrize("config", EACH, ids=label)
every_config = pytest.mark.parametrize("config", EVERY, ids=label)
singly_changed = pytest.mark.parametrize("config", SINGLY, ids=label)
deterministic_configs = pytest.mark.parametrize(
    "config", [config for config in EACH if config["reduction"] != "atomic"], ids=label)
typed_configs = pytest.mark.parametrize(
    ("config", "dtype", "param_dtype"), [pytest.param(*case, id="-".join((label(case[0]), *case[1:]))) for case in TYPED])


def on_shapes(shapes: Sequence[Shape]) -> pytest.MarkDecorator:
    """Each shape with each of EACH that can be fitted to it; of variants that are emulated, with one of EVERY in turn."""
    found: list[tuple[Shape, Config]] = []
    for variant in VARIANTS:
        if is_emulated(variant):
            found += in_turn(shapes, variant)
        else:
            fits = ((shape, fitted(config, shape)) for shape in shapes for config in EACH if config.variant == variant)
            found += [(shape, config) for shape, config in fits if config is not None]
    return as_parameters(found)


def in_turn(shapes: Sequence[Shape], variant: str) -> list[tuple[Shape, Config]]:
    """Each shape with one config of the variant, where one can run it; reductions and arithmetics take turns."""
    configs = [config for config in EVERY if config.variant == variant]
    if not configs:
        return []  # of 16-bit data alone
    found: list[tuple[Shape, Config]] = []
    for number, shape in enumerate(shapes):
        start = (number + number // len(configs)) % len(configs)  # or periods of shapes and configs would meet
        fits = (fitted(config, shape) for config in (*configs[start:], *configs[:start]))
        found += [(shape, config) for config in fits if config is not None][:1]
    return found


def as_parameters(found: Sequence[tuple[Shape, Config]]) -> pytest.MarkDecorator:
    """Parametrizes a test with shapes and configs."""
    return pytest.mark.parametrize(
        ("shape", "config"), [pytest.param(shape, config, id=f"{shape}-{label(config)}") for shape, config in found])


@cache
def _programs(executor: Executor) -> dict[tuple[object, ...], Program]:
    return {}


def compiled(executor: Executor, problem: Problem, config: Config) -> Program:
    """The program of a config; kept, as a source does not depend on the row count."""
    programs = _programs(executor)
    key = (problem.hidden, problem.out, problem.wants, problem.dtype, problem.param_dtype, config)
    if key not in programs:
        programs[key] = executor.compile(render(problem, config))
    return programs[key]


def problem_of(config: Config, inputs: Inputs, wants: frozenset[str] = ALL_GRADIENTS) -> Problem:
    """The problem of the inputs, in the finest accuracy class that the config can meet."""
    return Problem(inputs.rows, inputs.hidden, inputs.out, inputs.dtype, wants, param_dtype=inputs.param_dtype,
                   accuracy=accuracy_of(config, inputs.dtype))


def assert_right(executor: Executor, config: Config, inputs: Inputs, wants: frozenset[str] = ALL_GRADIENTS) -> Gradients:
    """Runs the config and holds each element against its bound."""
    problem = problem_of(config, inputs, wants)
    got = compiled(executor, problem, config).run(inputs, wants)
    fault = bound_fault(inputs, got, wants, problem.accuracy)
    assert fault is None, f"{config}: {fault}"
    return got
