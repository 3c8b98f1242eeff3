"""Judging a whole space: the same verdict on every combination as the rules give it one by one, by few questions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from unittest import mock

import pytest

from codegen.config import Config, Value
from codegen.limits import Limits, target
from codegen.problem import Problem, Shape
from codegen.reduction import too_much_workspace
from codegen.space import all_configs, variant_of
from codegen.variant import Clash, Params, Variant
from codegen.variants import VARIANTS
from codegen.walk import Walk
from tests import big_space

LIMITS = target("sm_90")
PROBLEMS = {
    "few rows": Problem.of(Shape.parse("4,4,8,16")),
    "16 bits": Problem.of(Shape.parse("2,77,96,200"), dtype="bfloat16", param_dtype="float32"),
    "many rows": Problem.of(Shape.parse("1,65536,64,64"), wants={"dx", "db"}, deterministic=True),
    "large": Problem.of(Shape.parse("8,1024,768,2304"))}

LARGE = ("row_shared", "gemm_mma", "gemm_wgmma")
"""Variants of too many combinations to ask for all of them one by one."""

each_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)


def verdict(problem: Problem, variant: Variant, config: Config) -> str | None:
    """What the rules say of one combination, in their order."""
    params, names = config.as_dict(), tuple(variant.choices)
    for level in range(len(names)):
        for clash in variant.clashes:
            if max(map(names.index, clash.names)) == level:
                reason = clash.refuses(problem, {name: params[name] for name in clash.names}, LIMITS)
                if reason is not None:
                    return reason
    return (variant.refuses(problem, params, LIMITS) or variant.inexact(problem, params) or variant.wasteful(problem, params))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in LARGE])
@each_problem
def test_all_of_a_small_space_is_judged_as_one_by_one(problem: Problem, name: str) -> None:
    variant = variant_of(name)
    judged = {config: verdict(problem, variant, config) for config in all_configs([name])}
    walk = Walk(problem, LIMITS, variant)
    assert walk.valid == [config for config, reason in judged.items() if reason is None]
    assert walk.refused == Counter(reason for reason in judged.values() if reason is not None)


@pytest.mark.parametrize("name", LARGE)
@each_problem
def test_a_part_of_a_large_space_is_judged_as_one_by_one(problem: Problem, name: str) -> None:
    """A few of the choices of each parameter, so that all of their combinations can be tried."""
    whole = variant_of(name)
    few = 3 if name == "row_shared" else 2
    for first in range(3):
        chosen: dict[str, tuple[Value, ...]] = {
            parameter: tuple(sorted({choices[(first + step) % len(choices)] for step in range(few)}, key=choices.index))
            for parameter, choices in whole.choices.items()}
        variant = replace(whole, choices=chosen)
        judged = {}
        for values in product(*chosen.values()):
            config = Config(name, tuple(zip(chosen, values, strict=True)))
            judged[config] = verdict(problem, variant, config)
        walk = Walk(problem, LIMITS, variant)
        assert walk.valid == [config for config, reason in judged.items() if reason is None]
        assert walk.refused == Counter(reason for reason in judged.values() if reason is not None)


@each_problem
def test_products_are_refused_for_the_scratch_memory_of_their_plan(problem: Problem) -> None:
    """The rule does not look at everything where that cannot matter; the plan does."""
    variant = variant_of("gemm_mma")
    rule = next(clash for clash in variant.clashes if {"tile", "parts"} <= set(clash.names))
    looked_at = ("arithmetic", "split", "reduction", "parts", "finish")
    for values in product(*(variant.choices[name] for name in looked_at)):
        params = {**variant.defaults, **dict(zip(looked_at, values, strict=True))}
        refused = rule.refuses(problem, {name: params[name] for name in rule.names}, LIMITS)
        assert refused == too_much_workspace(problem, variant.plan(problem, params))


def test_a_rule_is_asked_once_for_what_it_looks_at() -> None:
    """One looks at a second parameter only for some values of the first, and at one that a clash is not given."""
    asked: Counter[tuple[Value, ...]] = Counter()

    def wasteful(problem: Problem, params: Params) -> str | None:
        if params["warps"] != 2:
            asked[params["warps"],] += 1
            return None
        asked[params["warps"], params["order"]] += 1
        return "two warps go out of order" if params["order"] == 8 else None

    plain = replace(big_space.variant(big_space.FEW, clashes=False), wasteful=wasteful,
                    refuses=lambda problem, params, limits: None)
    walk = Walk(PROBLEMS["few rows"], LIMITS, plain)
    assert asked == {(4,): 1, (8,): 1, (16,): 1, (2, 1): 1, (2, 8): 1}
    assert walk.refused == {"two warps go out of order": 49152 // 4 // 2}
    assert len(walk.valid) == 49152 // 4 * 3 + 49152 // 8


def test_a_clash_is_given_no_other_parameters_than_it_names() -> None:
    def curious(problem: Problem, params: Params, limits: Limits) -> str | None:
        return f"order {params['order']}"

    variant = replace(big_space.variant(big_space.FEW), clashes=(Clash(("warps", "stages"), curious),))
    with pytest.raises(KeyError, match="order"):
        Walk(PROBLEMS["few rows"], LIMITS, variant)


def test_a_reason_is_counted_for_all_that_falls_to_it_at_once() -> None:
    """What begins with a clash is not looked at any further."""
    with mock.patch.object(big_space, "_refuses") as never:
        variant = replace(big_space.variant(big_space.CHOICES), clashes=(Clash(("tile_m",), lambda *_: "no"),))
        walk = Walk(PROBLEMS["few rows"], LIMITS, variant)
        assert walk.refused == {"no": 1_769_472} and not walk.valid
        never.assert_not_called()
