"""Where a variant is slower than another one it is not tried, unless it is named or the other can run nothing."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from codegen.gemm_mma import VARIANT
from codegen.limits import target
from codegen.problem import Problem
from codegen.space import valid_configs, why_not
from tuner.candidates import survey

NAME, BY = "gemm_mma", "gemm_wgmma"
GPT2 = Problem(8192, 768, 2304)


def variants(problem: Problem, arch: str = "sm_90", names: list[str] | None = None) -> Counter[str]:
    return Counter(config.variant for config in valid_configs(problem, target(arch), names))


@pytest.mark.parametrize(("problem", "arch", "tried"), [
    (GPT2, "sm_90", False), (Problem(8192, 768, 2304, "bfloat16"), "sm_90", False),  # where it was measured
    (Problem(1024, 256, 1024), "sm_90", False), (Problem(262144, 128, 512), "sm_90", False),
    (GPT2, "sm_80", True), (Problem(1000, 256, 1024), "sm_90", True),  # another GPU, a smaller product
    (Problem(1 << 20, 64, 512), "sm_90", True), (Problem(1 << 20, 512, 64), "sm_90", True),  # narrower ones
    (Problem(1 << 26, 128, 512), "sm_90", True),  # too many rows for the other one
])
def test_large_products_are_left_to_warpgroups(problem: Problem, arch: str, tried: bool) -> None:
    found = variants(problem, arch)
    assert (NAME in found) is tried
    assert tried or BY in found


def test_it_is_tried_where_it_is_named() -> None:
    named = valid_configs(GPT2, target("sm_90"), [NAME])
    assert named and all(why_not(GPT2, config, target("sm_90")) is None for config in named)
    assert variants(GPT2, names=[BY, NAME])[NAME] == len(named)


def test_a_run_says_why_it_is_not() -> None:
    space = survey(GPT2, target("sm_90"))
    (count,) = (count for reason, count in space.refused.items() if "name gemm_mma to have it tried" in reason)
    assert count == math.prod(map(len, VARIANT.choices.values()))
    assert space.combinations == len(space.valid) + sum(space.refused.values())
    assert {config.variant for config in survey(GPT2, target("sm_90"), [NAME]).valid} == {NAME}
