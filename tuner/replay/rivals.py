"""The tuner's search, with the cost model and without, and others to compare with: random order, the cost model's order, plain
TPE, and strategies of Kernel Tuner.

Each is a function of the field, how many configs to try, and a seed; it returns the configs in the order in which it tried them,
each at its first evaluation. Nothing is compiled ahead for the others: they know all times so far when they choose the next
config.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import optuna
from optuna.trial import TrialState, create_trial

from codegen.config import Config, Value
from codegen.space import make_config, variant_of
from tuner.pipeline import IN_FLIGHT
from tuner.replay.field import Field, play
from tuner.search import Guided, as_distributions, as_params, by_variant
from tuner.strategy import Listed

Rival = Callable[[Field, int, int], list[Config]]

OURS = "guided"

KERNEL_TUNER = ("genetic_algorithm", "greedy_ils", "diff_evo", "simulated_annealing", "hybrid_vndx", "adaptive_tabu_greywolf",
                "bayes_opt")
"""Strategies of Kernel Tuner that its authors recommend or found best: Willemsen, van Nieuwpoort and van Werkhoven, "Bayesian
Optimization for Auto-Tuning GPU Kernels", 2021 (bayes_opt); Schoonhoven, van Werkhoven and Batenburg, "Benchmarking Optimization
Algorithms for Auto-Tuning GPU Kernels", 2022 (greedy_ils, genetic_algorithm, simulated_annealing); and two that a language model
wrote for it in 2025 (hybrid_vndx, adaptive_tabu_greywolf)."""


def guided(field: Field, budget: int, seed: int) -> list[Config]:
    """The tuner's own search, told times as late as in a tuning run."""
    return play(Guided(field.candidates, field.predicted, budget, seed), field, budget, IN_FLIGHT)


def unaided(field: Field, budget: int, seed: int) -> list[Config]:
    """The same search where the cost model has no opinion, neither on times nor on an order; and told every time at once."""
    mixed = random.Random(seed).sample(sorted(field.candidates, key=str), len(field.candidates))
    return play(Guided(mixed, {}, budget, seed), field, budget, 1)


def random_order(field: Field, budget: int, seed: int) -> list[Config]:
    """Any config as good as any other."""
    return random.Random(seed).sample(field.candidates, min(budget, len(field.candidates)))


def predicted_order(field: Field, budget: int, seed: int) -> list[Config]:
    """The cost model's favourites, one after another."""
    return play(Listed(field.candidates), field, budget, 1)


def plain_tpe(field: Field, budget: int, seed: int) -> list[Config]:
    """Optuna's TPE as it comes, the variant one parameter and its own parameters below it. Few proposals can run: the nearest
    config that can, and was not tried, stands in for each."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    left = by_variant(field.candidates)
    tried: list[Config] = []
    while len(tried) < min(budget, len(field.candidates)):
        trial = study.ask()
        variant = str(trial.suggest_categorical("variant", tuple(left)))
        values: dict[str, Any] = {name: trial.suggest_categorical(f"{variant}.{name}", options)
                                  for name, options in variant_of(variant).choices.items()}
        study.tell(trial, state=TrialState.FAIL)  # nothing is learned from it, but from what stands in for it
        config = left[variant].nearest(Config(variant, tuple(values.items())))
        if config is None:  # nothing is left of the variant
            config = next(filter(None, (others.nearest(make_config(name)) for name, others in left.items())))
        left[config.variant].take(config)
        tried.append(config)
        time_us = field.times.get(config)
        study.add_trial(create_trial(
            state=TrialState.PRUNED if time_us is None else TrialState.COMPLETE, value=time_us, params=as_params(config),
            distributions=as_distributions(config.variant, tuple(left))))
    return tried


def kernel_tuner(strategy: str, field: Field, budget: int, seed: int) -> list[Config]:
    """A strategy of Kernel Tuner with its own defaults, in its simulation mode."""
    from tuner.replay.kernel_tuner import simulate

    choices, configs = _table(field)
    times = {row: field.times.get(config) for row, config in configs.items()}
    return [configs[row] for row in simulate(strategy, choices, times, budget, seed)]


def _table(field: Field) -> tuple[dict[str, list[Value]], dict[tuple[Value, ...], Config]]:
    """The choices of every parameter of any variant, and each config as a row of them. What a variant lacks is 0 or "-"."""
    names: dict[str, list[Value]] = {"variant": []}
    absent: dict[str, Value] = {}
    for config in field.candidates:
        for name, value in config.params:
            names.setdefault(name, [])
            absent.setdefault(name, "-" if isinstance(value, str) else 0)
    rows: dict[tuple[Value, ...], Config] = {}
    for config in field.candidates:
        own = {**absent, **config.as_dict(), "variant": config.variant}
        rows[tuple(own[name] for name in names)] = config
    choices = {name: sorted({row[place] for row in rows}, key=lambda value: (isinstance(value, str), value))
               for place, name in enumerate(names)}
    return choices, rows


def rivals() -> dict[str, Rival]:
    """By name; those of Kernel Tuner where it is installed."""
    found: dict[str, Rival] = {
        OURS: guided, "unaided": unaided, "random": random_order, "predicted": predicted_order, "tpe": plain_tpe}
    if importlib.util.find_spec("kernel_tuner") is not None:
        found |= {f"kt {name}": partial(kernel_tuner, name) for name in KERNEL_TUNER}
    return found
