"""Where the time of a call goes, by the counters of its launches: the parts add up to the time, and the largest gets a reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.bench.counters import MEMORY, TENSOR, Counted
from tuner.bench.floors import Floor

LAUNCHING = "launching"
"""What bounds a call that is shorter than a launch: no unit."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of what lies between a floor and a kernel's time.

    Attributes:
        us: microseconds.
        what: what it is, as a clause.
    """

    us: float
    what: str


def bound(floor: Floor) -> str:
    """The unit that the floor is the time of: MEMORY, TENSOR or LAUNCHING."""
    times = {LAUNCHING: floor.launch_us, MEMORY: floor.bytes_us, TENSOR: floor.matrix_us or 0.0}
    return max(times, key=times.__getitem__)


def parts(launches: Sequence[Counted], floor: Floor, ours_us: float) -> list[Part]:
    """What lies between the floor and the time of a call, the largest part first; parts of 0 are left out.

    A launch is split at the unit that bounds the floor: for a share of its time that unit was busy, and the rest it was not. What
    all launches kept it busy for beyond the floor is work that the floor does not count: further products of an arithmetic, or
    traffic of the workspace. What the launches' own times do not explain lies between them: fills, starts and ends. Launches were
    counted one at a time; where they overlap in a call, that last part is negative, and left out.

    Args:
        launches: those of one call.
        ours_us: the time of a call in a row of them.
    """
    unit = bound(floor)
    busy = {at: launch.us * launch.busy.get(unit, 0.0) for at, launch in enumerate(launches)}
    found = [] if unit == LAUNCHING else [Part(sum(busy.values()) - floor.us, _more_work(unit))]
    found += [Part(launch.us - busy[at], f"`{launch.kernel}`{_idle(unit)}; {_reason(launch, unit)}")
              for at, launch in enumerate(launches)]
    between = ours_us - sum(launch.us for launch in launches)
    found.append(Part(between, "between the launches, and what fills take"))
    return sorted((part for part in found if part.us > 0), key=lambda part: -part.us)


def _more_work(unit: str) -> str:
    return "tensor cores at work beyond the floor's products" if unit == TENSOR else "memory at work beyond the tensors' bytes"


def _idle(unit: str) -> str:
    return {TENSOR: " with idle tensor cores", MEMORY: " with idle memory"}.get(unit, "")


def _reason(launch: Counted, unit: str) -> str:
    """What the launch was busy with else, or waited for."""
    said = [f"its {name} busy {launch.busy[name]:.0%}" for name in [launch.busiest] if name is not None and name != unit]
    if waits := launch.main_waits():
        said.append("its warps wait for " + " and ".join(f"{wait} ({launch.waits[wait]:.0%})" for wait in waits))
    return ", ".join(said) or "nothing more is known"
