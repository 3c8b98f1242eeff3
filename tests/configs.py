"""One config of each variant and reduction, for tests that take any."""

from __future__ import annotations

from functools import cache

from codegen.config import Config
from codegen.limits import Limits
from codegen.problem import Problem
from codegen.space import make_config, valid_configs, why_refused
from codegen.variants import VARIANTS


@cache
def _valid(problem: Problem, limits: Limits, variant: str) -> list[Config]:
    return valid_configs(problem, limits, [variant])


def config_with(problem: Problem, limits: Limits, variant: str, reduction: str) -> Config | None:
    """The variant's defaults with this reduction; where they do not go together, the valid config nearest to them, if any."""
    config = make_config(variant, {"reduction": reduction})
    if why_refused(problem, config, limits) is None:
        return config
    same = [other for other in _valid(problem, limits, variant) if other["reduction"] == reduction]
    return max(same, key=lambda other: sum(a == b for a, b in zip(other.params, config.params, strict=True)), default=None)


def every_reduction(problem: Problem, limits: Limits) -> list[Config]:
    """A config for every variant with every reduction that can run the problem."""
    found = (config_with(problem, limits, name, str(reduction))
             for name, variant in VARIANTS.items() for reduction in variant.choices["reduction"])
    return [config for config in found if config is not None]
