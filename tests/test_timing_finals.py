"""The choice between finalists: by interval within rounds, ties by a stated order, and only from spells that count."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from codegen.config import Config
from codegen.expr import ROWS, const
from codegen.plan import Buffer, Fill, Launch, Plan
from codegen.problem import ALL_GRADIENTS, Problem
from codegen.render import render
from codegen.space import make_config
from tests.fake_gauge import CALM, FakeGauge, watch_over
from tuner.errors import DeviceLost, LaunchError
from tuner.executors import Timing
from tuner.executors.cuda import CudaExecutor
from tuner.inputs import random_inputs, read_only
from tuner.records import Record, Status
from tuner.timing.finals import LEAST_ROUNDS, ROUNDS, TIE_BAND, Entrant, Finals, decide, run, timed
from tuner.timing.health import Spell, open_watch
from tuner.timing.regimes import Regime

A, B, C = make_config("row_warp"), make_config("row_thread"), make_config("row_shared")


def entrant(config: Config, steps: int = 2, workspace: int = 0) -> Entrant:
    return Entrant(config, steps, workspace)


def constant(times: dict[Config, float], cold: float = 2.0) -> Callable[[Config, Regime], Timing]:
    """A call that always takes the same, `cold` times as long in that regime."""
    return lambda config, regime: Timing((times[config] * (1.0 if regime == "warm" else cold),) * 5, 1, regime)


def spells(*us: float) -> list[Spell]:
    return [Spell(Timing((time,) * 5, 1)) for time in us]


def decided(warm: dict[Entrant, Sequence[Spell]]) -> Finals:
    rounds = max(map(len, warm.values()))
    return decide({one: {"warm": found, "cold": found} for one, found in warm.items()}, {}, "warm", rounds)


# --- rounds -------------------------------------------------------------------------------------------------------------------


def test_finalists_take_turns_forwards_and_backwards_in_both_regimes() -> None:
    asked: list[tuple[Config, Regime]] = []

    def time_one(config: Config, regime: Regime) -> Timing:
        asked.append((config, regime))
        return constant({A: 2.0, B: 3.0})(config, regime)

    told: list[tuple[int, int]] = []
    finals = run(time_one, [entrant(A), entrant(B)], rounds=2, on_round=lambda done, total: told.append((done, total)))
    assert asked == [(A, "warm"), (A, "cold"), (B, "warm"), (B, "cold"), (B, "warm"), (B, "cold"), (A, "warm"), (A, "cold")]
    assert told == [(0, 2), (1, 2)] and finals.rounds == 2
    assert finals.winner == A and finals.regime == "warm"


def test_both_regimes_are_recorded_and_one_decides() -> None:
    def time_one(config: Config, regime: Regime) -> Timing:
        return Timing(({A: {"warm": 2.0, "cold": 9.0}, B: {"warm": 3.0, "cold": 8.0}}[config][regime],), 1, regime)

    warm, cold = (run(time_one, [entrant(A), entrant(B)], regime=regime) for regime in ("warm", "cold"))
    assert (warm.winner, cold.winner) == (A, B)
    for finals in (warm, cold):
        assert {one.config: {name: times.median for name, times in one.times.items()} for one in finals.finalists} == {
            A: {"warm": 2.0, "cold": 9.0}, B: {"warm": 3.0, "cold": 8.0}}
    record = timed(Record(B, Status.OK, time_us=8.5, measured=True), cold.finalists[0], "cold")
    assert record.final_us == 8.0 and record.times["warm"].median == 3.0
    assert Record.from_json(json.loads(json.dumps(record.as_json()))) == record


def test_when_time_is_up_one_round_is_enough() -> None:
    finals = run(constant({A: 2.0, B: 3.0}), [entrant(A), entrant(B)], enough=lambda: True)
    assert finals.rounds == 1 and finals.winner == A
    assert finals.finalists[0].times["warm"].rounds == 1


def test_without_finalists_there_is_no_winner() -> None:
    assert run(constant({}), []) == Finals(None, (), "warm", 0)


def test_one_that_cannot_be_timed_any_more_drops_out() -> None:
    def time_one(config: Config, regime: Regime) -> Timing:
        if config == A:
            raise LaunchError("too many resources requested for launch")
        return constant({B: 3.0})(config, regime)

    finals = run(time_one, [entrant(A), entrant(B)])
    assert finals.winner == B
    assert [(one.config, one.reason) for one in finals.finalists] == [
        (B, None), (A, "too many resources requested for launch")]
    assert timed(Record(A, Status.OK), finals.finalists[1], "warm") == Record(A, Status.OK)


def test_without_room_for_the_other_regime_the_deciding_one_goes_on() -> None:
    def time_one(config: Config, regime: Regime) -> Timing:
        if regime == "cold":
            raise LaunchError("out of memory")
        return constant({A: 2.0, B: 3.0})(config, regime)

    finals = run(time_one, [entrant(A), entrant(B)])
    assert finals.winner == A and finals.rounds == ROUNDS
    assert [set(one.times) for one in finals.finalists] == [{"warm"}, {"warm"}]
    assert run(time_one, [entrant(A)], regime="cold").winner is None


def test_a_lost_gpu_decides_nothing() -> None:
    def time_one(config: Config, regime: Regime) -> Timing:
        raise DeviceLost("an illegal memory access was encountered")

    with pytest.raises(DeviceLost):
        run(time_one, [entrant(A)])


def test_a_time_that_no_hardware_reaches_does_not_win() -> None:
    finals = run(constant({A: 0.1, B: 3.0}), [entrant(A), entrant(B)], least_us=0.5)
    assert finals.winner == B
    assert finals.finalists[-1].reason == "took 0.1 us, where the hardware takes 0.5 us at least"


# --- the decision -------------------------------------------------------------------------------------------------------------


def test_proven_faster_wins_however_little() -> None:
    """Half a per cent in every round, over a drift of ten per cent that hits both alike."""
    drift = np.linspace(1.0, 1.1, ROUNDS)
    finals = decided({entrant(A, steps=1): spells(*(10.05 * drift)), entrant(B, steps=9): spells(*(10.0 * drift))})
    assert finals.winner == B and not finals.said
    assert [one.ties for one in finals.finalists] == [True, False]


def test_what_cannot_be_told_apart_ties_and_the_fewest_steps_win() -> None:
    noisy = [10.0, 10.2, 9.9, 10.1, 10.0, 9.8, 10.1, 10.0, 9.9]
    other = [10.04, 10.1, 10.0, 10.0, 10.1, 9.9, 10.04, 10.1, 9.8]
    finals = decided({entrant(A, steps=3): spells(*noisy), entrant(B, steps=2): spells(*other)})
    assert finals.winner == B and all(one.ties for one in finals.finalists)
    assert "2 finalists cannot be told apart, their medians lying within 1%" in finals.said[0]


def test_beyond_the_band_nothing_ties_however_noisy() -> None:
    noisy = [10.0, 12.0, 9.0, 11.0, 10.0, 8.0, 11.0, 10.0, 9.0]
    slower = [10.3, 9.0, 12.0, 9.0, 10.3, 11.0, 10.3, 9.0, 10.3]
    finals = decided({entrant(A, steps=3): spells(*noisy), entrant(B, steps=2): spells(*slower)})
    assert finals.finalists[1].times["warm"].median / finals.finalists[0].times["warm"].median > 1.0 + TIE_BAND
    assert finals.winner == A


def test_few_rounds_prove_nothing_within_the_band() -> None:
    for rounds, winner in ((5, B), (6, A)):
        finals = decided({entrant(A, steps=3): spells(*[10.0] * rounds), entrant(B, steps=2): spells(*[10.05] * rounds)})
        assert finals.winner == winner


@pytest.mark.parametrize(("first", "second", "winner"), [
    ((2, 0), (3, 0), A), ((3, 0), (2, 999), B), ((2, 256), (2, 512), A), ((2, 0), (2, 0), min(A, B, key=str))])
def test_ties_are_broken_by_steps_workspace_and_text(first: tuple[int, int], second: tuple[int, int], winner: Config) -> None:
    for pair in ((A, first), (B, second)), ((B, second), (A, first)):
        finals = run(constant({A: 2.0, B: 2.0}), [entrant(config, *cost) for config, cost in pair])
        assert finals.winner == winner


def test_repetitions_choose_within_the_band() -> None:
    """Eight finalists, three of them half a per cent apart, noise of two per cent in each round: the winner is within 1.5 %."""
    truth = {entrant(config, steps): us for steps, (config, us) in enumerate(
        [(A, 10.0), (B, 10.05), (C, 10.03), *((replace(A, params=(*A.params, ("x", step))), 10.4 + step) for step in range(5))])}
    random = np.random.default_rng(3)
    for _ in range(50):
        shared = 1.0 + 0.02 * random.standard_normal(ROUNDS)
        finals = decided({one: spells(*(us * shared * (1.0 + 0.002 * random.standard_normal(ROUNDS))))
                          for one, us in truth.items()})
        won = next(us for one, us in truth.items() if one.config == finals.winner)
        assert won <= 10.15


def test_an_entrant_counts_launches_and_fills_and_scratch() -> None:
    plan = Plan((Fill(("dw",)), Launch("a", const(1), 32), Launch("b", ROWS, 32)), (Buffer("partial", ROWS * 2),))
    assert Entrant.of(A, plan, 100, 132) == Entrant(A, 3, 1024)


def test_finals_survive_json() -> None:
    finals = run(constant({A: 2.0, B: 2.0}), [entrant(A), entrant(B)], least_us=0.1)
    assert Finals.from_json(json.loads(json.dumps(finals.as_json()))) == finals
    empty = Finals(None, (), "cold", 0)
    assert Finals.from_json(json.loads(json.dumps(empty.as_json()))) == empty


# --- spells that do not count -------------------------------------------------------------------------------------------------


def test_a_throttled_spell_of_the_best_does_not_cost_it_the_victory() -> None:
    """The GPU is hot in the first rounds, when it runs at half its speed, and A always comes first."""
    gauge = FakeGauge()
    hot = replace(CALM, sm_mhz=900, reasons=frozenset(("thermal slowdown",)))
    taken = 0

    def time_one(config: Config, regime: Regime) -> Timing:
        nonlocal taken
        taken += 1
        gauge.now = hot if taken <= 20 else CALM
        slow = 2.0 if taken <= 20 else 1.0
        return Timing((slow * {A: 2.0, B: 2.5}[config],), 1, regime)

    watch = watch_over(gauge)
    finals = run(time_one, [entrant(A), entrant(B)], watch=watch)
    assert finals.winner == A
    assert finals.finalists[0].times["warm"].high == 2.0
    assert any("discarded and taken again: thermal slowdown" in clause for clause in watch.drain().said())


def test_disturbed_spells_are_left_out_and_that_is_said() -> None:
    found = spells(*[10.0] * 6, *[20.0] * 3)
    found[6:] = [replace(spell, disturbed="thermal slowdown") for spell in found[6:]]
    finals = decided({entrant(A): found})
    assert finals.finalists[0].times["warm"].rounds == 6 and finals.finalists[0].times["warm"].high == 10.0
    assert "6 of 18 spells of the finals do not count" in finals.said[0]


def test_where_hardly_any_spell_is_sound_all_count_and_that_is_said() -> None:
    found = [replace(spell, disturbed="power brake") for spell in spells(*[20.0] * 7)] + spells(*[10.0] * (LEAST_ROUNDS - 1))
    finals = decided({entrant(A): found})
    assert finals.finalists[0].times["warm"].rounds == 9
    assert finals.said == (f"the times of {A} count although some were disturbed, since too few others are left",)


@pytest.mark.parametrize(("capped", "counting"), [(2, 7), (5, 9), (9, 9)])
def test_the_power_limit_counts_where_it_is_the_rule(capped: int, counting: int) -> None:
    found = spells(*[12.0] * capped, *[10.0] * (9 - capped))
    found[:capped] = [replace(spell, capped=True) for spell in found[:capped]]
    assert decided({entrant(A): found}).finalists[0].times["warm"].rounds == counting


def test_a_clock_that_is_lower_than_usual_does_not_count() -> None:
    found = [replace(spell, sm_mhz=1980.0) for spell in spells(*[10.0] * 7)]
    found += [replace(spell, sm_mhz=1500.0) for spell in spells(13.0, 13.0)]
    assert decided({entrant(A): found}).finalists[0].times["warm"].high == 10.0


def test_rounds_are_compared_only_where_both_count() -> None:
    """In the rounds that do not count for B, both were slow; its median would else look better than it is."""
    slow = spells(*[15.0] * 4, *[10.0] * 5)
    other = spells(*[15.3] * 4, *[10.2] * 5)
    other[:4] = [replace(spell, disturbed="another process used the GPU") for spell in other[:4]]
    finals = decided({entrant(A, steps=3): slow, entrant(B, steps=2): other})
    assert finals.winner == A


# --- on the card --------------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_on_the_card_the_finals_repeat_themselves(cuda_executor: CudaExecutor) -> None:
    """Three finals of the same five kernels choose kernels within 3 % of one another."""
    problem = Problem(512, 64, 64)
    configs = [make_config("row_warp"), make_config("row_shared"), make_config("row_thread")]
    sources = [render(problem, config) for config in configs]
    programs = {source.config: cuda_executor.compile(source) for source in sources}
    inputs = read_only(random_inputs(512, 64, 64))
    entrants = [Entrant.of(source.config, source.plan, 512, cuda_executor.limits.sms) for source in sources]

    def time_one(config: Config, regime: Regime) -> Timing:
        return programs[config].time(inputs, ALL_GRADIENTS, samples=20, budget_s=0.05, regime=regime)

    for regime in ("warm", "cold"):
        found = [run(time_one, entrants, regime=regime, watch=open_watch(cuda_executor.bus_id)) for _ in range(3)]
        medians = [next(one.times[regime].median for one in finals.finalists if one.config == finals.winner) for finals in found]
        assert max(medians) <= 1.03 * min(medians), [finals.as_json() for finals in found]
        assert all(one.times["cold"].median > 0.95 * one.times["warm"].median for finals in found for one in finals.finalists)
