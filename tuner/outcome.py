"""What a tuning run tells while it runs, and what it hands back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

from codegen.limits import Limits
from codegen.problem import Problem
from codegen.space import make_config, why_not
from tuner.candidates import without_figures
from tuner.changed import Changed
from tuner.costmodel import floor_us
from tuner.gate.checks import SKIPPED, Check
from tuner.records import Record, RunInfo, Status

REJECTED = frozenset(Status) - {Status.OK, Status.REFUSED, Status.NOT_RUN}
"""What becomes of a candidate that was tried and may not win. One that is slower is not wrong as far as it was looked at: where
validating takes long, what cannot win is not validated."""


@dataclass(frozen=True, slots=True)
class Event:
    """How far a run is.

    Attributes:
        stage: "predicting times", "compiling the first candidates", "trying candidates", "validating the fastest", "timing the
            fastest again", "examining the fastest", "checking the configs for other row counts" or "changing one parameter at a
            time".
        done, total: steps of the stage; total is an upper limit. 0 of 1 where nobody counts them.
        best: the fastest valid candidate so far.
        rejected: counts by status of the candidates that were rejected.
    """

    stage: str
    done: int
    total: int
    best: Record | None
    rejected: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TuneResult:
    """What a run found.

    Attributes:
        info: what it was made under.
        problem: what the kernels compute.
        limits: the GPU.
        records: one per candidate, in the order in which they were tried; those not run come last.
        winner: the fastest valid one; None where there is none.
        lost: a sentence where the run ended early because the GPU failed.
        said: what is to be known of the measured times and of the choice between the finalists, as clauses.
        checks: what the winner has passed beyond what all have, and what was not run.
        ablation: what each parameter of the winner is worth; empty where that was not asked for.
        variants: names of those that took part.
    """

    info: RunInfo
    problem: Problem
    limits: Limits
    records: tuple[Record, ...]
    winner: Record | None
    lost: str | None = None
    said: tuple[str, ...] = ()
    checks: tuple[Check, ...] = (SKIPPED,)
    ablation: tuple[Changed, ...] = ()
    variants: tuple[str, ...] = ()

    @property
    def floor_us(self) -> float:
        """What no kernel is expected to beat: the tensors at copy bandwidth, or one launch."""
        return floor_us(self.problem, self.limits)

    def best_by_variant(self) -> dict[str, Record]:
        """The fastest valid record of each variant that has one: the winner, then the others' by time."""
        return {str(variant): record for variant, record in self._best_by(lambda record: record.config.variant).items()}

    def best_by_reduction(self) -> list[Record]:
        """The fastest valid record of each variant and reduction that has one: the winner, then the others by time."""
        return list(self._best_by(lambda record: (record.config.variant, record.config["reduction"])).values())

    def _best_by(self, group: Callable[[Record], Hashable]) -> dict[Hashable, Record]:
        best: dict[Hashable, Record] = {}
        for record in sorted(self.valid(), key=lambda record: (record is not self.winner, record.best_us)):
            best.setdefault(group(record), record)
        return best

    def valid(self) -> list[Record]:
        """The records that may win."""
        return [record for record in self.records if record.status is Status.OK]

    def rejections(self) -> Counter[str]:
        """How many candidates were tried and rejected, by status."""
        return rejections(self.records)


def spills(record: Record) -> bool:
    """Whether the compiler had to keep values in local memory that did not fit into a thread's registers."""
    return any(entry.spill_bytes for entry in record.resources.values())


def rejections(records: Iterable[Record]) -> Counter[str]:
    """Counts by status of the candidates that were tried and rejected."""
    return Counter(record.status.value for record in records if record.status in REJECTED)


def why_no_winner(result: TuneResult) -> str:
    """The sentence for a run without a valid candidate."""
    rejected = [record for record in result.records if record.status in REJECTED]
    if rejected:
        status, count = result.rejections().most_common(1)[0]
        reason = next(record.reason for record in rejected if record.status.value == status)
        return f"no valid kernel: {count} of {len(rejected)} candidates ended with status {status!r}, the first with: {reason}"
    if result.info.valid == 0:
        return (f"no valid kernel: none of {result.info.combinations} configs can run this shape and is worth it; a common "
                f"reason, with the figures of one of them: {_telling(result)}")
    return "no candidate was finished in time; allow more with --timeout"


def _telling(result: TuneResult) -> str:
    """The commonest reason that also speaks against a variant's defaults: these go together, so it is the shape's. Commonest of
    all may be one that speaks against parameters that go together at no shape."""
    refused = result.info.refused
    defaults = (why_not(result.problem, make_config(name), result.limits) for name in result.variants)
    of_defaults = {without_figures(reason) for reason in defaults if reason is not None}
    return next((reason for reason in refused if without_figures(reason) in of_defaults), next(iter(refused), "there are none"))
