"""Spells of samples that cannot be believed are discarded and that is said; NVML may be missing, or tell little."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fake_gauge import CALM, FakeGauge, watch_over
from tuner.errors import LaunchError
from tuner.executors import Timing
from tuner.executors.cuda import CudaExecutor
from tuner.timing.health import (
    ATTEMPTS,
    CONTENDED_PERCENT,
    MOST_PAUSED_SECONDS,
    PAUSE_SECONDS,
    PERIOD_SECONDS,
    Reading,
    Watch,
    open_watch,
)
from tuner.timing.nvml import NvmlGauge
from tuner.timing.tally import Tally

TIMING = Timing((10.0,), 1)
HOT = replace(CALM, sm_mhz=1200, temperature_c=92, reasons=frozenset(("thermal slowdown",)))


def test_a_calm_spell_is_taken_once() -> None:
    taken = []
    watch = watch_over(FakeGauge())
    spell = watch.take(lambda: taken.append(1) or TIMING)
    assert spell.timing is TIMING and spell.disturbed is None and not spell.capped and spell.sm_mhz == 1980
    assert len(taken) == 1
    assert watch.drain().said() == (
        "while times were taken, the GPU was at 1980 to 1980 MHz, 300 to 300 W, 50 to 50 degrees Celsius",)


def test_a_throttled_spell_is_discarded_and_taken_again() -> None:
    gauge, pauses = FakeGauge(HOT), list[float]()

    def cool(seconds: float) -> None:
        pauses.append(seconds)
        gauge.now = CALM

    watch = watch_over(gauge, cool)
    times = iter((Timing((20.0,), 1), Timing((10.0,), 1)))
    spell = watch.take(lambda: next(times))
    assert spell.timing.median == 10.0 and spell.disturbed is None and len(pauses) == 1
    assert "a spell of samples was discarded and taken again: thermal slowdown" in watch.drain().said()


def test_what_happens_only_in_the_middle_of_a_spell_is_seen() -> None:
    gauge = FakeGauge()

    def measure() -> Timing:
        gauge.now = HOT
        looked, deadline = gauge.looks, time.monotonic() + 5.0
        while gauge.looks < looked + 2 and time.monotonic() < deadline:
            time.sleep(PERIOD_SECONDS)
        gauge.now = CALM
        return TIMING

    assert watch_over(gauge).take(measure, attempts=1).disturbed == "thermal slowdown"


def test_a_disturbance_that_stays_is_kept_and_said() -> None:
    taken = []
    watch = watch_over(FakeGauge(HOT, other=CONTENDED_PERCENT))
    spell = watch.take(lambda: taken.append(1) or TIMING)
    assert len(taken) == ATTEMPTS and spell.disturbed == "thermal slowdown and another process used the GPU"
    said = watch.drain().said()
    assert f"{ATTEMPTS - 1} spells of samples were discarded and taken again: {spell.disturbed}" in said
    assert f"a spell of samples was disturbed at the last attempt too, and used: {spell.disturbed}" in said


def test_pauses_of_a_watch_are_bounded() -> None:
    """Else a GPU that is always hot would take the whole time of a run."""
    taken, pauses = [], list[float]()
    watch = watch_over(FakeGauge(HOT), pauses.append)
    for _ in range(100):
        watch.take(lambda: taken.append(1) or TIMING)
    assert MOST_PAUSED_SECONDS <= sum(pauses) <= MOST_PAUSED_SECONDS + PAUSE_SECONDS
    assert len(taken) == 100 + len(pauses)
    assert "100 spells of samples were disturbed at the last attempt too, and used: thermal slowdown" in watch.drain().said()


def test_a_little_use_by_others_is_no_disturbance() -> None:
    assert watch_over(FakeGauge(other=CONTENDED_PERCENT - 1)).take(lambda: TIMING).disturbed is None


def test_the_power_limit_is_the_kernels_own_and_not_taken_again() -> None:
    watch = watch_over(FakeGauge(replace(CALM, sm_mhz=1500, reasons=frozenset(("power limit",)))))
    spell = watch.take(lambda: TIMING)
    assert spell.capped and spell.disturbed is None and spell.sm_mhz == 1500
    assert "1 of 1 spells of samples ran at the power limit" in watch.drain().said()


def test_clocks_that_did_not_settle_are_said() -> None:
    watch = Watch()
    watch.take(lambda: TIMING)
    watch.take(lambda: replace(TIMING, settled=False))
    assert watch.drain().said() == ("the clocks had not become stable before 1 of 2 spells of samples",)


def test_a_failed_launch_ends_the_watching_of_its_spell() -> None:
    gauge = FakeGauge()

    def fail() -> Timing:
        raise LaunchError("too many resources requested for launch")

    with pytest.raises(LaunchError):
        watch_over(gauge).take(fail)
    looks = gauge.looks
    time.sleep(3 * PERIOD_SECONDS)
    assert gauge.looks == looks


def test_what_processes_counted_adds_up() -> None:
    gauge, total = FakeGauge(HOT), Tally()
    first, second = watch_over(gauge), Watch(None, "there is no NVML")
    first.take(lambda: TIMING, attempts=2)
    total.add(first.drain())
    gauge.now = CALM
    first.take(lambda: TIMING)
    second.take(lambda: replace(TIMING, settled=False))
    for watch in (second, first):
        total.add(Tally.from_json(json.loads(json.dumps(watch.drain().as_json()))))
    assert total.said() == (
        "nothing watched the GPU's clocks, heat and other users (there is no NVML)",
        "while times were taken, the GPU was at 1200 to 1980 MHz, 300 to 300 W, 50 to 92 degrees Celsius",
        "a spell of samples was discarded and taken again: thermal slowdown",
        "a spell of samples was disturbed at the last attempt too, and used: thermal slowdown",
        "the clocks had not become stable before 1 of 3 spells of samples")
    assert first.drain().said() == ()


# --- NVML ---------------------------------------------------------------------------------------------------------------------


class FakeNvmlError(Exception):
    pass


class FakeNvml:
    """The binding's functions, as far as they are used."""

    NVMLError = FakeNvmlError
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __init__(self, mask: int = 0, silent: frozenset[str] = frozenset(),
                 uses: tuple[tuple[int, int | None], ...] = ()) -> None:
        self.mask, self.silent, self.uses = mask, silent, uses
        self.asked: list[bytes] = []

    def _tell(self, name: str, value: Any) -> Any:
        if name in self.silent:
            raise FakeNvmlError("Not Supported")
        return value

    def nvmlInit(self) -> None:
        self._tell("init", None)

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: bytes) -> str:
        self.asked.append(bus_id)
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:
        return self._tell("clock", 1755)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return self._tell("power", 512_300)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return self._tell("temperature", 61)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self._tell("reasons", self.mask)

    def nvmlDeviceGetProcessUtilization(self, handle: str, since: int) -> list[Any]:
        now = int(1e6 * time.time())
        stale = SimpleNamespace(pid=99, smUtil=100, timeStamp=since - 1)
        return self._tell("uses", [stale, *(SimpleNamespace(pid=pid, smUtil=share, timeStamp=now)
                                            for pid, share in self.uses if share is not None)])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return self._tell("holders", [SimpleNamespace(pid=pid) for pid, _ in self.uses])


