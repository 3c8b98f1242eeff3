"""Strategies of Kernel Tuner played on a recorded space, by its own simulation runner. An extra; only this module imports it."""

from __future__ import annotations

import random
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from codegen.config import Value

Row = tuple[Value, ...]

IN_VAIN = 50
"""A strategy that has asked for so many times as many rows as it may try has nothing new to ask for, and ends: some do not by
themselves where all that lies round their best was tried. Others fail, with TypeError, at a row without neighbours, as there are
in a space that was recorded in part, or with IndexError, in a space that is smaller than their population. What was tried by then
counts."""

LIMIT_S = 10.0
"""CPU time of a strategy, several times what any takes to try 200 rows. Where there are hardly more than that, some look for new
ones for ever, without asking for any. What was tried by then counts here too."""


def simulate(strategy: str, choices: Mapping[str, Sequence[Value]], times: Mapping[Row, float | None], budget: int,
             seed: int) -> list[Row]:
    """The rows a strategy evaluates, in order, each once.

    Args:
        strategy: its name in Kernel Tuner; its options are the defaults.
        choices: of each parameter.
        times: by row, the values of the parameters in their order; None where the kernel is rejected.
        budget: how many rows.
        seed: of the random numbers of Python and NumPy, which the strategies draw from.
    """
    from kernel_tuner import util
    from kernel_tuner.interface import Options, strategy_map
    from kernel_tuner.runners.simulation import SimulationRunner
    from kernel_tuner.searchspace import Searchspace

    by_key = {",".join(str(value) for value in row): row for row in times}
    cache = {}
    for key, row in by_key.items():
        entry: dict[str, Any] = dict(zip(choices, row, strict=True))
        time_us = times[row]
        cache[key] = entry | ({"time": time_us} if time_us is not None else {"__error__": util.RuntimeFailedConfig()})
    order: dict[Row, None] = {}

    class Runner(SimulationRunner):  # type: ignore[misc]
        asked = 0

        def run(self, parameter_space: Sequence[Row], tuning_options: Any) -> list[Any]:
            results: list[Any] = []
            for row in parameter_space:
                self.asked += 1
                if self.asked > IN_VAIN * budget:
                    raise util.StopCriterionReached("nothing new is asked for")
                before = len(self.visited_results)
                results += super().run([row], tuning_options)
                if len(self.visited_results) > before:
                    order[by_key[",".join(str(value) for value in row)]] = None
            return results

    random.seed(seed)
    np.random.seed(seed)
    names = {name: list(values) for name, values in choices.items()}
    with (warnings.catch_warnings(), suppress(util.StopCriterionReached, TypeError, IndexError),
          _limited(LIMIT_S, util.StopCriterionReached("its time is up"))):
        warnings.simplefilter("ignore")
        space = Searchspace(None, None, None, from_cache={"tune_params": names, "cache": cache})
        runner = Runner(None, Options(kernel_name="recorded"), Options(quiet=True), 1, [])
        options = Options(
            cache=cache, budget=util.TuningBudget(None, min(budget, len(cache))), objective=["time"],
            objective_higher_is_better=[False], strategy_options=Options(max_fevals=min(budget, len(cache))), tune_params=names,
            metrics=None, verbose=False, restrictions=None, restrictions_unmodified=None, max_fevals=min(budget, len(cache)),
            simulation_mode=True, strategy=strategy, seed=seed)
        strategy_map[strategy].tune(space, runner, options)
    return list(order)[:budget]


@contextmanager
def _limited(seconds: float, error: Exception) -> Iterator[None]:
    """Raises the error within, once that much CPU time has gone by. For the main thread of a process."""
    def end(number: int, frame: object) -> None:
        raise error

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
