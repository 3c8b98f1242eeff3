"""The search through spaces too large to try whole: an Optuna study whose sampler asks a model of the times (tuner/surrogate.py).

The sampler proposes only what can run and was not tried. It begins with what somebody names, each variant's best predicted config
and default and, now and then, a random one, which no opinion of the cost model keeps away; the rest is the model's choice.
All that is known lies in the study: a trial is a config, its value is the time, and one that was rejected is pruned.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, cast

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.storages import InMemoryStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from codegen.config import Config
from codegen.space import make_config, variant_of
from tuner.candidates import Neighbourhood, nearest
from tuner.surrogate import Surrogate

EARLY, ONE_IN = 32, 4
"""Of the first so many trials, one in so many is random."""

MOST, RECENTRED = 6144, 48
"""Configs the model chooses among at a time. Where there are more, it is given others after every so many trials: what lies round
the best ones, what is predicted to be fastest, and random ones."""

CENTRES, REACH = 4, 2
"""What lies round the best: what differs from one of so many in so many parameters at most."""

_VARIANT = "variant"


class Guided:
    """A strategy: the study, the sampler, and the trials that are open.

    Args:
        candidates: all configs that may be tried.
        predicted: microseconds by the cost model, of some or all of them.
        budget: the largest number of configs to give out.
        seed: of everything random.
        first: configs to begin with, those that are candidates.
        tried: what an earlier run has tried, and the times, None where it was rejected. They count as given out.

    Attributes:
        study: Optuna's.
    """

    def __init__(self, candidates: Sequence[Config], predicted: Mapping[Config, float], budget: int, seed: int,
                 first: Sequence[Config] = (), tried: Mapping[Config, float | None] | None = None) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        tried = tried or {}
        self._left = max(0, min(budget - len(tried), len(set(candidates) - set(tried))))
        self._sampler = ModelSampler(candidates, predicted, seed, first, self._left + len(tried))
        self.study = optuna.create_study(storage=SharingStorage(self._sampler.candidate), sampler=self._sampler)
        self.study.add_trials(self._sampler.as_trial(config, time_us) for config, time_us in tried.items())
        self._open: dict[Config, Trial] = {}

    def ask(self, count: int) -> list[Config]:
        """As Strategy.ask."""
        chosen = [self._next() for _ in range(min(count, self._left))]
        self._left -= len(chosen)
        return chosen

    def _next(self) -> Config:
        trial = self.study.ask()
        variant = str(trial.suggest_categorical(_VARIANT, self._sampler.variants))
        choices = variant_of(variant).choices
        values: dict[str, Any] = {name: trial.suggest_categorical(key, choices[name]) for name, key in _keys(variant).items()}
        config = self._sampler.candidate(Config(variant, tuple(values.items())))
        self._open[config] = trial
        return config

    def tell(self, config: Config, time_us: float | None) -> None:
        """As Strategy.tell."""
        trial = self._open.pop(config)
        if time_us is None:
            self.study.tell(trial, state=TrialState.PRUNED)
        else:
            self.study.tell(trial, time_us)


class ModelSampler(BaseSampler):
    """Proposes whole configs. It learns from the study's trials alone, whoever ran them.

    Args:
        candidates, predicted, seed, first: as Guided.
        budget: of trials; it tells how much memory to take.
        variants: the choices of the parameter `variant`, which all who share a study agree in; None: those of the candidates.

    Attributes:
        variants: the same.
    """

    def __init__(self, candidates: Sequence[Config], predicted: Mapping[Config, float], seed: int,
                 first: Sequence[Config], budget: int = 0, variants: Sequence[str] | None = None) -> None:
        there = dict.fromkeys(config.variant for config in candidates)
        self.variants = tuple(there if variants is None else variants)
        self._candidates = candidates
        self._predicted = predicted
        self._seed = seed
        self._all = {config: config for config in candidates}
        self._starts = [config for config in dict.fromkeys((*first, *self._own_starts())) if config in self._all]
        self._tried: dict[Config, float | None] = {}  # in order, with what was told of it: NaN where nothing was yet
        self._tolds = 0
        self._finished = bytearray()  # of each trial, whether it is
        self._budget = budget
        self._neighbours = by_variant(candidates) if len(candidates) > MOST else {}
        self._model = self._fresh_model()

    def _own_starts(self) -> list[Config]:
        """What is predicted to be each variant's fastest, then each one's default; fast ones first, as time may be short."""
        def time(config: Config) -> float:
            return self._predicted.get(config, float("inf"))

        fastest, defaults = list[Config](), list[Config]()
        for variant in dict.fromkeys(config.variant for config in self._candidates):
            own = [config for config in self._candidates if config.variant == variant]
            default = nearest(make_config(variant), own)
            fastest.append(min(own, key=time))
            defaults += [] if default is None else [default]
        return [*sorted(fastest, key=time), *sorted(defaults, key=time)]

    def candidate(self, config: Config) -> Config:
        """The candidate that equals a config, where there is one: one object, however many trials name it."""
        return self._all.get(config, config)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The parameters of the config that is proposed for this trial."""
        proposed = self.propose(study.get_trials(deepcopy=False), trial.number)
        assert proposed is not None  # there are never more trials than candidates
        self._proposed = proposed
        return as_distributions(proposed.variant, self.variants)

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """Their values."""
        return as_params(self._proposed)

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution) -> Any:
        """Not asked for: every parameter is sampled with the others."""
        raise AssertionError(param_name)

    def as_trial(self, config: Config, time_us: float | None) -> FrozenTrial:
        """A trial of the config that was finished somewhere else."""
        state = TrialState.PRUNED if time_us is None else TrialState.COMPLETE
        return optuna.trial.create_trial(state=state, value=time_us, params=as_params(config),
                                         distributions=as_distributions(config.variant, self.variants))

    def propose(self, trials: Sequence[FrozenTrial], number: int) -> Config | None:
        """A config of which there is no trial, in view of all trials there are; None where there is one of each.

        Args:
            trials: in the order of their numbers.
            number: of the trial that is to have the config.
        """
        self._learn(trials)
        proposed = self._choose(number)
        if proposed is not None:
            self._take(proposed)
        return proposed

    def _choose(self, number: int) -> Config | None:
        while self._starts:
            start = self._starts.pop(0)
            if start not in self._tried:
                return start
        rng = random.Random(f"{self._seed} {number}")
        if number < EARLY and number % ONE_IN == 0:
            left = [config for config in self._candidates if config not in self._tried]
            return rng.choice(left) if left else None
        chosen = self._model.choose()
        # The model knows a part of a large space; where all of that was tried, anything else will do.
        return next((config for config in self._candidates if config not in self._tried), None) if chosen is None else chosen

    def _take(self, config: Config) -> None:
        self._tried[config] = math.nan
        if config in self._model:
            self._model.take(config)

    def _learn(self, trials: Sequence[FrozenTrial]) -> None:
        """Takes in what became of trials, and which others there are."""
        self._finished.extend(bytes(max(0, len(trials) - len(self._finished))))
        for trial in trials:
            if self._finished[trial.number] or (found := config_of(trial.params)) not in self._all:
                continue
            config = self._all[found]
            if config not in self._tried:
                self._take(config)
            if trial.state.is_finished():
                self._finished[trial.number] = True
            if trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
                self._tolds += _untold(self._tried[config])
                self._tried[config] = trial.value
                if config in self._model:
                    self._model.tell(config, trial.value)
        if self._neighbours and self._tolds >= self._recentred + RECENTRED:
            del self._model  # two of them would take twice the memory
            self._model = self._fresh_model()

    def _fresh_model(self) -> Surrogate:
        """The model with what is known so far, of all candidates or of a part of them that is worth a look now."""
        self._recentred = self._tolds
        chosen = self._candidates
        told = {config: time for config, time in self._tried.items() if not _untold(time)}
        if self._neighbours:
            timed = {config: time for config, time in told.items() if time is not None}
            best = sorted(timed, key=timed.__getitem__)[:CENTRES]
            near = [config for centre in best for config in self._neighbours[centre.variant].within(centre, REACH)[:MOST // 8]]
            fastest = sorted(self._predicted, key=self._predicted.__getitem__)[:MOST // 4]
            others = random.Random(f"{self._seed} {self._recentred}").sample(self._candidates, MOST // 4)
            chosen = list(dict.fromkeys((*self._tried, *near, *fastest, *others)))
        model = Surrogate(chosen, self._predicted, self._budget)
        model.recall(self._tried, told)
        return model


def _untold(time_us: float | None) -> bool:
    return time_us is not None and math.isnan(time_us)


class SharingStorage(InMemoryStorage):
    """Optuna's storage in this process, in which finished trials share what is the same in many of them and never changes again:
    the distributions of a variant, the config behind the parameters, attributes and intermediate values, of which there are
    none, and the date, which is that of the study.

    Args:
        candidate: as ModelSampler.candidate.
    """

    def __init__(self, candidate: Callable[[Config], Config] = lambda config: config) -> None:
        super().__init__()
        self._candidate = candidate
        self._spaces: dict[tuple[str, ...], dict[str, BaseDistribution]] = {}
        self._nothing: dict[Any, Any] = {}
        self._date = datetime.now()
        self._trial_id_to_study_id_and_number = cast(dict[int, tuple[int, int]], _Numbers())

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """As InMemoryStorage."""
        done = super().set_trial_state_values(trial_id, state, values)
        trial = self._get_trial(trial_id)
        trial.distributions = self._spaces.setdefault(tuple(trial.distributions), trial.distributions)
        if not state.is_finished():
            return done
        trial.number = trial_id
        trial.datetime_start = trial.datetime_complete = self._date
        if not (trial.user_attrs or trial.system_attrs or trial.intermediate_values):
            trial.user_attrs = trial.system_attrs = trial.intermediate_values = self._nothing
        if (config := config_of(trial.params)) is not None:
            trial.params = cast(dict[str, Any], _Params(self._candidate(config)))
        return done


class _Numbers:
    """Of each trial, by its id, its study and its number there, as Optuna keeps them for many studies. In a single one the number
    is the id, and only their count is kept."""

    def __init__(self) -> None:
        self._count = 0

    def __setitem__(self, trial_id: int, study_and_number: tuple[int, int]) -> None:
        assert trial_id == self._count and study_and_number == (0, trial_id)
        self._count += 1

    def __getitem__(self, trial_id: int) -> tuple[int, int]:
        if trial_id not in self:
            raise KeyError(trial_id)
        return 0, trial_id

    def __contains__(self, trial_id: int) -> bool:
        return 0 <= trial_id < self._count


class _Params(Mapping[str, Any]):
    """as_params of a config, without a dictionary of its own."""

    __slots__ = ("_config",)

    def __init__(self, config: Config) -> None:
        self._config = config

    def __getitem__(self, key: str) -> Any:
        return as_params(self._config)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(as_params(self._config))

    def __len__(self) -> int:
        return 1 + len(self._config.params)


def by_variant(configs: Sequence[Config]) -> dict[str, Neighbourhood]:
    """The configs of each variant."""
    variants = dict.fromkeys(config.variant for config in configs)
    return {variant: Neighbourhood([config for config in configs if config.variant == variant]) for variant in variants}


def as_params(config: Config) -> dict[str, Any]:
    """A config as the parameters of a trial: the variant, and under its name its own parameters."""
    keys = _keys(config.variant)
    return {_VARIANT: config.variant, **{keys[name]: value for name, value in config.params}}


def as_distributions(variant: str, variants: Sequence[str]) -> dict[str, BaseDistribution]:
    """The choices of the parameters that as_params gives a config of that variant."""
    choices = variant_of(variant).choices
    return {_VARIANT: CategoricalDistribution(variants), **{
        key: CategoricalDistribution(choices[name]) for name, key in _keys(variant).items()}}


def config_of(params: Mapping[str, Any]) -> Config | None:
    """The config of a trial; None while its parameters are being set."""
    variant = params.get(_VARIANT)
    if variant is None:
        return None
    keys = _keys(variant)
    if not all(key in params for key in keys.values()):
        return None
    return Config(variant, tuple((name, params[key]) for name, key in keys.items()))


@functools.cache
def _keys(variant: str) -> Mapping[str, str]:
    """What a variant's parameters are called in a trial. Thousands of trials share these texts."""
    return {name: f"{variant}.{name}" for name in variant_of(variant).choices}
