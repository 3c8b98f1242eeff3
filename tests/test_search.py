"""The search: which candidates there are, which of them are tried, in which order, and what is learned. Times are made up."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from statistics import median
from unittest import mock

import optuna
import pytest
from optuna.distributions import CategoricalDistribution

from codegen.config import Config
from codegen.limits import Limits, target
from codegen.problem import Problem, Shape
from codegen.space import all_configs, make_config, parse_config
from codegen.variant import Clash, Params
from codegen.variants import VARIANTS
from tests import big_space
from tests.fake_gpu import rugged
from tuner.candidates import Neighbourhood, Space, distance, nearest, survey, without_figures
from tuner.costmodel import predict
from tuner.guess import RANK_ALL, rank
from tuner.pipeline import IN_FLIGHT
from tuner.search import MOST, Guided, ModelSampler, as_params
from tuner.strategy import Listed, Strategy
from tuner.surrogate import Surrogate

SHAPE = "4,4,8,16"


@cache
def space(shape: str = SHAPE, variants: tuple[str, ...] | None = None) -> Space:
    return survey(Problem.of(Shape.parse(shape)), target("sm_90"), variants)


def drive(strategy: Strategy, times: Callable[[Config], float | None], ahead: int = 1) -> list[Config]:
    """Plays the tuner: keeps `ahead` candidates open, and tells their times in the order in which they were asked for."""
    asked: list[Config] = []
    told = 0
    while True:
        asked += strategy.ask(ahead - (len(asked) - told))
        if told == len(asked):
            return asked
        strategy.tell(asked[told], times(asked[told]))
        told += 1


# --- the space ---------------------------------------------------------------------------------------------------------------


def test_survey_accounts_for_every_combination() -> None:
    found = space()
    assert found.combinations == len(found.valid) + sum(found.refused.values())
    assert all(found.why_not(config) is None for config in found.valid[::50])
    assert found.why_not(parse_config("row_warp:reduction=single_block,splits=64")) is not None


def test_like_reasons_count_together() -> None:
    assert without_figures("needs 123 bytes where 1.5e3 are") == without_figures("needs 7 bytes where 1.5e3 are")
    assert without_figures("sm_90 and two2") == "sm_90 and two2"


def test_a_reason_has_the_figures_of_one_config() -> None:
    found = space("1,64,4096,4096", ("row_warp",))
    whole = {found.why_not(config) for config in all_configs(["row_warp"])} - {None}
    assert set(found.refused) < whole  # reasons as they are; of those that differ in figures alone, one
    assert len({without_figures(reason) for reason in found.refused}) == len(found.refused)
    assert any("bytes" in reason for reason in found.refused)


def test_nearest_config() -> None:
    config = make_config("row_warp")
    close, far = make_config("row_warp", {"warps": 8}), make_config("row_warp", {"warps": 8, "rows": 4})
    assert distance(config, close) < distance(config, far)
    assert nearest(config, [far, make_config("row_thread"), close]) == close
    assert nearest(config, [make_config("row_thread")]) is None


def test_a_neighbourhood_orders_by_distance_and_forgets_what_was_taken() -> None:
    valid = [config for config in space().valid if config.variant == "row_shared"]
    centre = valid[700]
    left = Neighbourhood(valid)
    near = left.within(centre, 2)
    assert near == sorted((config for config in valid if distance(centre, config)[0] <= 2), key=lambda c: distance(centre, c))
    assert near[0] == centre == left.nearest(centre)
    assert left.take(centre) and not left.take(centre)
    assert left.nearest(centre) == near[1] and left.within(centre, 2) == near[1:]
    assert len(left) == len(valid) - 1


# --- strategies --------------------------------------------------------------------------------------------------------------


def test_a_list_is_tried_in_its_order_and_never_twice() -> None:
    configs = list(space().valid[:6])
    assert drive(Listed([*configs, *configs]), rugged, ahead=4) == configs


def guided(budget: int, seed: int = 0, variants: tuple[str, ...] | None = None, first: tuple[Config, ...] = ()) -> Guided:
    among = space(SHAPE, variants)
    return Guided(among.valid, rank(among), budget, seed, first)


def test_no_config_is_tried_twice_and_the_budget_is_kept() -> None:
    tried = drive(guided(120), rugged, ahead=8)
    assert len(tried) == len(set(tried)) == 120
    assert set(tried) <= set(space().valid)
    assert {config.variant for config in tried} == {config.variant for config in space().valid}


def test_a_space_is_tried_to_its_end() -> None:
    small = ("row_thread",)
    assert set(drive(guided(1000, variants=small), rugged, ahead=8)) == set(space(SHAPE, small).valid)


def test_the_default_and_the_best_predicted_of_each_variant_come_first() -> None:
    among = space()
    ranked = rank(among)
    tried = drive(guided(3 * len(among.variants)), rugged)  # two of each, and random ones between them
    for name in dict.fromkeys(config.variant for config in ranked):
        own = [config for config in ranked if config.variant == name]
        assert nearest(make_config(name), among.valid) in tried and own[0] in tried


def test_what_somebody_names_comes_before_all_else_where_it_is_a_candidate() -> None:
    valid = space().valid
    refused = next(config for config in all_configs(["row_warp"]) if config not in set(valid))
    assert drive(guided(5, first=(valid[7], refused, valid[3])), rugged)[:2] == [valid[7], valid[3]]


@pytest.mark.parametrize("ahead", [1, IN_FLIGHT])
def test_the_same_seed_and_times_lead_to_the_same_choices(ahead: int) -> None:
    first, again, other = (drive(guided(60, seed), rugged, ahead=ahead) for seed in (4, 4, 5))
    assert first == again != other


@pytest.mark.parametrize("favourite", ["row_warp", "weight_stream"])
def test_the_budget_moves_to_the_fastest_variant(favourite: str) -> None:
    """Three tenths of the budget go to a variant that has a twentieth of the configs, and much less to each other one.

    Rounding in the model's last digits, which differs between CPUs, leads to other choices: a third of the budget is usual.
    """
    def prices(config: Config) -> float:
        return rugged(config) + (0.0 if config.variant == favourite else 20.0)

    valid = Counter(config.variant for config in space().valid)
    assert valid[favourite] < valid.total() / 15
    counts = Counter(config.variant for config in drive(guided(120), prices, ahead=8))
    assert counts[favourite] > 120 * 0.3
    assert max(count for variant, count in counts.items() if variant != favourite) < counts[favourite] / 1.5


def test_rejected_configs_keep_the_search_away_from_those_like_them() -> None:
    """A quarter of a variant cannot run, most of what is predicted to be fastest; the search soon leaves it."""
    among = space(SHAPE, ("row_shared",))
    bad = {config for config in among.valid if config["reduction"] == "single_block"}
    tried = drive(guided(80, variants=("row_shared",)), lambda config: None if config in bad else rugged(config), ahead=4)
    assert sum(config in bad for config in tried[20:]) <= 8  # of 60, where 15 would be usual by chance


def test_a_search_in_which_everything_fails_still_ends() -> None:
    assert len(drive(guided(50), lambda config: None, ahead=8)) == 50


def test_the_search_learns_from_trials_that_others_ran() -> None:
    """All that is known lies in the study: what another worker has tried is not tried again, and its times count."""
    among = space(SHAPE, ("row_warp",))
    study = optuna.create_study(sampler=ModelSampler(among.valid, rank(among), 0, ()))
    theirs = among.valid[5:25]
    distributions = {"variant": CategoricalDistribution(("row_warp",)), **{
        f"row_warp.{name}": CategoricalDistribution(values) for name, values in VARIANTS["row_warp"].choices.items()}}
    for config in theirs:
        study.add_trial(optuna.trial.create_trial(params=as_params(config), distributions=distributions, value=rugged(config)))
    best = min(theirs, key=rugged)
    proposed = []
    for _ in range(len(among.valid) - len(theirs)):
        trial = study.ask()
        values = {name: trial.suggest_categorical(name, distribution.choices) for name, distribution in distributions.items()}
        proposed.append(make_config("row_warp", {name.partition(".")[2]: value for name, value in values.items() if "." in name}))
        study.tell(trial, rugged(proposed[-1]))
    assert len(set(proposed)) == len(proposed) and not set(proposed) & set(theirs)
    early = [config for config in proposed[2:14] if distance(best, config)[0] <= 2]
    assert len(early) >= 4


# --- the model ---------------------------------------------------------------------------------------------------------------


def test_the_model_believes_predictions_until_it_knows_better() -> None:
    among = space(SHAPE, ("row_warp",))
    ranked = rank(among)
    model = Surrogate(among.valid, ranked)
    upside_down = {config: 1e3 / time for config, time in ranked.items()}
    favourite = model.choose()
    assert favourite is not None and ranked[favourite] <= min(ranked.values()) * (1 + 1e-9)  # several are predicted to be alike
    rng = random.Random(0)
    tried = rng.sample(among.valid, 30)
    for config in tried:
        model.take(config)
        model.tell(config, upside_down[config])
    left = [config for config in among.valid if config not in tried]
    best = sorted(left, key=upside_down.__getitem__)[:len(left) // 4]
    assert model.choose() in best


def test_what_is_open_is_not_chosen_again_nor_what_is_just_like_it() -> None:
    among = space(SHAPE, ("row_shared",))
    model = Surrogate(among.valid, {})
    chosen: list[Config] = []
    for _ in range(8):
        config = model.choose()
        assert config is not None
        model.take(config)
        chosen.append(config)
    assert len(set(chosen)) == 8
    assert min(distance(a, b)[0] for number, a in enumerate(chosen) for b in chosen[:number]) >= 2


def test_recalling_is_the_same_as_being_told_one_by_one() -> None:
    """As far as no fit, which is done at other times, comes between: before six times of a variant are known."""
    among = space(SHAPE, ("row_warp", "row_shared"))
    told = {config: rugged(config) for name in among.variants
            for config in random.Random(0).sample([config for config in among.valid if config.variant == name], 5)}
    slow, quick, unaware = (Surrogate(among.valid, rank(among)) for _ in range(3))
    quick.recall(told, told)
    for config, time_us in told.items():
        slow.take(config)
        slow.tell(config, time_us)
    chosen: list[list[Config]] = []
    for model in (slow, quick, unaware):
        chosen.append([])
        for _ in range(6):
            config = model.choose()
            assert config is not None
            model.take(config)
            chosen[-1].append(config)
    assert chosen[0] == chosen[1] != chosen[2]
    assert not set(told) & set(chosen[1])


# --- big spaces --------------------------------------------------------------------------------------------------------------

LARGE = Problem(8192, 4096, 12288)


def test_a_million_combinations_are_surveyed_in_seconds() -> None:
    with big_space.registered():
        began = time.process_time()
        found = survey(LARGE, target("sm_90"), [big_space.NAME])
        assert time.process_time() - began < 30
        assert found.combinations == math.prod(len(values) for values in big_space.CHOICES.values()) > 1_500_000
        assert found.combinations == len(found.valid) + sum(found.refused.values())
        assert len(set(found.valid)) == len(found.valid) > 500_000


def test_clashes_refuse_what_one_rule_for_all_would() -> None:
    with big_space.registered(big_space.FEW):
        clashing = survey(LARGE, target("sm_90"), [big_space.NAME])
        refused = next(config for config in all_configs([big_space.NAME]) if config not in set(clashing.valid))
        assert clashing.why_not(refused)
    with big_space.registered(big_space.FEW, clashes=False):
        at_once = survey(LARGE, target("sm_90"), [big_space.NAME])
        assert at_once.why_not(refused) == clashing.why_not(refused)
    assert clashing.valid == at_once.valid


def test_a_rule_is_given_the_parameters_it_names_and_is_asked_once_for_each_combination_of_them() -> None:
    asked: list[tuple[int, ...]] = []

    def refuses(problem: Problem, params: Params, limits: Limits) -> str | None:
        assert set(params) == {"warps", "stages"}
        asked.append((int(params["warps"]), int(params["stages"])))
        return "no" if params["warps"] == 2 else None

    variant = replace(big_space.variant(big_space.FEW), clashes=(Clash(("stages", "warps"), refuses),))
    with big_space.registered(big_space.FEW), mock.patch.dict(VARIANTS, {big_space.NAME: variant}):  # type: ignore[arg-type]
        found = survey(LARGE, target("sm_90"), [big_space.NAME])
    assert len(asked) == len(set(asked)) == 8
    assert found.refused["no"] == found.combinations // 4


def test_a_big_space_is_ranked_by_a_sample_and_what_lies_round_its_best() -> None:
    with big_space.registered(big_space.FEW):
        found = survey(LARGE, target("sm_90"), [big_space.NAME])
        ranked = rank(found)
        assert len(found.valid) > RANK_ALL >= len(ranked)
        assert list(ranked.values()) == sorted(ranked.values())
        best = min(predict(LARGE, config, target("sm_90")).time_us for config in found.valid)
        assert next(iter(ranked.values())) <= 1.02 * best


def test_a_small_space_is_ranked_whole() -> None:
    ranked = rank(space())
    assert set(ranked) == set(space().valid)
    assert list(ranked.values()) == sorted(ranked.values())


def test_two_hundred_candidates_of_a_big_space_come_near_the_best() -> None:
    """Within five per cent in the median of three seeds, though no prediction helps; random ones stay twenty per cent behind."""
    with big_space.registered(big_space.FEW):
        found = survey(LARGE, target("sm_90"), [big_space.NAME])
        assert len(found.valid) > MOST
        best = min(big_space.time_us(config) for config in found.valid)
        reached, by_chance = [], []
        for seed in range(3):
            tried = drive(Guided(found.valid, {}, 200, seed), big_space.time_us, ahead=IN_FLIGHT)
            assert len(set(tried)) == 200
            reached.append(min(big_space.time_us(config) for config in tried) / best)
            chance = random.Random(seed).sample(found.valid, 200)
            by_chance.append(min(big_space.time_us(config) for config in chance) / best)
    assert median(reached) <= 1.05
    assert median(by_chance) > 1.1
