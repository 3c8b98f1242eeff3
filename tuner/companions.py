"""The configs of an artifact beside the tuned one: each is validated before it is taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from codegen.config import Config
from codegen.limits import Limits
from codegen.problem import Problem
from codegen.render import render
from tuner.candidates import survey
from tuner.choose import open_host
from tuner.errors import CompileError, DeviceLost, NoValidKernel
from tuner.evaluate import HOST_MULTIPLY_ADDS
from tuner.executors import Executor
from tuner.guess import best_predicted, rank
from tuner.outcome import TuneResult
from tuner.validate import Validator

GPU_MULTIPLY_ADDS = 1 << 28
"""Largest rows * H * O of one run of the validation on a GPU: making the data for more takes longer than it is worth."""

GPU_ROWS, HOST_ROWS = 1 << 17, 1 << 14
"""Most rows of one run, where rows are short: enough that each of the most blocks there are takes several tiles in turn, and on
the CPU a second or two."""

TRIES = 8
"""Configs that are tried for one range of row counts before it is given up."""


def choose_companion(executor: Executor, result: TuneResult, problem: Problem) -> Config:
    """The config predicted to be fastest at the problem's row count among those that prove valid.

    Where the winner of the run repeats its bits every time, so does it. It is validated at a row count of its range, or as
    near to it as the cost allows, but not timed.

    Args:
        executor: where it is validated; once its device is lost, the CPU of this machine.
        result: the run whose winner is not fit at that row count.
        problem: what is to be computed there.

    Raises:
        NoValidKernel: none of the likeliest is valid.
        ToolchainError: there is no compiler.
    """
    try:
        return _choose(executor, result, problem)
    except DeviceLost:
        return _choose(open_host(executor.limits), result, problem)


def _choose(executor: Executor, result: TuneResult, problem: Problem) -> Config:
    reproducible = result.winner is not None and result.winner.config["reduction"] != "atomic"
    at = replace(problem, deterministic=problem.deterministic or reproducible)
    products, rows = (GPU_MULTIPLY_ADDS, GPU_ROWS) if executor.measures else (HOST_MULTIPLY_ADDS, HOST_ROWS)
    cap = min(products, rows * at.hidden * at.out)
    validator = Validator(at, seed=result.info.seed, max_multiply_adds=cap)
    reason = ""
    for config in _likeliest(at, executor.limits):
        try:
            program = executor.compile(render(at, config))
            verdict = validator.validate(program.run, program.variations)
        except CompileError as error:
            reason = str(error)
            continue
        if verdict.ok:
            return config
        reason = verdict.reason or ""
    raise NoValidKernel(f"no valid kernel for {at.rows} rows, which best.cu should serve as well; the last since: {reason}")


def _likeliest(problem: Problem, limits: Limits) -> Iterator[Config]:
    """The cost model's favourite by descent, then, where that is not valid, the best of all there are."""
    favourite = best_predicted(problem, limits)
    yield favourite
    ranked = islice(rank(survey(problem, limits)), TRIES)
    yield from (config for config in ranked if config != favourite)
