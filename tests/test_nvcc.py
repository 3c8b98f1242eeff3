"""Every variant, compiled by nvcc for each architecture, and for one of them with every reduction, also of 16-bit data, on any
machine."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from codegen.config import Config, Value
from codegen.limits import TARGETS, Limits, target
from codegen.problem import Problem
from codegen.render import render
from codegen.space import make_config
from tests import cases
from tests.configs import every_reduction
from tests.planted_worker import ON_GPU, PLANTS, planted
from tests.variant_cases import EACH, TYPED, other_way
from tuner.store import Store
from tuner.toolchain import REPORT, Binary, find_nvcc

ARCHITECTURES = tuple(target(name).arch for name in TARGETS)
HOPPER = target("sm_90")
PROBLEM = Problem(rows=512, hidden=64, out=64)
Case = tuple[Problem, Config, str]


SHORT = [replace(PROBLEM, dtype=dtype, param_dtype=param_dtype, accuracy="") for dtype, param_dtype in cases.DATA_TYPES[1:]]
OTHER_WAYS = [(PROBLEM, config) for config in EACH if other_way(config)]
OTHER_WAYS += [(replace(PROBLEM, dtype=dtype, param_dtype=param_dtype, accuracy=""), config)
               for config, dtype, param_dtype in TYPED if other_way(config)]


def short() -> list[tuple[Problem, Config]]:
    """Every variant and reduction on 16-bit data; types of data and of parameters take turns."""
    found: dict[tuple[str, Value], list[tuple[Problem, Config]]] = {}
    for problem in SHORT:
        for config in every_reduction(problem, HOPPER):
            found.setdefault((config.variant, config["reduction"]), []).append((problem, config))
    return [some[number % len(some)] for number, (_, some) in enumerate(sorted(found.items()))]


def in_turn(turn: int, limits: Limits) -> list[Config]:
    """A config of every variant for float32, each turn with another of its reductions."""
    found: dict[str, list[Config]] = {}
    for config in every_reduction(PROBLEM, limits):
        found.setdefault(config.variant, []).append(config)
    return [some[turn % len(some)] for some in found.values()]


OTHERS = [target(name) for name in TARGETS if target(name) != HOPPER]
CASES = [*((PROBLEM, config, limits.arch) for turn, limits in enumerate(OTHERS) for config in in_turn(turn, limits)),
         *((PROBLEM, config, HOPPER.arch) for config in every_reduction(PROBLEM, HOPPER)),
         *((problem, config, HOPPER.arch) for problem, config in (*short(), *OTHER_WAYS))]
"""Problem, config and architecture: every variant on all; on one every reduction, also of 16-bit data, and other ways."""


@pytest.fixture(scope="module")
def binaries(store: Store) -> dict[Case, Binary]:
    """All of them, compiled side by side."""
    nvcc = find_nvcc(ARCHITECTURES[-1])

    def compile_one(case: Case) -> Binary:
        problem, config, arch = case
        return nvcc.compile(render(problem, config).text, arch, store)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(CASES, pool.map(compile_one, CASES), strict=True))


def label(case: Case) -> str:
    problem, config, arch = case
    return f"{config}-{problem.dtype}-{problem.param_dtype}-{arch}"


@pytest.mark.parametrize("case", CASES, ids=label)
def test_compiles_without_spills_and_warnings(binaries: dict[Case, Binary], case: Case) -> None:
    problem, config, arch = case
    binary, plan = binaries[case], render(problem, config).plan
    resources, limits = binary.resources(plan), target(arch)
    assert resources.keys() == {launch.kernel for launch in plan.launches}
    for launch in plan.launches:
        used = resources[launch.kernel]
        assert (used.spill_bytes, used.stack_bytes) == (0, 0), launch.kernel
        assert 0 < used.registers * launch.block <= limits.registers_per_sm
        assert used.shared_bytes == launch.shared_bytes <= limits.shared_per_block
    assert "warning" not in (binary.cubin.parent / REPORT).read_text()


@pytest.mark.parametrize("plant", ON_GPU)
def test_what_tests_plant_on_a_gpu_compiles(store: Store, monkeypatch: pytest.MonkeyPatch, plant: str) -> None:
    source = render(PROBLEM, make_config("row_warp"))
    monkeypatch.setenv(PLANTS, json.dumps({str(source.config): plant}))
    changed = planted(source)
    assert changed.text != source.text
    find_nvcc(ARCHITECTURES[-1]).compile(changed.text, "sm_90a", store)
