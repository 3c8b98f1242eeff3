"""The candidates of one tuning problem: which configs are valid, why the others are not, and which lie near each other."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from codegen.config import Config, Value
from codegen.limits import Limits
from codegen.problem import Problem
from codegen.space import valid_configs, variant_of, why_not
from codegen.variants import default_names

_ONE_DIFFERS = 1 << 16
"""More than all steps between the choices of all parameters."""

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
        refused: why the others are not, with counts; the first stands for those that differ from it in figures alone.
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
    """Judges every combination of the variants (None: as of valid_configs).

    Raises:
        InvalidConfig: there is no variant of one of those names.
    """
    names = default_names() if variants is None else tuple(dict.fromkeys(variants))
    refused: Counter[str] = Counter()

    examples: dict[str, str] = {}

    def note(reason: str, count: int) -> None:
        refused[examples.setdefault(without_figures(reason), reason)] += count

    valid = valid_configs(problem, limits, None if variants is None else names, note)
    return Space(problem, limits, names, tuple(valid), len(valid) + refused.total(), dict(refused.most_common()))


def without_figures(reason: str) -> str:
    """The reason with every number replaced by a dash of one length."""
    return _FIGURE.sub("..", reason)


def distance(first: Config, second: Config) -> tuple[int, int]:
    """How far apart two configs of one variant are: parameters that differ, then steps between their choices."""
    steps = [abs(a - b) for a, b in zip(_place(first), _place(second), strict=True)]
    return sum(step > 0 for step in steps), sum(steps)


def nearest(config: Config, candidates: Sequence[Config]) -> Config | None:
    """The candidate of the same variant that lies nearest, the first of equals; None where there is none."""
    same = [other for other in candidates if other.variant == config.variant]
    return Neighbourhood(same).nearest(config) if same else None


class Neighbourhood:
    """Configs of one variant, at least one, of which the nearest to any config are found at once. Each can be taken out.

    Args:
        configs: all different; their order decides between equally near ones.
    """

    def __init__(self, configs: Sequence[Config]) -> None:
        self._configs = tuple(configs)
        self._numbers = {config: number for number, config in enumerate(configs)}
        self._places = np.array([_place(config) for config in configs], np.int16)
        self._there = np.ones(len(configs), bool)
        self._count = len(configs)

    def __len__(self) -> int:
        """How many have not been taken out."""
        return self._count

    def take(self, config: Config) -> bool:
        """Takes a config out; False where it is not there, or no longer."""
        number = self._numbers.get(config)
        if number is None or not self._there[number]:
            return False
        self._there[number] = False
        self._count -= 1
        return True

    def nearest(self, config: Config) -> Config | None:
        """The nearest that is left; None where none is."""
        if not self._count:
            return None
        far = self._distances(config)
        far[~self._there] = np.iinfo(far.dtype).max
        return self._configs[int(far.argmin())]

    def within(self, config: Config, reach: int) -> list[Config]:
        """Those left that differ from the config in `reach` parameters at most, nearest first."""
        far = self._distances(config)
        near = np.flatnonzero(self._there & (far < (reach + 1) * _ONE_DIFFERS))
        return [self._configs[number] for number in near[np.argsort(far[near], kind="stable")]]

    def _distances(self, config: Config) -> NDArray[np.int32]:
        """To each config, as one number that orders them as `distance` does."""
        steps = np.abs(self._places - np.array(_place(config), np.int16))
        far: NDArray[np.int32] = steps.sum(axis=1, dtype=np.int32)
        far += np.int32(_ONE_DIFFERS) * np.count_nonzero(steps, axis=1).astype(np.int32)
        return far


def _place(config: Config) -> list[int]:
    """The number of each parameter's value among its choices."""
    numbers = _numbers(config.variant)
    return [numbers[name][value] for name, value in config.params]


@functools.cache
def _numbers(variant: str) -> dict[str, dict[Value, int]]:
    return {name: {value: number for number, value in enumerate(values)} for name, values in variant_of(variant).choices.items()}