def gauge_of(monkeypatch: pytest.MonkeyPatch, fake: FakeNvml) -> NvmlGauge:
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    return NvmlGauge("0000:3B:00.0")


@pytest.mark.parametrize(("mask", "reasons"), [
    (0x0, set()), (0x1 | 0x2 | 0x100, set()), (0x4, {"power limit"}), (0x20, {"thermal slowdown"}), (0x40, {"thermal slowdown"}),
    (0x8 | 0x80, {"hardware slowdown", "power brake"})])
def test_what_nvml_tells(monkeypatch: pytest.MonkeyPatch, mask: int, reasons: set[str]) -> None:
    fake = FakeNvml(mask)
    assert gauge_of(monkeypatch, fake).read() == Reading(1755, 512.3, 61, frozenset(reasons))
    assert fake.asked == [b"0000:3B:00.0"]


def test_what_nvml_does_not_tell_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gauge = gauge_of(monkeypatch, FakeNvml(0x40, frozenset(("clock", "power", "temperature", "reasons", "uses"))))
    assert gauge.read() == Reading() and gauge.others() == 0
    watch = Watch(gauge)
    assert watch.take(lambda: TIMING).sm_mhz is None and watch.drain().said() == ()


NOBODY, NOBODY_ELSE = 2**22 + 1, 2**22 + 2  # above every number that Linux gives to a process


