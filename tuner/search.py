"""The search through spaces too large to try whole: one Optuna study per variant family, and a budget that moves to the best.

Each family has a study of its own, since TPE models the joint space of parameters that occur in every trial, and two
variants share none. Parameters are categorical. A combination that is not valid is told PRUNED with its constraint violated,
so that the sampler learns from it, and the nearest valid one is tried in its place: valid combinations are a few per cent of
all, and on predicted times of several shapes this came closer to the optimum than asking again. One that was tried before is told
what came of it, and the nearest that was not is tried.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import Trial, TrialState, create_trial

from codegen.config import Config, Value
from codegen.space import make_config, variant_of
from tuner.candidates import Space
from tuner.strategy import Pool

STARTS = 16
"""Trials of a family before its sampler is asked: its default, the best predicted, and random ones."""

PREDICTED_STARTS = 5

_VALID = "valid"
"""The constraint that a trial violates when its config cannot run, or ran and was rejected."""


class Family:
    """The trials of one variant.

    Args:
        variant: its name.
        space: all candidates.
        pool: those not tried yet.
        predicted: the variant's valid configs, fastest predicted first.
        seed: of the sampler and the random starts.
        on_refused: called for each config the sampler proposed that is not valid, with the reason.
    """

    def __init__(self, variant: str, space: Space, pool: Pool, predicted: Sequence[Config], seed: int,
                 on_refused: Callable[[Config, str], None]) -> None:
        self.variant = variant
        self._space = space
        self._pool = pool
        self._on_refused = on_refused
        self._starts = self._first(predicted, random.Random(seed))
        self._choices = variant_of(variant).choices
        self._trials: dict[Config, Trial] = {}
        self._told: dict[Config, float | None] = {}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=1))

    def _first(self, predicted: Sequence[Config], rng: random.Random) -> list[Config]:
        default = self._pool.nearest(make_config(self.variant))
        if default is None or not predicted:
            return []
        chosen = dict.fromkeys((default, *predicted[:PREDICTED_STARTS]))
        others = [config for config in predicted[PREDICTED_STARTS:] if config != default]
        return [*chosen, *rng.sample(others, min(len(others), STARTS - len(chosen)))]

    @property
    def best_us(self) -> float:
        """The time of its fastest config so far; infinite before there is one."""
        return self._pool.best_us(self.variant)

    @property
    def exhausted(self) -> bool:
        """Whether every valid config of the variant was given out."""
        return not self._pool.left(self.variant)

    def ask(self) -> Config | None:
        """The next config; None where all were given out."""
        while self._starts:
            config = self._starts.pop(0)
            if self._pool.take(config):
                return config
        if self.exhausted:
            return None
        trial = self._study.ask()
        chosen = {name: trial.suggest_categorical(name, options) for name, options in self._choices.items()}
        proposed = make_config(self.variant, {name: str(value) for name, value in chosen.items()})
        if self._pool.take(proposed):
            self._trials[proposed] = trial
            return proposed
        if reason := self._space.why_not(proposed):
            self._reject(trial)
            self._on_refused(proposed, reason)
        elif proposed in self._told:
            self._finish(trial, self._told[proposed])
        else:
            self._study.tell(trial, state=TrialState.FAIL)  # still open: nothing is known of it, so nothing is learned
        instead = self._pool.nearest(proposed)
        assert instead is not None
        self._pool.take(instead)
        return instead

    def tell(self, config: Config, time_us: float | None) -> None:
        """The time of a config, or None where it was rejected."""
        self._told[config] = time_us
        trial = self._trials.pop(config, None)
        if trial is None:
            self._add(config, time_us)
        else:
            self._finish(trial, time_us)

    def _finish(self, trial: Trial, time_us: float | None) -> None:
        if time_us is None:
            self._reject(trial)
        else:
            self._study.tell(trial, time_us)

    def _reject(self, trial: Trial) -> None:
        trial.set_constraint(_VALID, 1.0)
        self._study.tell(trial, state=TrialState.PRUNED)

    def _add(self, config: Config, time_us: float | None) -> None:
        """A trial that the sampler did not propose."""
        params: dict[str, Value] = config.as_dict()
        distributions: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(options) for name, options in self._choices.items()}
        self._study.add_trial(create_trial(
            state=TrialState.PRUNED if time_us is None else TrialState.COMPLETE, value=time_us, params=params,
            distributions=distributions, constraints={_VALID: 1.0} if time_us is None else None))


class Families:
    """A strategy that tries every family, and after each round goes on with the better half of them.

    Args:
        space: all candidates.
        pool: those not tried yet.
        predicted: the valid configs, fastest predicted first.
        budget: the largest number of configs to give out.
        seed: of everything random.
        on_refused: as in Family.
    """

    def __init__(self, space: Space, pool: Pool, predicted: Sequence[Config], budget: int, seed: int,
                 on_refused: Callable[[Config, str], None]) -> None:
        self._pool = pool
        self._budget = budget
        self._families = [
            Family(name, space, pool, [config for config in predicted if config.variant == name], seed + number, on_refused)
            for number, name in enumerate(space.variants)]
        self._width = len(self._families)
        self._quota: dict[Family, int] = {}
        self._open = 0
        self._begin_round()

    def ask(self, count: int) -> list[Config]:
        """As Strategy.ask."""
        chosen: list[Config] = []
        while len(chosen) < count:
            ready = [family for family, quota in self._quota.items() if quota > 0 and not family.exhausted]
            if not ready:
                if self._open or chosen or self._budget == 0 or all(family.exhausted for family in self._families):
                    break
                self._width = -(-self._width // 2)
                self._begin_round()
                continue
            for family in ready[:count - len(chosen)]:
                config = family.ask()
                if config is not None:
                    self._quota[family] -= 1
                    self._budget -= 1
                    chosen.append(config)
        self._open += len(chosen)
        return chosen

    def tell(self, config: Config, time_us: float | None) -> None:
        """As Strategy.tell."""
        self._open -= 1
        self._pool.tell(config, time_us)
        next(family for family in self._families if family.variant == config.variant).tell(config, time_us)

    def _begin_round(self) -> None:
        """Shares a round's part of the budget among the best families that have something left to try."""
        rounds = (self._width - 1).bit_length() + 1
        ready = sorted((family for family in self._families if not family.exhausted), key=lambda family: family.best_us)
        chosen = ready[:self._width]
        share = self._budget // rounds
        self._quota = {family: share // len(chosen) + (number < share % len(chosen)) for number, family in enumerate(chosen)}
