"""Wisdom put to use: the kernel for a call, the first candidates of a tuning run, and what a finished run adds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice

from codegen.config import Config
from codegen.limits import Limits
from codegen.problem import Problem, Shape
from codegen.space import why_unfit
from tuner.candidates import Space, distance, nearest
from tuner.costmodel import predict
from tuner.executors import Executor
from tuner.guess import best_predicted
from tuner.outcome import TuneResult
from tuner.records import Record, RunInfo
from tuner.timing.regimes import REGIMES
from tuner.timing.stats import LEVEL
from tuner.wisdom.book import Book, Say, warn
from tuner.wisdom.points import PREDICTED, Key, Point
from tuner.wisdom.source import is_current, source_digest

SEEDS = 3
"""Known configs that a tuning run tries first: fewer than each family's first predicted ones."""

NEAR, FAR_OFF = 4.0, 2.0
"""At up to so many times its row count, or so small a part of it, a measured winner is taken unseen. Farther out it must not be
predicted to take more than the second factor of the time of what is predicted to be best: no call of 16 rows says what a million
need, and the cost model is seldom out by as much."""


def choose(problem: Problem, executor: Executor, book: Book | None = None) -> Config:
    """The kernel for a call: the best known one, else the best predicted.

    Raises:
        NoValidKernel: no config can run the problem on such a GPU.
    """
    return known(problem, executor, Book() if book is None else book) or _favourite(problem, executor.limits)


def known(problem: Problem, executor: Executor, book: Book) -> Config | None:
    """The config that measurements of this executor's device speak for at the problem's row count; None where none do.

    It is one of the winners at the nearest row counts below and above whose kernels are today's and right for this many rows: the
    one predicted to be faster. Warm times go before cold ones. Where nothing is known for the wanted gradients, winners for more
    of them count.
    """
    regimes = REGIMES if executor.measures else (PREDICTED,)
    wanted = [key_of(problem, executor.device, executor.limits.arch, regime) for regime in regimes]
    for key in (*wanted, *chain.from_iterable(_for_more(each, book) for each in wanted)):
        sides = _either_side(problem, key, book.points(key), executor.limits)
        if sides:
            best = min(sides, key=lambda point: _time(problem, point, executor.limits))
            if _is_credible(problem, best, executor.limits):
                return best.parsed
    return None


def exact(problem: Problem, executor: Executor, book: Book) -> Config | None:
    """The fastest config measured, warm, for this very problem on this executor's device; None where none was."""
    key = key_of(problem, executor.device, executor.limits.arch, "warm")
    found = _either_side(problem, key, [point for point in book.points(key) if point.rows == problem.rows], executor.limits)
    return found[0].parsed if found else None


def seeds(info: RunInfo, space: Space, book: Book | None = None) -> list[Config]:
    """The configs a run should try first: winners of like runs on the same GPU, those for the very same question first, then
    those of near row counts, whatever sources their times are of. Those of far row counts must not be predicted to be slow.
    None where the run only predicts: it ranks every config itself.
    """
    if not info.measures:
        return []
    book = Book() if book is None else book
    own = key_of(space.problem, info.device, info.target, info.regime)
    points = [(key != own, _away(space.problem.rows, point), point.us, point) for key in book.akin(own)
              for point in book.points(key) if _is_credible(space.problem, point, space.limits)]
    ordered = (point.parsed for *_, point in sorted(points, key=lambda entry: entry[:3]))
    fit = (_candidate(config, space) for config in dict.fromkeys(ordered) if config is not None)
    return list(islice(dict.fromkeys(config for config in fit if config is not None), SEEDS))


def seeds_first(predicted: Mapping[Config, float], space: Space, info: RunInfo, book: Book | None = None) -> dict[Config, float]:
    """The ranked candidates of a run with its `seeds` moved to the front, or added there."""
    first = {config: predicted.get(config) or predict(space.problem, config, space.limits).time_us
             for config in seeds(info, space, book)}
    return {**first, **{config: time for config, time in predicted.items() if config not in first}}