@pytest.mark.parametrize(("uses", "others"), [
    ([], 0), ([("we", 90)], 0), ([("we", 20), ("another", 70)], 70), ([("a child", 20), ("another", 70)], 70),
    ([("a child", 90), ("a child that ended", 60)], 0), ([("elsewhere", 90), ("elsewhere too", 30)], None),
    ([("another", 70)], None), ([("another", 70), ("a child", None)], 70)], ids=str)
def test_whose_use_is_another_processes(monkeypatch: pytest.MonkeyPatch, uses: list[tuple[str, int | None]],
                                        others: int | None) -> None:
    """Those of a worker are ours, and those of a worker before it no disturbance. Where no number is ours, not even of what has a
    context and did nothing of late, the numbers are those of a machine outside."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        pids = {"we": os.getpid(), "another": os.getppid(), "a child": child.pid, "a child that ended": ended.pid,
                "elsewhere": NOBODY, "elsewhere too": NOBODY_ELSE}
        assert gauge_of(monkeypatch, FakeNvml(uses=tuple((pids[who], share) for who, share in uses))).others() == others
        child.communicate(b"\n")


def test_that_others_cannot_be_told_apart_is_said_once() -> None:
    watch = watch_over(FakeGauge(other=None))
    spells = [watch.take(lambda: TIMING) for _ in range(3)]
    assert not any(spell.disturbed for spell in spells)
    tally = watch.drain()
    assert sum("by other numbers than this one does" in clause for clause in tally.said()) == 1
    assert Tally.from_json(json.loads(json.dumps(tally.as_json()))) == tally


def test_without_nvml_the_times_are_taken_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    watch = open_watch("0000:3B:00.0")
    assert watch.take(lambda: TIMING).timing is TIMING
    assert "nothing watched the GPU's clocks, heat and other users (the package nvidia-ml-py" in watch.drain().said()[0]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(silent=frozenset(("init",))))  # type: ignore[arg-type]
    assert "(NVML says: Not Supported)" in open_watch("0000:3B:00.0").drain().said()[0]


def test_without_a_gpu_there_is_nothing_to_watch_or_to_say() -> None:
    assert open_watch(None).drain().said() == ()


@pytest.mark.cuda
def test_on_the_card_the_gauges_move(cuda_executor: CudaExecutor) -> None:
    """Where nvidia-ml-py is installed; elsewhere it must be said that it is not."""
    watch = open_watch(cuda_executor.bus_id)
    us = []
    for _ in range(3):
        spell = watch.take(lambda: Timing((cuda_executor.measure_launch_us(),), 1))
        us.append(spell.timing.median)
    said = " ".join(watch.drain().said())
    assert min(us) > 0.0 and ("MHz" in said) != ("nvidia-ml-py" in said), said
    if "MHz" in said:
        assert spell.sm_mhz is not None and spell.sm_mhz > 300


@pytest.mark.cuda
def test_on_the_card_watching_costs_no_time(cuda_executor: CudaExecutor) -> None:
    watch, blind = open_watch(cuda_executor.bus_id), Watch()
    pairs = [(watch.take(measure).timing.median, blind.take(measure).timing.median)
             for measure in [lambda: Timing((cuda_executor.measure_launch_us(),), 1)] * 5]
    watched, unwatched = (min(times) for times in zip(*pairs, strict=True))
    assert watched == pytest.approx(unwatched, rel=0.03)
