"""What Nsight Compute counts in each launch of a call: `ncu --csv --page raw`, read and put into words.

Names of metrics and sections are those of the Nsight Compute documentation, "Metrics Reference" and "Sections and Rules".
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tuner.errors import ToolchainError

SECTIONS = ("SpeedOfLight", "WarpStateStats")
"""The first has how busy memory and caches were, the second what warps waited for."""

_US, _CYCLES = "gpu__time_duration.sum", "sm__cycles_elapsed.max"
_READ, _WRITTEN, _L2_BYTES = "dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum"
_TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
_ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_active"

METRICS = (_US, _CYCLES, _READ, _WRITTEN, _L2_BYTES, _TENSOR, _ISSUE)
"""What is asked for beside the sections."""

MEMORY, TENSOR = "memory", "tensor cores"
UNITS: Mapping[str, tuple[str, ...]] = {
    MEMORY: ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", "dram__throughput.avg.pct_of_peak_sustained_elapsed"),
    "L2": ("lts__throughput.avg.pct_of_peak_sustained_elapsed",),
    "L1 and shared memory": ("l1tex__throughput.avg.pct_of_peak_sustained_active",),
    TENSOR: (_TENSOR,), "issue slots": (_ISSUE,)}
"""The parts of a GPU that can be what a launch waits for, and the metrics that say how busy one was, the first that is there."""

_STALL, _STALL_END = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"
_NO_WAIT = ("selected", "not_selected")  # the warp was, or could have been, served
_WAITS = {
    "barrier": "a barrier of the block", "branch_resolving": "branches", "dispatch_stall": "the dispatcher",
    "drain": "stores at the end", "gmma": "warpgroup products", "imc_miss": "constants", "lg_throttle": "the queue to memory",
    "long_scoreboard": "values from memory", "math_pipe_throttle": "a busy pipe", "membar": "fences",
    "mio_throttle": "the queue to shared memory", "misc": "other reasons", "no_instruction": "instructions",
    "short_scoreboard": "shared memory", "sleeping": "sleeping", "tex_throttle": "the queue to L1",
    "wait": "the latency of arithmetic"}

_SCALES = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6,
           "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
"""Of units, to microseconds and bytes."""


@dataclass(frozen=True, slots=True)
class Counted:
    """One launch.

    Attributes:
        kernel: its name.
        us: how long it took by itself, microseconds.
        ghz: the clock of the SMs, cycles a nanosecond.
        memory_bytes, l2_bytes: what went between L2 and memory, and between L2 and the SMs.
        busy: share of its peak, 0 to 1, for each of UNITS of which it is known.
        waits: what warps waited for, as shares of their time; only what was counted.
    """

    kernel: str
    us: float
    ghz: float
    memory_bytes: float
    l2_bytes: float
    busy: Mapping[str, float]
    waits: Mapping[str, float]

    @property
    def busiest(self) -> str | None:
        """The unit that was nearest to its peak."""
        return max(self.busy, key=self.busy.__getitem__, default=None)

    def main_waits(self, most: int = 2) -> list[str]:
        """What warps waited for most, the longest first."""
        return sorted(self.waits, key=self.waits.__getitem__, reverse=True)[:most]

    def as_json(self) -> dict[str, Any]:
        """The launch as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Counted:
        """Reads `as_json` back.

        Raises:
            TypeError: the values have another form.
        """
        return cls(**values)


def read_counters(said: str, kernels: Collection[str]) -> list[Counted]:
    """The launches of these kernels, in order, from what ncu has printed.

    Raises:
        ToolchainError: there is no table in it, or a launch without its time.
    """
    table = [row for row in csv.reader(line for line in said.splitlines() if line.startswith('"')) if row]
    begin = next((at for at, row in enumerate(table) if "Kernel Name" in row), None)
    if begin is None or len(table) < begin + 2:
        raise ToolchainError("Nsight Compute has printed no table of its counters")
    names, units = table[begin], table[begin + 1]
    launches = [_counted(_values(names, units, row), row[names.index("Kernel Name")]) for row in table[begin + 2:]
                if len(row) == len(names)]
    return [launch for launch in launches if launch.kernel in kernels]


def _values(names: list[str], units: list[str], row: list[str]) -> dict[str, float]:
    """What can be read as a number, by its metric, in microseconds, bytes or as it stands."""
    found: dict[str, float] = {}
    for name, unit, text in zip(names, units, row, strict=True):
        try:
            found[name] = float(text.replace(",", "")) * _SCALES.get(unit, 1.0)
        except ValueError:
            continue
    return found


def _counted(values: Mapping[str, float], kernel: str) -> Counted:
    if not values.get(_US):
        raise ToolchainError(f"Nsight Compute has not said how long {kernel} took")
    busy = {unit: next(values[name] for name in choices if name in values) / 100
            for unit, choices in UNITS.items() if not values.keys().isdisjoint(choices)}
    stalls = {name.removeprefix(_STALL).removesuffix(_STALL_END): value for name, value in values.items()
              if name.startswith(_STALL) and name.endswith(_STALL_END) and "_not_issued" not in name}
    whole = sum(stalls.values())
    waits = {_WAITS.get(reason, reason.replace("_", " ")): value / whole for reason, value in stalls.items()
             if reason not in _NO_WAIT and value > 0}
    return Counted(kernel, values[_US], values.get(_CYCLES, 0.0) / values[_US] / 1e3,
                   values.get(_READ, 0.0) + values.get(_WRITTEN, 0.0), values.get(_L2_BYTES, 0.0), busy, waits)
