"""Writes best.cu and best.h: the winner of a tuning run, and configs for the row counts at which it would not be fit."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from codegen.artifact import ArtifactInfo, ArtifactKernel, ErrorFigures, artifact
from codegen.config import Config
from codegen.dtypes import ITEMSIZE
from codegen.limits import Limits, most_memory
from codegen.problem import Problem, Shape
from codegen.render import Source, render
from codegen.space import why_not, why_unfit
from tuner.costmodel import predict
from tuner.gate.checks import COMPANIONS, Check, sentences, unfit
from tuner.guess import best_predicted
from tuner.outcome import TuneResult
from tuner.provenance import DISTRIBUTION
from tuner.records import write_text
from tuner.wording import gpu_name

MAX_CONFIGS = 4
"""Configs in one file; each makes it longer, and slower to compile. With three, at 4096,4096 one was left for all from 64 rows
on, and none was fit for both ends of those."""

ABSURDLY_SLOW = 4.0
"""A config serves no row count at which its predicted time is more than so many times the best predicted one: more than the cost
model errs, and what too few blocks for many rows exceed by far."""

LAST_STEP = 16
"""The last config is chosen for the largest row count or, where it is unfit at one of its own, for one so many times smaller."""

WIDTHS = (1, 16, 128)
"""From so many times the first row count of a range its config is chosen, if it is fit from there on. Where the best config for
each row count leaves none that is fit for the rest, as at 4096,4096, where each few rows have a best kernel of their own, ranges
are made wider."""

Choice = Callable[[Problem], Config]


def write_artifact(cu: Path, header: Path, source: Source, result: TuneResult, choose: Choice, stale: Path) -> tuple[Check, ...]:
    """Writes both files, each whole or not at all, and returns what there is to say of them against the file, if anything.

    Args:
        cu: path of best.cu.
        header: path of best.h.
        source: the winner, rendered.
        result: the run it won.
        choose: the config to take where the winner is not fit; see serve_all_rows.
        stale: a file about what the two were before. It goes first, if it is there.

    Raises:
        ValueError: the result has no winner.
        OSError: the folder cannot be written.
    """
    winner, info = result.winner, result.info
    if winner is None:
        raise ValueError("a run without a winner has no artifact")
    errors = {name: ErrorFigures(error.normwise, error.bound_ratio) for name, error in winner.errors.items()}
    gpu = gpu_name(result)
    kernels = serve_all_rows(source, result.limits, choose)
    against = without_fit_config(kernels, result.limits)
    checks = (*result.checks, *against, *([COMPANIONS] if len(kernels) > 1 else []))
    said = ArtifactInfo(
        Shape.parse(info.shape), gpu, result.limits.arch, winner.best_us, winner.measured, result.floor_us, errors,
        f"{DISTRIBUTION} {info.version}, {info.date}", tuple(sentences(checks)))
    text = artifact(kernels, said)
    stale.unlink(missing_ok=True)
    write_text(cu, text.cu)
    write_text(header, text.header)
    return against


def without_fit_config(kernels: Sequence[ArtifactKernel], limits: Limits) -> tuple[Check, ...]:
    """Where the last config is not fit for all that it serves: at its first row count and every power of two above."""
    config, problem = kernels[-1].source.config, kernels[-1].source.problem
    first = 0 if len(kernels) == 1 else (kernels[-2].last_rows or 0) + 1
    most = _most_rows(problem, limits)
    for rows in (first, *(1 << n for n in range(first.bit_length(), most.bit_length()))):
        if (reason := why_unfit(replace(problem, rows=rows), config, limits)) is not None:
            return (unfit(config, first, rows, reason),)
    return ()


def serve_all_rows(tuned: Source, limits: Limits, choose: Choice) -> list[ArtifactKernel]:
    """One to MAX_CONFIGS configs, the tuned one among them, that together serve every row count, by rising row counts.

    A config serves the row counts round the one it was chosen for, as far as it is fit at every power of two on the way: down to
    where it is refused, up to where it is refused, inexact, wasteful or absurdly slow. (What is wasteful below that count is so
    only because a smaller config would do as well.) Where one ends, another is chosen. The last must be fit for all that remain;
    if what is best at its first power of two is not, it is what is best at the largest row count a GPU can hold, or at one as
    near to that as makes it fit at every power of two (the workspace that is allowed grows with the rows, and that of a config
    may grow faster at first). Where that finds none, the ranges before it are made wider (WIDTHS), and where that does not help
    either, the file says so; see without_fit_config.

    Args:
        tuned: the tuned config; its problem has the tuned row count.
        limits: the GPU.
        choose: the config to take for a problem; it must be fit there.
    """
    known = functools.cache(choose)
    every = (_served(tuned, limits, known, width) for width in WIDTHS)
    narrow = next(every)
    found = (kernels for kernels in chain([narrow], every) if not without_fit_config(kernels, limits))
    return next(found, narrow)


def _served(tuned: Source, limits: Limits, choose: Choice, width: int) -> list[ArtifactKernel]:
    """As serve_all_rows, with ranges of one of WIDTHS."""
    problem, most = tuned.problem, _most_rows(tuned.problem, limits)
    below: list[ArtifactKernel] = []
    lowest = _lowest_fit(problem, tuned.config, limits)
    if lowest > 0:
        config = choose(replace(problem, rows=lowest - 1))
        below.append(ArtifactKernel(render(problem, config), lowest - 1))

    kernels, config, last = below, tuned.config, _highest_fit(problem, tuned.config, limits, most)
    while last is not None:
        kernels.append(ArtifactKernel(render(problem, config), last))
        first = replace(problem, rows=2 * _power_at_most(last))
        config, last = _next(first, limits, most, choose, width)
        if len(kernels) == MAX_CONFIGS - 1 and last is not None:
            config = _last(first, limits, most, choose)
            break
    kernels.append(ArtifactKernel(render(problem, config), None))
    return kernels


def _next(first: Problem, limits: Limits, most: int, choose: Choice, width: int) -> tuple[Config, int | None]:
    """A config for the problem's row count and some above, and the highest that it serves; None: it serves all."""
    while width > 1:
        wide = replace(first, rows=width * first.rows)
        if wide.rows <= most:
            config = choose(wide)
            between = (replace(first, rows=first.rows << step) for step in range(width.bit_length()))
            if all(why_unfit(at, config, limits) is None for at in between) and not _absurdly_slow(first, config, limits):
                return config, _highest_fit(wide, config, limits, most)
        width //= 4
    config = choose(first)
    return config, _highest_fit(first, config, limits, most)


