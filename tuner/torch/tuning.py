"""Tuning for the sizes that a model really has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from codegen.problem import GRADIENTS, Problem
from tuner.outcome import TuneResult
from tuner.torch import engine
from tuner.tuning import tune
from tuner.wisdom.book import Book
from tuner.wisdom.recall import exact

TIMEOUT = 60.0
"""Seconds for each problem: enough for the search to come near its end on the shapes of tuner/bench/shapes.py."""


def autotune(step: Callable[[], Any], *, trials: int | None = None, timeout: float | None = TIMEOUT,
             again: bool = False) -> list[TuneResult]:
    """Runs a training step once, and tunes a kernel for each backward pass of layer_norm_linear in it.

    What has been tuned on this GPU for the same sizes and row count, by this or an earlier process, is left as it is. Winners are
    kept as wisdom, and later steps take them, on every GPU of the same name. Kernels are tried on the first GPU, in processes of
    their own, which need PyCUDA (the extra `cuda`) and some free memory beside what PyTorch holds.

    Args:
        step: a forward and a backward pass, with the sizes that training has.
        trials: the most candidates for each; None: 500.
        timeout: the most seconds for each; None: no limit but the tuner's own.
        again: also for what has been tuned.

    Returns:
        The results of the tuning runs.

    Raises:
        NoValidKernel: nothing was valid.
        ToolchainError: a compiler or library is missing.
    """
    with engine.watched() as problems:
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # times are measured on an idle GPU
        torch.cuda.empty_cache()
    book = Book()
    results = [_tune(problem, trials, timeout) for problem in sorted(problems, key=_order)
               if again or exact(problem, problems[problem].place, book) is None]
    engine.forget()
    return results


def _tune(problem: Problem, trials: int | None, timeout: float | None) -> TuneResult:
    return tune((1, problem.rows, problem.hidden, problem.out), executor="cuda", dtype=problem.dtype,
                deterministic=problem.deterministic, trials=trials, timeout=timeout, wants=sorted(problem.wants),
                param_dtype=problem.param_dtype, accuracy=problem.accuracy)


def _order(problem: Problem) -> tuple[Any, ...]:
    return (problem.hidden, problem.out, problem.rows, problem.dtype, problem.accuracy,
            [name in problem.wants for name in GRADIENTS])
