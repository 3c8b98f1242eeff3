"""The configs of an artifact beside the tuned one: each is validated before it is taken."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice

from codegen.config import Config
from codegen.limits import Limits
from codegen.problem import Problem
from codegen.render import render
from tuner.candidates import survey
from tuner.choose import open_host, open_isolated
from tuner.errors import CompileError, DeviceLost, NoValidKernel
from tuner.evaluate import HOST_MULTIPLY_ADDS
from tuner.executors import Executor
from tuner.guess import best_predicted, rank
from tuner.outcome import TuneResult
from tuner.validate import Validator
from tuner.workers.pool import Workers

GPU_MULTIPLY_ADDS = 1 << 28
"""Largest rows * H * O of one run of the validation on a GPU: making the data for more takes longer than it is worth."""

GPU_ROWS, HOST_ROWS = 1 << 17, 1 << 14
"""Most rows of one run, where rows are short: enough that each of the most blocks there are takes several tiles in turn, and on
the CPU a second or two."""

TRIES = 8
"""Configs that are tried for one range of row counts before it is given up."""


Check = Callable[[Problem, Config, int, int], str | None]
"""As why_invalid, on a certain executor."""


def choose_companion(place: Executor | Workers, result: TuneResult, problem: Problem, check: Check | None = None) -> Config:
    """The config predicted to be fastest at the problem's row count among those that prove valid.

    Where the winner of the run repeats its bits every time, so does it. It is validated at a row count of its range, or as
    near to it as the cost allows, but not timed.

    Args:
        place: where it is validated; once its device is lost, the CPU of this machine.
        result: the run whose winner is not fit at that row count.
        problem: what is to be computed there.
        check: what says whether a config is valid there; None: it is run at `place`.

    Raises:
        NoValidKernel: none of the likeliest is valid.
        ToolchainError: there is no compiler.
    """
    try:
        return _choose(place, result, problem, check)
    except DeviceLost:
        if not isinstance(place, Workers):
            return _choose(open_host(place.limits), result, problem)
    with closing(open_isolated("host", place.limits.arch)) as host:
        return _choose(host, result, problem)


def _choose(place: Executor | Workers, result: TuneResult, problem: Problem, check: Check | None = None) -> Config:
    assert result.winner is not None
    at, cap = asked(place, result.winner.config, problem)
    check = check or (place.why_invalid if isinstance(place, Workers) else partial(why_invalid, place))
    reason = None
    for config in _likeliest(at, place.limits):
        reason = check(at, config, result.info.seed, cap)
        if reason is None:
            return config
    raise NoValidKernel(f"no valid kernel for {at.rows} rows, which best.cu should serve as well; the last since: {reason}")


def asked(place: Executor | Workers, winner: Config, problem: Problem) -> tuple[Problem, int]:
    """What a companion of a winner has to compute at a problem's row count, and the max_multiply_adds it is validated with."""
    at = replace(problem, deterministic=problem.deterministic or winner["reduction"] != "atomic")
    products, rows = (GPU_MULTIPLY_ADDS, GPU_ROWS) if place.measures else (HOST_MULTIPLY_ADDS, HOST_ROWS)
    return at, min(products, rows * at.hidden * at.out)


def why_invalid(executor: Executor, problem: Problem, config: Config, seed: int, multiply_adds: int) -> str | None:
    """Why a config is not valid for a problem; None where it is.

    Args:
        executor: where it runs.
        seed: of the data.
        multiply_adds: as max_multiply_adds of Validator.

    Raises:
        DeviceLost, ToolchainError: as Executor.compile and Program.run.
    """
    validator = _validator(problem, seed, multiply_adds)
    try:
        program = executor.compile(render(problem, config))
        return validator.validate(program.run, program.variations).reason
    except CompileError as error:
        return str(error)


@functools.lru_cache(maxsize=1)
def _validator(problem: Problem, seed: int, multiply_adds: int) -> Validator:
    """One for all configs of a problem, as it holds the references."""
    return Validator(problem, seed=seed, max_multiply_adds=multiply_adds)


def _likeliest(problem: Problem, limits: Limits) -> Iterator[Config]:
    """The cost model's favourite by descent, then, where that is not valid, the best of all there are."""
    favourite = best_predicted(problem, limits)
    yield favourite
    ranked = islice(rank(survey(problem, limits)), TRIES)
    yield from (config for config in ranked if config != favourite)