def remember(result: TuneResult, book: Book | None = None, say: Say = warn) -> None:
    """Adds a run's winner to the user's own wisdom. Where that cannot be written, it is said, and the run is none the worse."""
    if result.winner is None:
        return
    book = Book(say=say) if book is None else book
    try:
        book.add(*learned(result.info, result.winner, source_digest(result.problem, result.winner.config)))
    except OSError as error:
        say(f"the winner was not added to the wisdom in {book.root} ({error.strerror}); set LNL_WISDOM to a folder that can be "
            "written, or to off")


def learned(info: RunInfo, winner: Record, source: str) -> tuple[Key, list[Point]]:
    """A run's winner as wisdom; `source` is the digest of its kernel, empty where that is not known.

    Raises:
        InvalidProblem, InputError: they are no result.
    """
    shape = Shape.parse(info.shape)
    problem = Problem.of(shape, dtype=info.dtype, wants=info.wants.split(","), deterministic=info.deterministic,
                         param_dtype=info.param_dtype, accuracy=info.accuracy)
    key = key_of(problem, info.device, info.target, info.regime if info.measures else PREDICTED)
    times = winner.times.get(info.regime)
    interval = None if times is None or times.level < LEVEL else (times.low, times.high)
    return key, [Point(shape.rows, str(winner.config), winner.best_us, interval, info.date, info.version, source)]


def key_of(problem: Problem, device: str, arch: str, regime: str) -> Key:
    """The key of a problem on a device; predictions are for the architecture, whatever device made them."""
    return Key(arch if regime == PREDICTED else device, arch, problem.hidden, problem.out, problem.dtype, problem.param_dtype,
               problem.accuracy, problem.wants_key, problem.deterministic, regime)


def _for_more(wanted: Key, book: Book) -> list[Key]:
    """The keys of the same kind with more gradients than the wanted, those with the fewest more first."""
    names = set(wanted.wants.split(","))
    more = [key for key in book.akin(wanted)
            if replace(key, wants=wanted.wants) == wanted and names < set(key.wants.split(","))]
    return sorted(more, key=lambda key: (len(key.wants.split(",")), key))


def _candidate(config: Config, space: Space) -> Config | None:
    """The config, or the candidate that differs from it in one parameter and least: another row count may want other splits."""
    found = nearest(config, space.valid)
    return found if found is not None and distance(config, found)[0] <= 1 else None


def _either_side(problem: Problem, key: Key, points: Iterable[Point], limits: Limits) -> list[Point]:
    """The nearest usable point at or below the problem's row count, and the nearest above; the one at it where there is one."""
    ordered = sorted(points, key=lambda point: (_away(problem.rows, point), point.us))
    below = _first_usable(problem, key, [point for point in ordered if point.rows <= problem.rows], limits)
    if below is not None and below.rows == problem.rows:
        return [below]
    above = _first_usable(problem, key, [point for point in ordered if point.rows > problem.rows], limits)
    return [point for point in (below, above) if point is not None]


def _first_usable(problem: Problem, key: Key, points: Sequence[Point], limits: Limits) -> Point | None:
    for point in points:
        config = point.parsed
        if config is not None and why_unfit(problem, config, limits) is None and is_current(key, point, limits):
            return point
    return None


def _is_credible(problem: Problem, point: Point, limits: Limits) -> bool:
    if _away(problem.rows, point) <= math.log(NEAR):
        return True
    best = predict(problem, _favourite(problem, limits), limits).time_us
    return _time(problem, point, limits) <= FAR_OFF * best


def _favourite(problem: Problem, limits: Limits) -> Config:
    """The best predicted config of the problem."""
    # Sizes near each other have the same best kernel; rounding keeps varying row counts from a search each.
    rounded = replace(problem, rows=1 << (problem.rows - 1).bit_length())
    config = best_predicted(rounded, limits)
    return config if why_unfit(problem, config, limits) is None else best_predicted(problem, limits)


def _time(problem: Problem, point: Point, limits: Limits) -> float:
    config = point.parsed
    return math.inf if config is None else predict(problem, config, limits).time_us


def _away(rows: int, point: Point) -> float:
    """How far a point's row count is from another, as the logarithm of their ratio."""
    return abs(math.log(point.rows / rows))
