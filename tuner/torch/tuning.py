"""Tuning for the sizes that a model really has."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from codegen.problem import GRADIENTS, Problem
from tuner.entry import tune
from tuner.errors import NoValidKernel
from tuner.outcome import TuneResult
from tuner.torch import engine
from tuner.wisdom.book import Book
from tuner.wisdom.recall import exact

TIMEOUT = 60.0
"""Seconds for each problem: enough for the search to come near its end on the shapes of tuner/bench/shapes.py."""

_PATIENCE = timedelta(days=1)
"""How long processes wait for the one that tunes."""


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
        The results of the tuning runs; none in a process that waited for another.

    Warns:
        UserWarning: no backward pass of layer_norm_linear on a GPU was seen; or one stays as it was, as nothing valid was found
            in its time.

    Raises:
        ToolchainError: a compiler or library is missing.
    """
    with engine.watched() as problems:
        step()
    if not problems:
        warnings.warn("autotune saw no backward pass of layer_norm_linear on a GPU; give it a whole step, before that step "
                      "is captured in a CUDA graph", stacklevel=2)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # times are measured on an idle GPU
        torch.cuda.empty_cache()
    with _one_of_each_machine() as tunes:
        book, results = Book(), []
        for problem in sorted(problems, key=_order) if tunes else ():
            if again or exact(problem, problems[problem].place, book) is None:
                try:
                    results.append(_tune(problem, trials, timeout))
                except NoValidKernel as error:
                    warnings.warn(_untuned(problem, error), stacklevel=2)
    engine.forget()
    return results


@contextmanager
def _one_of_each_machine() -> Iterator[bool]:
    """Whether this process is the first of those of torch.distributed on its machine. All leave the block together."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        yield True
        return
    # Over the CPU, as a GPU that waits is not idle; and with more patience than groups have by default.
    group = distributed.new_group(backend="gloo", timeout=_PATIENCE)
    try:
        distributed.barrier(group)  # all have run their step
        yield int(os.environ.get("LOCAL_RANK", distributed.get_rank())) == 0
    finally:
        distributed.barrier(group)
        distributed.destroy_process_group(group)


def _tune(problem: Problem, trials: int | None, timeout: float | None) -> TuneResult:
    return tune((1, problem.rows, problem.hidden, problem.out), executor="cuda", dtype=problem.dtype,
                deterministic=problem.deterministic, trials=trials, timeout=timeout, wants=sorted(problem.wants),
                param_dtype=problem.param_dtype, accuracy=problem.accuracy)


def _untuned(problem: Problem, error: NoValidKernel) -> str:
    reason = str(error).partition(";")[0]  # what follows is for the command line
    return (f"the backward pass of {problem.rows} rows, H={problem.hidden}, O={problem.out} in {problem.dtype} stays as it was "
            f"({reason}); it may be tuned with more time")


def _order(problem: Problem) -> tuple[Any, ...]:
    return (problem.hidden, problem.out, problem.rows, problem.dtype, problem.accuracy,
            [name in problem.wants for name in GRADIENTS])
