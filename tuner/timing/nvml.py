"""A GPU's gauges through NVML, the driver's management library; the only module that imports its binding.

What a GPU does not tell (laptops, virtual and partitioned GPUs tell little) is None or empty, never an error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tuner.errors import ToolchainError
from tuner.timing.health import Reading

REASONS = {
    0x04: "power limit", 0x08: "hardware slowdown", 0x10: "sync boost", 0x20: "thermal slowdown", 0x40: "thermal slowdown",
    0x80: "power brake"}
"""nvmlClocksEventReason*: why the SM clock is below the highest. Left out are those that take nothing from a busy GPU at its
usual clock: idle (0x01), clocks set by hand (0x02), display (0x100)."""

WINDOW_SECONDS = 1.0
"""The driver takes a process's share of the GPU a few times a second; the last of those may lie so far back."""


class NvmlGauge:
    """The gauges of one GPU. Its methods may be called from any thread.

    Args:
        bus_id: the GPU's PCI address, "0000:3b:00.0"; NVML numbers GPUs otherwise than CUDA does.

    Raises:
        ToolchainError: NVML, or its binding, is not there, or does not know the GPU.
    """

    def __init__(self, bus_id: str) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise ToolchainError(f"the package nvidia-ml-py cannot be imported ({error})") from error
        self._nvml: Any = pynvml
        self._known = False  # whether the driver's numbers of processes are those of this one
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode())
        except pynvml.NVMLError as error:
            raise ToolchainError(f"NVML says: {error}") from error

    def read(self) -> Reading:
        """What the gauges show now."""
        nvml, handle = self._nvml, self._handle
        mask = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        return Reading(
            self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            None if milliwatts is None else milliwatts / 1e3,
            self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            frozenset(text for bit, text in REASONS.items() if mask & bit))

    def others(self) -> int | None:
        """The share of the GPU that other processes had of late, per cent; 0 where the GPU does not tell.

        None where the driver knows processes by other numbers than this one does, as in a container: then nobody can say which
        of them are others.
        """
        since = int(1e6 * (time.time() - WINDOW_SECONDS))
        samples = self._ask(self._nvml.nvmlDeviceGetProcessUtilization, self._handle, since) or ()
        shares: dict[int, int] = {}
        for sample in samples:
            if sample.timeStamp >= since:
                shares[sample.pid] = max(shares.get(sample.pid, 0), int(sample.smUtil))
        others = {pid: share for pid, share in shares.items() if not _is_ours(pid)}
        self._known = self._known or len(others) < len(shares) or any(_is_ours(pid) for pid in self._holders())
        if others and not self._known:
            return None
        return max((share for pid, share in others.items() if _is_alive(pid)), default=0)

    def _holders(self) -> list[int]:
        """The processes that have a context on the GPU."""
        return [process.pid for process in self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, self._handle) or ()]

    def _ask(self, function: Callable[..., Any], *arguments: object) -> Any:
        try:
            return function(*arguments)
        except self._nvml.NVMLError:  # not supported, no permission, nothing found
            return None


def _is_alive(pid: int) -> bool:
    """Whether there is such a process; one that has ended may have been a worker of ours, and disturbs no more."""
    return Path(f"/proc/{pid}").exists()


def _is_ours(pid: int) -> bool:
    """Whether a process is this one, or was started by it or by what it started."""
    while pid > 1 and pid != os.getpid():
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        pid = int(status.rpartition(")")[2].split()[1])
    return pid == os.getpid()
