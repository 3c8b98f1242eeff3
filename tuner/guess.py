"""The config that the cost model expects to be fastest, found in a moment: for calls that no tuning run has prepared."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import combinations

from codegen.config import Config
from codegen.limits import Limits
from codegen.problem import Problem
from codegen.space import make_config, variant_of, why_not
from codegen.variants import VARIANTS
from tuner.candidates import survey
from tuner.costmodel import predict
from tuner.errors import NoValidKernel


@functools.lru_cache(maxsize=256)
def best_predicted(problem: Problem, limits: Limits) -> Config:
    """Descends from the variants' defaults, by one or two parameters at a time, until nothing near is predicted to be faster.

    Raises:
        NoValidKernel: no config can run the problem on such a GPU.
    """
    times: dict[Config, float] = {}

    def look(config: Config) -> None:
        if config not in times and why_not(problem, config, limits) is None:
            times[config] = predict(problem, config, limits).time_us

    for name in VARIANTS:
        for config in _near(make_config(name)):
            look(config)
    if not times:
        for config in survey(problem, limits).valid:
            look(config)
    if not times:
        raise NoValidKernel(f"no kernel can compute {problem.wants_key} for rows of {problem.hidden} and {problem.out} values")
    best = None
    while best != (fastest := min(times, key=times.__getitem__)):
        best = fastest
        for config in _near(best):
            look(config)
    return best


def _near(config: Config) -> Iterator[Config]:
    """The config and all that differ from it in one or two parameters."""
    choices = variant_of(config.variant).choices
    changes = [(name, value) for name, current in config.params for value in choices[name] if value != current]
    yield config
    for change in changes:
        yield _changed(config, (change,))
    for pair in combinations(changes, 2):
        if pair[0][0] != pair[1][0]:
            yield _changed(config, pair)


def _changed(config: Config, changes: tuple[tuple[str, int | str], ...]) -> Config:
    return Config(config.variant, tuple({**config.as_dict(), **dict(changes)}.items()))
