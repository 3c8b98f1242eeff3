"""What a search believes of the configs it has not tried: a Gaussian process over the logarithm of their times.

The mean follows the cost model, as far as the times told so far bear it out. Configs of one variant that differ in few
parameters, and in these by few steps, are expected to deviate from it alike; how far a step of each parameter carries is fitted
by the marginal likelihood (Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006, chapters 2 and 5). The next
config is the one with the largest expected improvement (Jones, Schonlau and Welch, "Efficient Global Optimization", 1998), times
the chance that it is not rejected. A config that was given out counts as if it had taken what was expected, so that those after
it lie elsewhere (Ginsbourger, Le Riche and Carraro, "Kriging Is Well-Suited to Parallelize Optimization", 2010).

Cost. Giving one out, or learning one time, takes O(configs * tried); fitting anew takes O(configs * tried^2), and is done
whenever a good part of what is known is new. Memory is O(configs * tried), and is taken at the beginning for as many as will be
tried: a long search ends with what it began with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from codegen.config import Config
from codegen.space import variant_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TRUST, DISTRUST = 0.8, 0.25
"""A config predicted to take e times as long is expected to take e^TRUST times as long; DISTRUST is the deviation of the
exponent, for all variants alike and for each one in addition."""

OFFSET = 0.4
"""Deviation of the factor by which predictions of all variants, and those of each one in addition, are off, as a logarithm."""

CUT = math.log(8.0)
"""What takes longer than so many times the best is as bad as any other: how much longer says nothing about the best."""

STEPS = (0.03, 0.12, 0.4, 1.2)
"""Candidates for how much unlike one step makes two configs: the correlation falls by exp of minus that."""

SIGNALS, NOISES = (0.1, 0.2, 0.4), (0.01, 0.03, 0.08)
"""Candidates for the deviation from the mean, and for what no parameter explains, as logarithms."""

STIFFNESS = 0.07
"""How unlikely other steps than STEPS[1] are held to be before anything is known."""

LITTLE, DOUBTS = 1e-4, (1.0, 3.0, 10.0)
"""Where no config promises so much, as a logarithm, deviations are taken to be larger by the next of these factors."""

REFIT = 1.3
"""The process is fitted anew once there are so many times as many times as at the last fit."""

FITTED = 160
"""Times of one variant that a fit looks at, at most: it takes O(times^3), and more would hardly move what it finds."""

BLOCK = 16
"""Rows that forward substitution takes at a time; what it needs besides is a few times as many."""

PASSED, PASSED_WEIGHT, UNLIKE = 0.9, 0.5, 0.4
"""The chance that a config passes, how many tried ones like it this is worth, and how much unlike them one step makes it."""

CAUTION = 2
"""The power to which the chance is taken: what was never seen to pass has to promise a lot."""


@dataclass(slots=True)
class _Family:
    """One variant.

    Attributes:
        members: the numbers of its configs.
        numbers: of each parameter's value among its choices, [configs, parameters].
        places: where each stands, in columns of which a parameter has one or several.
        owners: the parameter of each column.
        steps: how much unlike one step of each parameter makes two configs.
        passed, failed: of each parameter, how many configs with each of its values did.
        fails: how many failed.
        signal, noise: deviation from the mean, and of what no parameter explains.
    """

    members: Ints
    numbers: Ints
    places: Floats
    owners: Ints
    steps: Floats
    passed: list[Ints]
    failed: list[Ints]
    fails: int = 0
    signal: float = 0.25
    noise: float = 0.03


class Surrogate:
    """Chooses among configs by what is known of others. Deterministic.

    Args:
        configs: all there is to choose from.
        predicted: microseconds by the cost model; what has none is taken for middling.
        room: how many of them will be given out; there may be more.
    """

    def __init__(self, configs: Sequence[Config], predicted: Mapping[Config, float], room: int = 0) -> None:
        self._numbers = {config: number for number, config in enumerate(configs)}
        self.configs = tuple(configs)
        logs = np.log(np.array([predicted.get(config, math.nan) for config in configs]))
        logs = np.where(np.isnan(logs), np.nanmedian(logs) if not np.isnan(logs).all() else 0.0, logs)
        logs -= logs.min()
        self._predicted = np.minimum(logs, CUT)
        self._variant = np.zeros(len(configs), np.int64)
        self._families: list[_Family] = []
        for number, name in enumerate(dict.fromkeys(config.variant for config in configs)):
            members = np.array([place for place, config in enumerate(configs) if config.variant == name])
            self._variant[members] = number
            numbers, places = _numbers([configs[member] for member in members]), _places(name)
            owners = np.repeat(np.arange(len(places)), [columns.shape[1] for columns in places])
            stand = np.hstack([columns[numbers[:, place]] for place, columns in enumerate(places)])
            passed, failed = ([np.zeros(most + 1, np.int64) for most in numbers.max(axis=0)] for _ in range(2))
            self._families.append(_Family(members, numbers, stand, owners, np.full(len(places), STEPS[1]), passed, failed))
        self._row = np.concatenate([np.arange(len(family.members)) for family in self._families])[
            np.argsort(np.concatenate([family.members for family in self._families]), kind="stable")]
        self._tried: list[int] = []  # given out, in order
        self._told: list[int] = []  # whose times were told, in order
        self._times: Floats = np.full(len(configs), math.nan)  # logarithms of those
        self._failed: set[int] = set()
        self._passed_like, self._tried_like = np.zeros(len(configs)), np.zeros(len(configs))
        self._free = np.ones(len(configs), bool)
        self._fitted = 0
        self._factor, self._projections = _taken(room, room), _taken(room, len(configs))
        self._rehearse()
        self._rebuild()

    def _rehearse(self) -> None:
        """The largest products and factors there will be, of zeros: the library that computes them takes its memory for good."""
        for left in (self._factor[:BLOCK], self._factor[:1], self._factor[0] if len(self._factor) else self._factor):
            left @ self._projections
        np.linalg.cholesky(np.eye(FITTED + 1))

    def __contains__(self, config: Config) -> bool:
        return config in self._numbers

    def recall(self, tried: Iterable[Config], told: Mapping[Config, float | None]) -> None:
        """Notes at once what `take` and `tell` would one by one."""
        for config in tried:
            self._free[self._numbers[config]] = False
            self._tried.append(self._numbers[config])
        for config, time_us in told.items():
            self._note(self._numbers[config], time_us)
        self._fit()
        self._rebuild()

    def take(self, config: Config) -> None:
        """Notes that a config was given out."""
        number = self._numbers[config]
        self._free[number] = False
        self._tried.append(number)
        self._extend(number)

    def tell(self, config: Config, time_us: float | None) -> None:
        """Notes the time of a config that was given out; None where it was rejected."""
        self._note(self._numbers[config], time_us)
        if len(self._told) >= REFIT * self._fitted + 1:
            self._fit()
            self._rebuild()

    def _note(self, number: int, time_us: float | None) -> None:
        self._count(number, time_us is not None)
        if time_us is None:
            self._failed.add(number)
        else:
            if math.isnan(self._times[number]):
                self._told.append(number)
            self._times[number] = math.log(time_us)

    def choose(self) -> Config | None:
        """The most promising config that was not given out; None where all were."""
        if not self._free.any():
            return None
        mean, deviation = self._posterior()
        best = 0.0 if self._told else float(mean.min())
        chance = self._chance() * self._free
        for doubt in DOUBTS:
            gain = _expected_improvement(best - mean, doubt * deviation) * chance
            if gain.max() >= LITTLE:
                break
        return self.configs[int(np.where(self._free, gain, -1.0).argmax())]

    # --- the process ---------------------------------------------------------------------------------------------------------

    def _scaled(self) -> tuple[Ints, Floats]:
        """The configs whose times were told, and those times as the process sees them: relative to the best, cut off."""
        told = np.array(self._told)
        times = self._times[told]
        return told, np.minimum(times - times.min(), CUT)

    def _kernel(self, number: int) -> Floats:
        """The covariance of one config with every other."""
        same = self._variant == self._variant[number]
        family = self._families[self._variant[number]]
        product = self._predicted * self._predicted[number]
        covariance: Floats = OFFSET**2 * (1.0 + same) + DISTRUST**2 * product * (1.0 + same)
        apart = np.abs(family.places - family.places[self._row[number]]) @ family.steps[family.owners]
        covariance[family.members] += family.signal**2 * np.exp(-apart)
        return covariance

    def _noise(self, number: int) -> float:
        noise: float = self._families[self._variant[number]].noise
        return noise * noise

    def _rebuild(self) -> None:
        """The Cholesky factor of the covariances of what is known, and the covariances of those with all, solved by it."""
        families = np.array([family.signal**2 for family in self._families])
        self._variance: Floats = 2 * OFFSET**2 + 2 * DISTRUST**2 * self._predicted**2 + families[self._variant]
        known = [number for number in self._tried if number not in self._failed]
        self._known = known
        if not known:
            return
        self._make_room(len(known))
        projections, factor = self._projections[:len(known)], self._factor[:len(known), :len(known)]
        for begin in range(0, len(known), BLOCK):
            block = slice(begin, begin + BLOCK)
            rows = np.stack([self._kernel(number) for number in known[block]])
            # What was solved for a config is the row of the factor that belongs to it.
            factor[block, :begin] = projections[:begin, known[block]].T
            rows -= factor[block, :begin] @ projections[:begin]
            noise = np.diag([self._noise(number) for number in known[block]])
            factor[block, block] = np.linalg.cholesky(rows[:, known[block]] + noise)
            projections[block] = np.linalg.solve(factor[block, block], rows)
        self._variance -= np.einsum("ij,ij->j", projections, projections)

    def _extend(self, number: int) -> None:
        """One more config whose time is, or will be, known."""
        count = len(self._known)
        self._make_room(count + 1)
        row = self._kernel(number)
        projection = self._projections[:count, number]
        pivot = math.sqrt(max(row[number] + self._noise(number) - projection @ projection, 1e-10))
        new = self._projections[count]
        new[:] = (row - projection @ self._projections[:count]) / pivot
        self._factor[count, :count], self._factor[count, count] = projection, pivot
        self._variance -= new**2
        self._known.append(number)

    def _make_room(self, count: int) -> None:
        """For so many that are known, where they are more than was said."""
        if count > len(self._factor):
            more = count + max(16, count // 2)
            factor, projections = _taken(more, more), _taken(more, len(self.configs))
            before = len(self._factor)
            factor[:before, :before], projections[:before] = self._factor, self._projections
            self._factor, self._projections = factor, projections

    def _posterior(self) -> tuple[Floats, Floats]:
        """Mean and deviation of every config, the best time told being 0."""
        deviation = np.sqrt(np.maximum(self._variance, 1e-12))
        if not self._told:
            return TRUST * self._predicted, deviation
        told, times = self._scaled()
        prior = TRUST * self._predicted
        prior += np.median(times - prior[told])
        surprise = np.zeros(len(self.configs))
        surprise[told] = times - prior[told]
        # Where a time is still to come, the expected one stands for it, which leaves every mean as it is: forward substitution
        # goes on with nothing new there.
        whitened = np.zeros(len(self._known))
        for place, number in enumerate(self._known):
            if not math.isnan(self._times[number]):
                expected = self._factor[place, :place] @ whitened[:place]
                whitened[place] = (surprise[number] - expected) / self._factor[place, place]
        return prior + whitened @ self._projections[:len(whitened)], deviation

    def _count(self, number: int, passed: bool) -> None:
        """Adds one fate to those that configs like it are judged by."""
        family = self._families[self._variant[number]]
        for count, value in zip(family.passed if passed else family.failed, family.numbers[self._row[number]], strict=True):
            count[value] += 1
        family.fails += not passed
        like = np.exp(-np.abs(family.places - family.places[self._row[number]]) @ np.full(family.places.shape[1], UNLIKE))
        self._tried_like[family.members] += like
        if passed:
            self._passed_like[family.members] += like

    def _chance(self) -> Floats:
        """That each config is not rejected, by the fate of those like it, and of all with the same value of a parameter."""
        chance: Floats = (self._passed_like + PASSED * PASSED_WEIGHT) / (self._tried_like + PASSED_WEIGHT)
        for family in self._families:
            for numbers, bad, good in zip(family.numbers.T, family.failed, family.passed, strict=True) if family.fails else ():
                rates = (good + PASSED) / (good + bad + 1.0)
                chance[family.members] = np.minimum(chance[family.members], rates[numbers])
        return chance**CAUTION

    # --- its fit -------------------------------------------------------------------------------------------------------------

    def _fit(self) -> None:
        self._fitted = len(self._told)
        if not self._told:
            return
        told, times = self._scaled()
        for number, family in enumerate(self._families):
            own = np.flatnonzero(self._variant[told] == number)
            if len(own) >= 6:
                own = own[::math.ceil(len(own) / FITTED)]
                _fit_family(family, family.places[self._row[told[own]]], self._predicted[told[own]], times[own])


def _fit_family(family: _Family, places: Floats, predicted: Floats, times: Floats) -> None:
    """One sweep over the parameters, each set to its likeliest step in turn, then signal and noise."""
    deviations = times - TRUST * predicted
    deviations = deviations - np.median(deviations)
    mean = 2 * OFFSET**2 + 2 * DISTRUST**2 * np.outer(predicted, predicted)
    apart = np.empty((len(family.steps), len(times), len(times)), np.uint8)  # whole steps
    for owner, steps_apart in enumerate(apart):
        own = places[:, family.owners == owner]
        steps_apart[:] = np.abs(own[:, None] - own[None]).sum(axis=2)

    def likelihood(steps: Floats, signal: float, noise: float) -> float:
        # With the deviations as one more row, the factor's last one is what forward substitution makes of them.
        bordered = np.zeros((len(times) + 1, len(times) + 1))
        gram = bordered[:-1, :-1]
        for step, steps_apart in zip(steps, apart, strict=True):
            gram -= step * steps_apart
        np.exp(gram, out=gram)
        gram *= signal**2
        gram += mean
        gram.flat[::len(times) + 1] += noise**2
        bordered[-1, :-1] = bordered[:-1, -1] = deviations
        bordered[-1, -1] = 1e9
        factor = np.linalg.cholesky(bordered)
        unusual = np.log(steps / STEPS[1])
        return float(-0.5 * factor[-1, :-1] @ factor[-1, :-1] - np.log(np.diag(factor)[:-1]).sum()
                     - STIFFNESS * unusual @ unusual)

    best = likelihood(family.steps, family.signal, family.noise)
    for place in range(len(family.steps)):
        if not apart[place].any():
            continue
        for step in STEPS:
            steps = family.steps.copy()
            steps[place] = step
            if (found := likelihood(steps, family.signal, family.noise)) > best:
                best, family.steps = found, steps
    for signal in SIGNALS:
        for noise in NOISES:
            if (found := likelihood(family.steps, signal, noise)) > best:
                best, family.signal, family.noise = found, signal, noise


def _taken(rows: int, columns: int) -> Floats:
    """Zeros in memory that is there: what a search needs it has from the beginning, or it does not begin."""
    return np.full((rows, columns), 0.0)


def _numbers(configs: Sequence[Config]) -> Ints:
    """The number of each parameter's value among its choices, for configs of one variant, [configs, parameters]."""
    choices = variant_of(configs[0].variant).choices.values()
    places = [{value: number for number, value in enumerate(values)} for values in choices]
    return np.array([[place[value] for place, (_, value) in zip(places, config.params, strict=True)] for config in configs])


def _places(variant: str) -> list[Floats]:
    """For each parameter, where its choices stand: at a number, neighbours one apart; or, where they are names, at a corner, any
    two of them one apart."""
    return [0.5 * np.eye(len(values)) if isinstance(values[0], str) else np.arange(len(values), dtype=np.float64)[:, None]
            for values in variant_of(variant).choices.values()]


def _expected_improvement(gain: Floats, deviation: Floats) -> Floats:
    """Of normal variables `gain` above what is known, with that deviation."""
    z = gain / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    improvement: Floats = gain * _normal(z) + deviation * density
    return np.maximum(improvement, 0.0)


def _normal(z: Floats) -> Floats:
    """The normal distribution function, by the logistic function that comes within 1.5e-4 of it (Page, 1977)."""
    return 1.0 / (1.0 + np.exp(-np.clip(2.0 * math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3), -500.0, 500.0)))
