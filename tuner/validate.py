"""The validator: three tests that every kernel must pass before its time means anything.

(a) The exact probe (tuner/probe.py) at the tuned row count and at two ragged ones, compared for equality: one row skipped or
    taken twice, among any number, shows, in every data type and accuracy class.
(b) The accuracy class of the problem: the relative Frobenius error of each gradient on random data at the tuned row count
    (tuner/bounds.py). It sees digits lost in long sums and in operands, which (a) cannot, as its sums and operands are exact.
(c) The per-element bound of the class (tuner/bounds.py) on random and on hard data. It sees a single wrong element, and digits
    lost to cancellation, which norms average away.

In each, shapes, data types and the places of non-finite values are compared first.

Row counts. The ragged ones are 1, a tile with one row in it, and a prime near the tuned count, which leaves a partial tile at
the end whatever the tile size. The hard data has 257 rows: full tiles and then one row, for tile sizes up to 256.

Cost. More than BASE_ROWS distinct rows teach nothing about a kernel, so larger data repeats its rows with random signs
(tuner.inputs.Repeated), and the references cost BASE_MULTIPLY_ADDS a matrix product at most, whatever the row count. They
are worked out at the first validation and serve all candidates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Protocol

from codegen.problem import Problem
from tuner.compare import Case, build_case
from tuner.errors import DeviceLost, InputError, LaunchError
from tuner.executors import Run
from tuner.inputs import Inputs, Repeated, hard_inputs, random_inputs, read_only, repeated
from tuner.probe import balanced, exact_gradients, probe_inputs

BASE_ROWS = 1021
"""Distinct rows of large data; a prime, so that rows that repeat never lie a number of tiles apart."""

LEAST_BASE_ROWS = 61
"""Distinct rows of large data where H*O is so large that BASE_MULTIPLY_ADDS would allow fewer."""

BASE_MULTIPLY_ADDS = 1 << 34
"""Largest matrix product of a reference (unless LEAST_BASE_ROWS take more): about a second in float64 on eight cores."""

HARD_ROWS = 257

_NONE: Mapping[str, Run] = MappingProxyType({})


class _Generator(Protocol):
    """What makes data, as in tuner.inputs."""

    def __call__(self, rows: int, hidden: int, out: int, seed: int, /, *, dtype: str, param_dtype: str) -> Inputs:
        """`rows` rows, all different."""


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


class Validator:
    """Judges kernels for one problem; made once, used for every candidate.

    Args:
        problem: the sizes, the tuned row count, the data types, the accuracy class and the wanted gradients.
        seed: of all data.
        max_multiply_adds: for slow executors, the largest rows * H * O of one run: row counts are cut down to it, to no
            less than 1. Verdict.rows says which were run.
        hard_rows: of the hard data.

    Raises:
        InputError: the problem has no rows.
    """

    def __init__(self, problem: Problem, *, seed: int = 0, max_multiply_adds: int | None = None,
                 hard_rows: int = HARD_ROWS) -> None:
        if problem.rows < 1:
            raise InputError("there is nothing to validate in a problem without rows")
        self.problem = problem
        self.seed = seed
        size = problem.hidden * problem.out
        most = math.inf if max_multiply_adds is None else max(1, max_multiply_adds // size)
        tuned = int(min(problem.rows, most))
        ragged = min(_prime_below(max(tuned, 64), other_than=tuned), most)
        self.probe_rows = tuple(sorted({1, int(ragged), tuned}))
        self.random_rows = tuned
        self.hard_rows = int(min(hard_rows, most))

    def validate(self, run: Run, variations: Mapping[str, Run] = _NONE) -> Verdict:
        """Runs the three tests, cheap ones first, then a small exact probe in each variation, up to the first that fails.

        `run` gets inputs whose arrays are read-only, and the wanted gradients. A LaunchError from it is a failed test, and its
        text the reason; whatever else it raises, DeviceLost among them, passes through.

        Args:
            run: the kernel.
            variations: other ways to run it, by what they vary (Program.variations).
        """
        normwise: dict[str, float] = {}
        ratios: dict[str, float] = {}
        rows: set[int] = set()
        reason = None
        plain = [(case, run, "") for case in self._cases]
        varied = [(self._varied_case, other, f"; {what}") for what, other in variations.items()]
        for case, execute, how in (*plain, *varied):
            rows.add(case.inputs.rows)
            try:
                finding = case.judge(execute(case.inputs, case.wants))
            except DeviceLost:
                raise
            except LaunchError as error:
                reason = f"{error} ({case.title}){how}"
                break
            normwise.update(finding.normwise)
            for name, ratio in finding.ratios.items():
                ratios[name] = max(ratio, ratios.get(name, 0.0))
            if finding.reason:
                reason = finding.reason + how
                break
        errors = {name: GradientError(error, ratios[name]) for name, error in normwise.items()}
        return Verdict(reason is None, reason, errors, tuple(sorted(rows)))

    def screen(self, run: Run) -> Verdict:
        """One small exact probe: what a kernel must pass before it is worth a timing, and far too little to call it valid.

        `run` as for `validate`.
        """
        case = self._varied_case
        try:
            reason = case.judge(run(case.inputs, case.wants)).reason
        except DeviceLost:
            raise
        except LaunchError as error:
            reason = f"{error} ({case.title})"
        return Verdict(reason is None, reason, rows=(case.inputs.rows,))

    def prepare(self) -> None:
        """Makes the data and the references now, which the first validation would make otherwise."""
        _ = self._cases, self._varied_case

    def prepare_screen(self) -> None:
        """As prepare, for `screen` alone."""
        _ = self._varied_case

    @cached_property
    def _cases(self) -> tuple[Case, ...]:
        random, hard = (repeated(self._base(generate, rows), rows, self.seed)
                        for generate, rows in ((random_inputs, self.random_rows), (hard_inputs, self.hard_rows)))
        written = read_only(self._probe.expand())
        return (
            *(self._probe_case(rows, written.first(rows)) for rows in self.probe_rows),
            self._case("random data", random, read_only(random.expand()), normwise=True),
            self._case("hard data", hard, read_only(hard.expand())),
        )

    @cached_property
    def _varied_case(self) -> Case:
        """For variations of a run, and to screen: exact, so that no order of additions is an excuse, and small."""
        rows = min(self.hard_rows, self.probe_rows[-1])
        return self._probe_case(rows, read_only(self._probe.first(rows).expand()))

    @cached_property
    def _probe(self) -> Repeated:
        rows = self.probe_rows[-1]
        return balanced(self._base(probe_inputs, rows), rows, self.seed)

    def _base(self, generate: _Generator, rows: int) -> Inputs:
        """The distinct ones of so many rows of data."""
        problem = self.problem
        allowed = max(LEAST_BASE_ROWS, BASE_MULTIPLY_ADDS // (problem.hidden * problem.out))
        base_rows = min(rows, _prime_below(min(BASE_ROWS, allowed) + 1))
        return generate(base_rows, problem.hidden, problem.out, self.seed, dtype=problem.dtype, param_dtype=problem.param_dtype)

    def _probe_case(self, rows: int, inputs: Inputs) -> Case:
        return self._case("exact probe", self._probe.first(rows), inputs, exact_gradients(self._probe.base))

    def _case(self, kind: str, data: Repeated, inputs: Inputs, exact: frozenset[str] = frozenset(),
              normwise: bool = False) -> Case:
        return build_case(kind, data, self.problem.wants, self.problem.accuracy, inputs=inputs, exact=exact, normwise=normwise)


def _prime_below(limit: int, other_than: int = 0) -> int:
    """The largest prime below `limit` (at least 4) that is not `other_than`."""
    return next(n for n in range(limit - 1, 1, -1)
                if n != other_than and all(n % d for d in range(2, math.isqrt(n) + 1)))
