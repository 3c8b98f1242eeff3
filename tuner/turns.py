"""Kernels timed in turns on one GPU: what is changing meanwhile, its temperature and clock, changes for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from codegen.config import Config
from codegen.problem import Problem
from codegen.render import render
from tuner.costmodel import plausible_us
from tuner.evaluate import FINAL_SAMPLES, FINAL_SECONDS, Judge
from tuner.timing import finals
from tuner.timing.finals import Entrant, Finals
from tuner.timing.health import open_watch
from tuner.timing.regimes import Regime
from tuner.workers.pool import Workers


def in_turns(workers: Workers, judge: Judge, problem: Problem, configs: Sequence[Config], regime: Regime, rounds: int) -> Finals:
    """The finals of configs that compiled before, each entered once however often it is there; rounds are announced on the
    console.

    Raises:
        DeviceLost: the GPU was lost.
    """
    entrants = [Entrant.of(config, render(problem, config).plan, problem.rows, workers.limits.sms)
                for config in dict.fromkeys(configs)]
    return finals.run(
        lambda config, which: judge.time(config, which, FINAL_SAMPLES, FINAL_SECONDS), entrants, regime=regime,
        rounds=rounds, least_us=plausible_us(problem, workers.limits), watch=open_watch(workers.bus_id),
        get_ready=judge.get_ready,
        on_round=lambda done, total: print(f"round {done + 1} of {total}", flush=True))


def table(found: Finals, problem: Problem, note: Callable[[Config], str]) -> list[str]:
    """Lines for the console: every kernel, the fastest first, then what there is to say.

    Args:
        note: what stands in brackets behind a config.
    """
    timed = [finalist for finalist in found.finalists if finalist.times]
    fastest = timed[0].times[found.regime].median if timed else 0.0
    lines = [f"{problem.rows} rows of {problem.hidden} and {problem.out} values, {problem.dtype}, {found.regime}, "
             f"{found.rounds} round{'' if found.rounds == 1 else 's'}:"]
    for finalist in found.finalists:
        named = f"{finalist.config} ({note(finalist.config)})"
        if finalist.times:
            times = finalist.times[found.regime]
            others = (f", {regime} {other.median:.4g} us" for regime, other in finalist.times.items() if other is not times)
            lines.append(f"  {times.median:.4g} us ({times.low:.4g} to {times.high:.4g}), {times.median / fastest - 1:+.1%}"
                         f"{''.join(others)}: {named}")
        else:
            lines.append(f"  not timed ({finalist.reason}): {named}")
    lines += [f"  {said}" for said in found.said]
    if len(timed) > 1:
        slowest = timed[-1].times[found.regime].median
        lines.append(f"the slowest of {len(timed)} different kernels takes {slowest / fastest - 1:.1%} more than the fastest")
    return lines