def _last(problem: Problem, limits: Limits, most: int, choose: Choice) -> Config:
    """The config for the problem's row count and all above it."""
    largest = replace(problem, rows=most)
    first = config = choose(largest)
    served = [replace(problem, rows=1 << n) for n in range(problem.rows.bit_length(), most.bit_length())]
    rows = most
    while any(why_unfit(at, config, limits) is not None for at in (problem, *served)):
        rows //= LAST_STEP
        if rows <= problem.rows:
            return first
        config = choose(replace(problem, rows=rows))
    return config


def _most_rows(problem: Problem, limits: Limits) -> int:
    """The largest power of two of rows that such a GPU can hold, and no less than the problem's; of more than it nobody calls."""
    values = problem.hidden * (1 + ("dx" in problem.wants)) + problem.out
    held = most_memory(limits.arch) // (ITEMSIZE[problem.dtype] * values)
    return max(_power_at_most(max(held, 1)), problem.rows)


def _power_at_most(value: int) -> int:
    return 1 << (value.bit_length() - 1)


def _lowest_fit(problem: Problem, config: Config, limits: Limits) -> int:
    """The lowest row count the config serves: 0, or the power of two above the first at which it is refused."""
    lowest, rows = problem.rows, _power_at_most(max(problem.rows, 1))
    while rows >= 1:
        if why_unfit(replace(problem, rows=rows), config, limits) is not None:
            return lowest
        lowest, rows = rows, rows // 2
    return 0


def _highest_fit(problem: Problem, config: Config, limits: Limits, most: int) -> int | None:
    """The highest row count the config serves, if there are any above it; the problem's is the one it was chosen for.

    Where it is absurdly slow at one row count it is taken to be so at all above, so few need a look.
    """
    served, rows = [problem.rows], 2 * _power_at_most(max(problem.rows, 1))
    while rows <= most and why_not(replace(problem, rows=rows), config, limits) is None:
        served.append(rows)
        rows *= 2

    def slow(at: int) -> bool:
        return _absurdly_slow(replace(problem, rows=at), config, limits)

    if len(served) == 1 or not slow(served[-1]):
        return served[-1] if rows <= most else None
    return served[bisect.bisect_left(served, True, lo=1, key=slow) - 1]


def _absurdly_slow(problem: Problem, config: Config, limits: Limits) -> bool:
    best = predict(problem, best_predicted(problem, limits), limits)
    return predict(problem, config, limits).time_us > ABSURDLY_SLOW * best.time_us
