"""The validator: three tests that every kernel must pass before its time means anything.

(a) The exact probe (tuner/probe.py) at the tuned row count and at two ragged ones, compared for equality: one row skipped or
    taken twice, among any number, shows.
(b) The accuracy class: the relative Frobenius error of each gradient on random data at the tuned row count
    (tuner/bounds.py). It sees digits lost in long sums, which (a) cannot, as its sums are exact.
(c) The per-element bound (tuner/bounds.py) on random and on hard data. It sees a single wrong element, and digits lost to
    cancellation, which norms average away.

In each, the places of non-finite values are compared first.

Row counts. The ragged ones are 1, a tile with one row in it, and a prime near the tuned count, which leaves a partial tile at
the end whatever the tile size. The hard data has 257 rows: full tiles and then one row, for tile sizes up to 256.

Cost. More than BASE_ROWS distinct rows teach nothing about a kernel, so larger data repeats its rows with random signs
(tuner.inputs.Repeated), and the references cost BASE_MULTIPLY_ADDS a matrix product at most, whatever the row count. They
are worked out at the first validation and serve all candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from codegen.problem import Problem
from tuner.bounds import accuracy_class
from tuner.compare import Case, build_case
from tuner.errors import InputError, LaunchError
from tuner.inputs import Gradients, Inputs, Repeated, hard_inputs, random_inputs, repeated
from tuner.probe import exact_gradients, probe_inputs

Run = Callable[[Inputs, frozenset[str]], Gradients]

BASE_ROWS = 1021
"""Distinct rows of large data; a prime, so that rows that repeat never lie a number of tiles apart."""

LEAST_BASE_ROWS = 61
"""Distinct rows of large data where H*O is so large that BASE_MULTIPLY_ADDS would allow fewer."""

BASE_MULTIPLY_ADDS = 1 << 34
"""Largest matrix product of a reference (unless LEAST_BASE_ROWS take more): about a second in float64 on eight cores."""

HARD_ROWS = 257


@dataclass(frozen=True, slots=True)
class GradientError:
    """How exact one gradient was.

    Attributes:
        normwise: relative Frobenius error on the random data.
        bound_ratio: largest error of an element in multiples of its bound, on all data that was not compared exactly.
    """

    normwise: float
    bound_ratio: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the validator found.

    Attributes:
        ok: every test was passed.
        reason: the first test that was not, as one sentence with its figures; None where all were.
        errors: by wanted gradient; empty where a test failed before the random data was reached.
        rows: the row counts run, in rising order; with `ok`, those the kernel is validated at.
    """

    ok: bool
    reason: str | None
    errors: Mapping[str, GradientError] = field(default_factory=dict)
    rows: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The verdict as JSON values; figures that are not finite become None."""
        errors = {
            name: {"normwise": _finite(error.normwise), "bound_ratio": _finite(error.bound_ratio)}
            for name, error in self.errors.items()}
        return {"ok": self.ok, "reason": self.reason, "errors": errors, "rows": list(self.rows)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class Validator:
    """Judges kernels for one problem; made once, used for every candidate.

    Args:
        problem: the sizes, the tuned row count and the wanted gradients.
        accuracy: the accuracy class, a key of tuner.bounds.ACCURACY.
        seed: of all data.
        max_multiply_adds: for slow executors, the largest rows * H * O of one run: row counts are cut down to it, to no
            less than 1. Verdict.rows says which were run.

    Raises:
        InputError: the problem has no rows, or there is no such accuracy class.
    """

    def __init__(self, problem: Problem, *, accuracy: str = "fp32", seed: int = 0,
                 max_multiply_adds: int | None = None) -> None:
        if problem.rows < 1:
            raise InputError("there is nothing to validate in a problem without rows")
        accuracy_class(accuracy)
        self.problem = problem
        self.accuracy = accuracy
        self.seed = seed
        size = problem.hidden * problem.out
        most = math.inf if max_multiply_adds is None else max(1, max_multiply_adds // size)
        tuned = int(min(problem.rows, most))
        ragged = min(_prime_below(max(tuned, 64), other_than=tuned), most)
        self.probe_rows = tuple(sorted({1, int(ragged), tuned}))
        self.random_rows = tuned
        self.hard_rows = int(min(HARD_ROWS, most))

    @property
    def multiply_adds(self) -> int:
        """The sum of rows * H * O over the runs of one validation: what a slow executor pays for it."""
        rows = sum(self.probe_rows) + self.random_rows + self.hard_rows
        return rows * self.problem.hidden * self.problem.out

    def validate(self, run: Run) -> Verdict:
        """Runs the three tests, cheap ones first, up to the first that fails.

        `run` gets inputs whose arrays are read-only, and the wanted gradients. A LaunchError from it is a failed test, and its
        text the reason; whatever else it raises passes through.
        """
        normwise: dict[str, float] = {}
        ratios: dict[str, float] = {}
        rows: set[int] = set()
        reason = None
        for case in self._cases:
            rows.add(case.inputs.rows)
            try:
                finding = case.judge(run(case.inputs, case.wants))
            except LaunchError as error:
                reason = f"{error} ({case.title})"
                break
            normwise.update(finding.normwise)
            for name, ratio in finding.ratios.items():
                ratios[name] = max(ratio, ratios.get(name, 0.0))
            if finding.reason:
                reason = finding.reason
                break
        errors = {name: GradientError(error, ratios[name]) for name, error in normwise.items()}
        return Verdict(reason is None, reason, errors, tuple(sorted(rows)))

    @cached_property
    def _cases(self) -> tuple[Case, ...]:
        problem, seed = self.problem, self.seed
        size = problem.hidden * problem.out
        base_rows = _prime_below(min(BASE_ROWS, max(LEAST_BASE_ROWS, BASE_MULTIPLY_ADDS // size)) + 1)

        def data(generate: Callable[[int, int, int, int], Inputs], rows: int) -> Repeated:
            return repeated(generate(min(rows, base_rows), problem.hidden, problem.out, seed), rows, seed)

        def case(kind: str, rows: Repeated, inputs: Inputs, exact: frozenset[str] = frozenset(),
                 normwise: bool = False) -> Case:
            return build_case(kind, rows, problem.wants, self.accuracy, inputs=inputs, exact=exact, normwise=normwise)

        probe = data(probe_inputs, self.probe_rows[-1])
        random = data(random_inputs, self.random_rows)
        hard = data(hard_inputs, self.hard_rows)
        exact = exact_gradients(probe.base)
        written = _read_only(probe.expand())
        return (
            *(case("exact probe", probe.first(rows), written.first(rows), exact) for rows in self.probe_rows),
            case("random data", random, _read_only(random.expand()), normwise=True),
            case("hard data", hard, _read_only(hard.expand())),
        )


def _read_only(inputs: Inputs) -> Inputs:
    """The same inputs, which no run can change for those after it."""
    for array in (inputs.dy, inputs.x, inputs.gamma, inputs.beta, inputs.w):
        if array is not None:
            array.flags.writeable = False
    return inputs


def _prime_below(limit: int, other_than: int = 0) -> int:
    """The largest prime below `limit` (at least 4) that is not `other_than`."""
    return next(n for n in range(limit - 1, 1, -1)
                if n != other_than and all(n % d for d in range(2, math.isqrt(n) + 1)))
