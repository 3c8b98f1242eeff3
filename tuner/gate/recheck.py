"""What a winner is proven on that no candidate has seen: other data at other row counts; and that it repeats every bit.

Row counts. The search validates at the tuned count, at 1, at a prime and at 257. Here there are one just below the tuned count,
one that is a full warp and a row, and one for the hard data that is full tiles and two rows.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, islice

from codegen.problem import Problem
from tuner.dtypes import same_bits
from tuner.errors import DeviceLost, LaunchError
from tuner.executors import Run
from tuner.inputs import Inputs, random_inputs, read_only, repeated
from tuner.validate import BASE_ROWS, Validator, Verdict

SEED_STEP = 104_729
"""From the seed of the search to that of the other data."""

NEAR = (-3, -2, -4, 3, -1)
"""Distances from the tuned row count, of which the first that gives a new one is taken."""

SMALL_ROWS = (33, 34, 35)
"""The first of these that is a new one is taken."""

MANY_WEIGHTS = 1 << 22
"""With more weights than this, making them anew takes longer than the small count teaches; hard data has few rows as well."""

HARD_ROWS = 130

GPU_ELEMENTS = 1 << 26
"""Elements of the tensors that grow with the rows in one run on a GPU: 256 MB of float32. Beyond, rows are fewer; making and
comparing more would take longer than the gate has."""

HOST_MULTIPLY_ADDS, HOST_AUDIT_MULTIPLY_ADDS = 7_500_000, 1_500_000
"""Largest rows * H * O of one run on the CPU: about a quarter of a second, and for each of the many of an audit a twentieth."""

AUDIT_RUNS = 20
"""Runs of one call that must give the same bits."""

AUDIT_SECONDS, LEAST_AUDIT_RUNS = 10.0, 3
"""An audit ends after so long, but not with fewer runs: each way there is to run on the CPU once."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What repeating a call showed.

    Attributes:
        runs: how often it ran.
        rows: at which row count.
        reason: how a run differed or failed, as a clause; None where all gave the same bits.
    """

    runs: int
    rows: int
    reason: str | None = None


class Recheck:
    """Makes the data and the references when they are first needed; they serve all winners of a problem.

    Args:
        problem: what the kernels compute.
        seed: of the search.
        on_gpu: whether they run on a GPU.
        used: row counts at which the search validates.
    """

    def __init__(self, problem: Problem, seed: int, on_gpu: bool, used: Collection[int]) -> None:
        self._problem = problem
        self._seed = seed + SEED_STEP
        self._on_gpu = on_gpu
        self._used = frozenset(used)

    @property
    def rows(self) -> tuple[int, ...]:
        """The row counts that validation is about; where only one row can be afforded, that."""
        most = self._most(HOST_MULTIPLY_ADDS)
        tuned = min(self._problem.rows, most)
        near = self._first_new([tuned, *(tuned + step for step in NEAR)] if tuned < self._problem.rows
                               else [tuned + step for step in NEAR], most)
        few_weights = self._problem.hidden * self._problem.out <= MANY_WEIGHTS
        small = self._first_new([rows for rows in SMALL_ROWS if few_weights and rows != near], most)
        return tuple(rows for rows in (near, small) if rows is not None) or (tuned,)

    def _first_new(self, counts: list[int], most: int) -> int | None:
        return next((rows for rows in counts if 1 <= rows <= most and rows not in self._used), None)

    def _most(self, host_multiply_adds: int) -> int:
        problem = self._problem
        if self._on_gpu:
            return max(1, GPU_ELEMENTS // (2 * problem.hidden + problem.out))
        return max(1, host_multiply_adds // (problem.hidden * problem.out))

    @cached_property
    def _validators(self) -> tuple[Validator, ...]:
        limit = None if self._on_gpu else HOST_MULTIPLY_ADDS
        return tuple(Validator(replace(self._problem, rows=rows), seed=self._seed, max_multiply_adds=limit, hard_rows=HARD_ROWS)
                     for rows in self.rows)

    @cached_property
    def _audited(self) -> Inputs:
        problem = self._problem
        rows = min(problem.rows, self._most(HOST_AUDIT_MULTIPLY_ADDS))
        base = random_inputs(min(rows, BASE_ROWS), problem.hidden, problem.out, self._seed,
                             dtype=problem.dtype, param_dtype=problem.param_dtype)
        return read_only(repeated(base, rows, self._seed).expand())

    def validate(self, run: Run, variations: Mapping[str, Run]) -> Verdict:
        """As Validator.validate, on the other data, without errors."""
        rows: set[int] = set()
        for validator in self._validators:
            verdict = validator.validate(run, variations)
            rows.update(verdict.rows)
            if not verdict.ok:
                return Verdict(False, f"on other data than that of the search: {verdict.reason}", rows=tuple(sorted(rows)))
        return Verdict(True, None, rows=tuple(sorted(rows)))

    def audit(self, run: Run, variations: Mapping[str, Run]) -> Audit:
        """Repeats one call on the same data, in each way there is by turns, and compares the bits.

        Raises:
            DeviceLost: as `run`.
        """
        ends = time.monotonic() + AUDIT_SECONDS
        inputs, wants = self._audited, self._problem.wants
        first = None
        done = 0
        for execute in islice(cycle([run, *variations.values()]), AUDIT_RUNS):
            if done >= LEAST_AUDIT_RUNS and time.monotonic() > ends:
                break
            try:
                found = execute(inputs, wants).present()
            except DeviceLost:
                raise
            except LaunchError as error:
                return Audit(done, inputs.rows, f"failed when it was repeated: {error}")
            done += 1
            first = found if first is None else first
            for name, array in found.items():
                if not same_bits(array, first[name]):
                    return Audit(done, inputs.rows, f"gives other bits in {name} when it is repeated, at {inputs.rows} rows")
        return Audit(done, inputs.rows)
