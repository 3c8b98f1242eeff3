"""Where candidates lie under the ceilings of their GPU, and where the winner's time goes."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.arithmetic import PLANES, products
from codegen.limits import matrix_rate
from codegen.space import variant_of, why_refused
from reports.run import Run
from tuner.bench.gap import known_gap
from tuner.costmodel import L2_TBPS, StepCost, predict, tensor_bytes
from tuner.records import Record

FMA_PER_CYCLE = 128
"""float32 multiply-adds of one SM in one cycle: "Arithmetic Instructions" in the CUDA C++ Programming Guide, for 8.6 and later;
for 8.0 it is 64."""

HALF_RATE = ("sm_80",)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One bound.

    Attributes:
        name: what bounds.
        unit: "TB/s": a slope; "TFLOP/s" or "us": level.
        value: in that unit.
        origin: where it is from, as a clause.
        tflops: the height of a level one; None for a slope.
    """

    name: str
    unit: str
    value: float
    origin: str
    tflops: float | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate.

    Attributes:
        record: which.
        intensity: operations a byte.
        tflops: what it reached, TFLOP/s.
    """

    record: Record
    intensity: float
    tflops: float


def operations(run: Run) -> float:
    """Of the two matrix products, 4*M*H*O: each multiply-add is two. What else a call computes is small beside them."""
    return 4.0 * run.problem.rows * run.problem.hidden * run.problem.out


def points(run: Run) -> list[Point]:
    """The valid candidates, but for those that the rules of today refuse, whose plans are not known.

    The bytes of one are its tensors, and its workspace written once and read once.
    """
    sms, least = run.ceilings.limits.sms, tensor_bytes(run.problem)
    found = []
    for record in run.valid:
        if why_refused(run.problem, record.config, run.ceilings.limits):
            continue
        plan = variant_of(record.config.variant).plan(run.problem, record.config.as_dict())
        moved = least + 2 * plan.workspace_bytes(run.problem.rows, sms)
        found.append(Point(record, operations(run) / max(moved, 1), operations(run) / (record.best_us * 1e6)))
    return found


def ceilings(run: Run) -> list[Ceiling]:
    """Copy, L2, one launch, float32 units, tensor cores, and what these leave to the winner's arithmetic."""
    limits, rates = run.ceilings.limits, run.ceilings.rates
    table = f"from the table of targets, for {limits.name}"
    fma = limits.sms * FMA_PER_CYCLE * (0.5 if limits.arch in HALF_RATE else 1.0) * 2 * limits.clock_ghz / 1e3
    matrix, matrix_origin = rates.matrix_tflops, run.ceilings.matrix_origin
    if matrix is None:
        matrix, matrix_origin = limits.sms * matrix_rate(limits.arch) * 2 * limits.clock_ghz / 1e3, f"{table}, by mma.sync"
    once = operations(run) / (limits.launch_us * 1e6)
    found = [
        Ceiling("device memory", "TB/s", limits.copy_tbps, run.ceilings.origin),
        Ceiling("L2 cache", "TB/s", L2_TBPS, "from the cost model's table"),
        Ceiling("one launch", "us", limits.launch_us, run.ceilings.origin, once),
        Ceiling("float32 units", "TFLOP/s", fma, table, fma),
        Ceiling("tensor cores, 16 bits", "TFLOP/s", matrix, matrix_origin, matrix)]
    arithmetic = "" if run.winner is None else str(run.winner.config.as_dict().get("arithmetic", ""))
    if arithmetic in PLANES and (several := products(arithmetic)) > 1:
        found.append(Ceiling(f"tensor cores, {arithmetic}", "TFLOP/s", matrix / several, f"a {several}th of the above"
                             if several > 3 else "a third of the above", matrix / several))
    return found


@dataclass(frozen=True, slots=True)
class Spent:
    """Where the winner's time goes, as far as it is known.

    Attributes:
        time_us: of a call.
        steps: what the cost model says of each step of its plan; their sum is no measurement.
        floor_us: what no kernel is expected to beat.
        gap: the largest known part of what lies between, as a clause; empty where none is known.
    """

    time_us: float
    steps: tuple[StepCost, ...]
    floor_us: float
    gap: str

    @property
    def predicted_us(self) -> float:
        """The sum of the steps."""
        return sum(step.time_us for step in self.steps)


def spent(run: Run, winner: Record) -> Spent | None:
    """The winner's time against its floor; None where the rules of today refuse its config, so that its steps are not known."""
    limits = run.ceilings.limits
    if why_refused(run.problem, winner.config, limits):
        return None
    prediction = predict(run.problem, winner.config, limits, winner.resources)
    gap = known_gap(run.problem, winner.config, limits, run.floor, run.ceilings.rates, winner.best_us)
    return Spent(winner.best_us, prediction.steps, run.floor_us, gap)
