"""The candidates of one tuning problem: which configs are valid, why the others are not, and which lie near each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from codegen.config import Config
from codegen.limits import Limits
from codegen.problem import Problem
from codegen.space import all_configs, variant_of, why_not
from codegen.variants import VARIANTS

_FIGURE = re.compile(r"(?<![\w.])\d[\d.]*(?!\w)")


@dataclass(frozen=True, slots=True)
class Space:
    """Every combination of parameter choices, judged by the rules alone; nothing is compiled.

    Attributes:
        problem: what is to be computed.
        limits: the GPU.
        variants: names of the variants that take part.
        valid: the configs that can run the problem and are worth trying, in a fixed order.
        combinations: how many there are, valid or not.
        refused: why the others are not, with counts; figures are left out, so that like reasons count together.
    """

    problem: Problem
    limits: Limits
    variants: tuple[str, ...]
    valid: tuple[Config, ...]
    combinations: int
    refused: Mapping[str, int]

    def why_not(self, config: Config) -> str | None:
        """Why a config is not valid here; None where it is."""
        return why_not(self.problem, config, self.limits)


def survey(problem: Problem, limits: Limits, variants: Iterable[str] | None = None) -> Space:
    """Judges every combination of the variants (None: all of them).

    Raises:
        InvalidConfig: there is no variant of one of those names.
    """
    names = tuple(VARIANTS) if variants is None else tuple(dict.fromkeys(variants))
    valid: list[Config] = []
    refused: Counter[str] = Counter()
    count = 0
    for config in all_configs(names):
        count += 1
        reason = why_not(problem, config, limits)
        if reason is None:
            valid.append(config)
        else:
            refused[without_figures(reason)] += 1
    return Space(problem, limits, names, tuple(valid), count, dict(refused.most_common()))


def without_figures(reason: str) -> str:
    """The reason with every number replaced by a dash of one length."""
    return _FIGURE.sub("..", reason)


def distance(first: Config, second: Config) -> tuple[int, int]:
    """How far apart two configs of one variant are: parameters that differ, then steps between their choices."""
    choices = variant_of(first.variant).choices
    differing = [
        abs(choices[name].index(a) - choices[name].index(b))
        for (name, a), (_, b) in zip(first.params, second.params, strict=True) if a != b]
    return len(differing), sum(differing)


def nearest(config: Config, candidates: Sequence[Config]) -> Config | None:
    """The candidate of the same variant that lies nearest, the first of equals; None where there is none."""
    same = [other for other in candidates if other.variant == config.variant]
    return min(same, key=lambda other: distance(config, other), default=None)
