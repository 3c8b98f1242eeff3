"""Every variant with every reduction, compiled by nvcc for each architecture that is supported, whatever machine this is."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product

import pytest

from codegen.config import Config
from codegen.limits import TARGETS, target
from codegen.problem import Problem
from codegen.render import render
from codegen.space import make_config, valid_configs, why_refused
from codegen.variants import VARIANTS
from tuner.store import Store
from tuner.toolchain import REPORT, Binary, find_nvcc

ARCHITECTURES = tuple(target(name).arch for name in TARGETS)
PROBLEM = Problem(rows=512, hidden=64, out=64)


def default_config(variant: str, reduction: str) -> Config:
    """The variant's defaults with this reduction; where they do not go together, the valid config nearest to them."""
    config = make_config(variant, {"reduction": reduction})
    limits = target("sm_90")
    if why_refused(PROBLEM, config, limits) is None:
        return config
    same = [other for other in valid_configs(PROBLEM, limits, [variant]) if other["reduction"] == reduction]
    assert same, f"{variant} cannot use {reduction} at all"
    return max(same, key=lambda other: sum(a == b for a, b in zip(other.params, config.params, strict=True)))


CONFIGS = tuple(default_config(name, str(reduction))
                for name, variant in VARIANTS.items() for reduction in variant.choices["reduction"])


@pytest.fixture(scope="module")
def binaries(store: Store) -> dict[tuple[Config, str], Binary]:
    """All of them, compiled side by side."""
    nvcc = find_nvcc(ARCHITECTURES[-1])

    def compile_one(case: tuple[Config, str]) -> Binary:
        config, arch = case
        return nvcc.compile(rendered(config), arch, store)

    cases = list(product(CONFIGS, ARCHITECTURES))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(cases, pool.map(compile_one, cases), strict=True))


@cache
def rendered(config: Config) -> str:
    return render(PROBLEM, config).text


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_compiles_without_spills_and_warnings(binaries: dict[tuple[Config, str], Binary], config: Config, arch: str) -> None:
    binary, plan = binaries[config, arch], render(PROBLEM, config).plan
    resources, limits = binary.resources(plan), target(arch)
    assert resources.keys() == {launch.kernel for launch in plan.launches}
    for launch in plan.launches:
        used = resources[launch.kernel]
        assert (used.spill_bytes, used.stack_bytes) == (0, 0), launch.kernel
        assert 0 < used.registers * launch.block <= limits.registers_per_sm
        assert used.shared_bytes == launch.shared_bytes <= limits.shared_per_block
    assert "warning" not in (binary.cubin.parent / REPORT).read_text()
