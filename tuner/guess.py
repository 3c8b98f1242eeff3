"""What the cost model expects to be fast: the best config, found in a moment, for calls that no tuning run has prepared, and the
candidates of a tuning run in order."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from codegen.config import Config
from codegen.limits import Limits
from codegen.problem import Problem
from codegen.space import make_config, variant_of, why_not
from codegen.variants import default_names, tried
from tuner.candidates import Neighbourhood, Space, survey
from tuner.costmodel import predict
from tuner.errors import NoValidKernel

RANK_ALL = 16_384
"""Configs that are all predicted: two or three seconds."""

DESCENTS, REACH = 8, 1
"""From so many of the best of a sample the better ones round them are looked for, so many parameters at a time."""

LONG_CALL_US, FAR_OFF = 2000.0, 30.0
"""What is predicted to take longer than both the one and so many times the best is not tried: a few such calls take seconds, and
the predictions are not so far out. A GPU cannot be told to give up a kernel."""


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

    for name in default_names():
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


def rank(space: Space) -> dict[Config, float]:
    """The valid configs that are worth a look, fastest predicted first, with their predicted microseconds.

    All of them where they are RANK_ALL at most. Else, of each variant, a random sample and what lies round the best of it.
    """
    valid = space.valid
    if len(valid) > RANK_ALL:
        by_variant = [[config for config in valid if config.variant == name] for name in space.variants]
        share = RANK_ALL // (2 * len(by_variant))
        times = {config: time for own in by_variant for config, time in _sampled(space, own, share).items()}
    else:
        times = {config: _predicted(space, config) for config in valid}
    return dict(sorted(times.items(), key=lambda entry: entry[1]))


def longest(predicted: Mapping[Config, float]) -> float:
    """Microseconds: what is predicted to take longer is not tried, given all predictions."""
    return max(LONG_CALL_US, FAR_OFF * min(predicted.values(), default=0.0))


def _sampled(space: Space, valid: Sequence[Config], count: int) -> dict[Config, float]:
    """Predictions of `count` configs of one variant, and of as many again on the way from the best of them to better ones."""
    if len(valid) <= 2 * count:
        return {config: _predicted(space, config) for config in valid}
    left = Neighbourhood(valid)
    times: dict[Config, float] = {}

    def look(configs: Sequence[Config]) -> None:
        for config in configs:
            left.take(config)
            times[config] = _predicted(space, config)

    look(random.Random(0).sample(valid, count))
    while len(times) < 2 * count:
        nearby = (left.within(centre, REACH) for centre in sorted(times, key=times.__getitem__)[:DESCENTS])
        new = next(filter(None, nearby), None)
        if new is None:
            break
        look(new[:2 * count - len(times)])
    return times


def _predicted(space: Space, config: Config) -> float:
    return predict(space.problem, config, space.limits).time_us


def _near(config: Config) -> Iterator[Config]:
    """The config and all that differ from it in one or two parameters, but for values that no GPU has run."""
    choices = tried(variant_of(config.variant)).choices
    changes = [(name, value) for name, current in config.params for value in choices[name] if value != current]
    yield config
    for change in changes:
        yield _changed(config, (change,))
    for pair in combinations(changes, 2):
        if pair[0][0] != pair[1][0]:
            yield _changed(config, pair)


def _changed(config: Config, changes: tuple[tuple[str, int | str], ...]) -> Config:
    return Config(config.variant, tuple({**config.as_dict(), **dict(changes)}.items()))
