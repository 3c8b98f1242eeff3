"""Where the time goes: what is read of Nsight Compute's counters, which part is the largest, and the pages made of them."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from codegen.problem import Problem, Shape
from codegen.render import render
from codegen.space import parse_config
from tests import fake_ncu
from tests.fake_bench import RatedGpu
from tests.fake_cuda import FakeCuda, open_executor
from tuner.bench import profile, profiled
from tuner.bench.counters import METRICS, Counted, read_counters
from tuner.bench.floors import Floor, Rates
from tuner.bench.measure import Spread
from tuner.bench.report import bench_json
from tuner.bench.results import Case, Entry, Results, Row, Setting
from tuner.bench.shapes import NamedShape
from tuner.bench.shares import parts
from tuner.errors import ToolchainError
from tuner.executors.cuda import CudaExecutor
from tuner.store import Store
from tuner.workers.messages import Job, Place

ROOT = Path(__file__).resolve().parent.parent
BUS_ID = "0000:3B:00.0"
RATES = Rates(copy_tbps=4.0, launch_us=0.7, matrix_tflops=700.0)
CONFIG = "row_warp:splits=4,reduction=two_pass"
NAMED = NamedShape("mine", Shape(4, 8, 64, 64))

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COLUMNS = {
    "ID": "", "Kernel Name": "", "gpu__time_duration.sum": "ns", "sm__cycles_elapsed.max": "cycle",
    "dram__bytes_read.sum": "byte", "dram__bytes_write.sum": "byte", "lts__t_bytes.sum": "byte",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "%", "lts__throughput.avg.pct_of_peak_sustained_elapsed": "%",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "%",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "%", STALL.format("long_scoreboard"): "inst",
    STALL.format("barrier"): "inst", STALL.format("selected"): "inst", STALL.format("barrier_not_issued"): "inst"}
LINE = ["0", "row_warp", "12,000", "20,400", "1,000,000", "500,000", "9,000,000", "40.0", "62.5", "10", "24", "6", "3", "1", "99"]


def table(*lines: list[str], units: Mapping[str, str] = COLUMNS) -> list[str]:
    rows = [list(COLUMNS), [units[name] for name in COLUMNS], *lines]
    return ["==PROF== Connected to process 7", *(",".join(f'"{cell}"' for cell in row) for row in rows), "==PROF== Disconnected"]


def line(kernel: str, us: float, tensor: float = 0.0, memory: float = 0.0) -> Counted:
    return Counted(kernel, us, 1.7, 0.0, 0.0, {"tensor cores": tensor, "memory": memory, "L2": 0.9}, {"fences": 0.25})


# --- reading -----------------------------------------------------------------------------------------------------------------


def test_a_table_of_counters_is_read() -> None:
    (launch,) = read_counters("\n".join(table(LINE, ["1", "memset", *LINE[2:]])), {"row_warp"})
    assert (launch.kernel, launch.us, launch.ghz) == ("row_warp", 12.0, pytest.approx(1.7))
    assert (launch.memory_bytes, launch.l2_bytes) == (1.5e6, 9e6)
    assert launch.busy == {"memory": 0.4, "L2": 0.625, "tensor cores": 0.1, "issue slots": 0.24} and launch.busiest == "L2"
    assert launch.waits == {"values from memory": 0.6, "a barrier of the block": pytest.approx(0.3)}
    assert launch.main_waits() == ["values from memory", "a barrier of the block"]
    assert Counted.from_json(json.loads(json.dumps(launch.as_json()))) == launch


def test_units_are_read() -> None:
    units = {**COLUMNS, "gpu__time_duration.sum": "us", "dram__bytes_read.sum": "Mbyte"}
    (launch,) = read_counters("\n".join(table(["0", "k", "12", "20,400", "1.5", "0", *LINE[6:]], units=units)), {"k"})
    assert (launch.us, launch.memory_bytes) == (12.0, 1.5e6)


@pytest.mark.parametrize("said", ["", "==ERROR== no permission", "\n".join(table()[:2]),
                                  "\n".join(table(["0", "row_warp", "n/a", *LINE[3:]]))],
                         ids=["nothing", "an error", "no units", "no time"])
def test_what_is_no_table(said: str) -> None:
    with pytest.raises(ToolchainError, match="Nsight Compute has"):
        read_counters(said, {"row_warp"})


# --- parts -------------------------------------------------------------------------------------------------------------------


def test_parts_of_a_call_that_products_bound() -> None:
    """Of 300 us tensor cores are busy for 240, of which the floor counts 80; 50 us in another launch, 50 between them."""
    found = parts([line("gemm", 300.0, tensor=0.8), line("finish", 50.0)], Floor(30.0, 80.0, 0.7), 400.0)
    assert [round(part.us) for part in found] == [160, 60, 50, 50]
    assert found[0].what == "tensor cores at work beyond the floor's products"
    assert found[1].what == "`gemm` with idle tensor cores; its L2 busy 90%, its warps wait for fences (25%)"
    assert sum(part.us for part in found) + 80.0 == pytest.approx(400.0)


def test_parts_of_a_call_that_memory_bounds() -> None:
    found = parts([line("tile", 100.0, memory=0.7)], Floor(50.0, 10.0, 0.7), 99.0)
    assert [(round(part.us), part.what.split(";")[0]) for part in found] == [
        (30, "`tile` with idle memory"), (20, "memory at work beyond the tensors' bytes")]


def test_parts_of_a_call_as_short_as_a_launch() -> None:
    found = parts([line("first", 1.2), line("second", 0.9)], Floor(0.01, 0.01, 0.7), 2.5)
    assert [part.what.split(";")[0] for part in found] == ["`first`", "`second`", "between the launches, and what fills take"]


# --- the command -------------------------------------------------------------------------------------------------------------


class Addressed(RatedGpu):
    bus_id = BUS_ID


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[list[str]]]:
    """A bench.json with one kernel, and ncu as the test wants it; returns the arguments that ncu has had."""
    program, plan, argv = tmp_path / "ncu", tmp_path / "plan.json", tmp_path / "argv"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} {ROOT / 'tests' / 'fake_ncu.py'} \"$@\"\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv(fake_ncu.PLAN, str(plan))
    monkeypatch.setattr(profile, "open_gpu", Addressed)
    case = Case.of(NAMED, "float32", "fp32")
    setting = Setting("bench", "2026-01-01", "abc", "NVIDIA Test", {}, 0, 5, (), RATES)
    ours = Entry(Spread(15.0, 0.1, 5, 0.01), None, {"dx": 1e-7})
    row = Row(case, Floor.of(case.problem, RATES), ours, CONFIG, "tuned", "timed")
    (tmp_path / "bench.json").write_text(bench_json(Results((setting,), (row,))))

    def plant(**behaviour: Any) -> list[list[str]]:
        plan.write_text(json.dumps({"argv": str(argv), **behaviour}))
        return [json.loads(text) for text in argv.read_text().splitlines()] if argv.exists() else []

    return plant


def run(tmp_path: Path, *arguments: str) -> int:
    return profile.main(["--from", str(tmp_path / "bench.json"), "--out", str(tmp_path / "out"), *arguments])


def test_the_page_and_the_values(planted: Callable[..., list[list[str]]], tmp_path: Path,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    planted(says=table(LINE, ["1", "sum_partials", "2000", *LINE[3:]], ["2", "other", *LINE[2:]]))
    assert run(tmp_path) == 0
    (arguments,) = planted(says=[])
    assert arguments[arguments.index("--metrics") + 1].split(",") == list(METRICS)
    assert arguments[arguments.index("--profile-from-start") + 1] == "off"
    config, sizes, bus_id = arguments[arguments.index("-m") + 2:][:3]
    assert (config, sizes, bus_id) == (str(parse_config(CONFIG)), "4,8,64,64", BUS_ID)
    page = (tmp_path / "out" / "profile.md").read_text()
    assert "## mine float32, class fp32" in page and "| `row_warp` | 12 | 1.70 | 1.5 | 9 | 40% | 62% | – | 10% | 24% |" in page
    assert "python -m tuner.bench.profile --from" in page and "ours 15 us" in page and "`other`" not in page
    (row,) = json.loads((tmp_path / "out" / "profile.json").read_text())["rows"]
    assert [launch["kernel"] for launch in row["launches"]] == ["row_warp", "sum_partials"] and row["reason"] is None
    assert "mine float32, class fp32: 12 of 14.3 us: `row_warp`" in capsys.readouterr().out


@pytest.mark.parametrize(("behaviour", "said"), [
    ({"says": ["==ERROR== ERR_NVGPUCTRPERM"], "status": 1}, "ncu failed: ERR_NVGPUCTRPERM"),
    ({"says": table(["0", "other", *LINE[2:]])}, "ncu has counted none of its launches"),
    ({"says": [], "sleeps": 100}, "ncu did not end within 1 s")], ids=["refused", "nothing", "hangs"])
def test_what_cannot_be_counted_is_said(planted: Callable[..., list[list[str]]], behaviour: Mapping[str, Any], said: str,
                                        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "MOST_SECONDS", 1.0)
    planted(**behaviour)
    assert run(tmp_path) == 1
    assert f"Not profiled: {said}." in (tmp_path / "out" / "profile.md").read_text()


def test_what_it_has_started_ends_with_it(planted: Callable[..., list[list[str]]], tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """It watches a process that may hang on the GPU."""
    planted(says=[])
    (tmp_path / "ncu").write_text(f"#!/bin/sh\nsleep 100 &\necho $! > {tmp_path / 'child'}\nwait\n")
    monkeypatch.setattr(profile, "MOST_SECONDS", 2.0)
    assert run(tmp_path) == 1
    child = Path("/proc") / (tmp_path / "child").read_text().strip() / "stat"
    deadline = time.monotonic() + 20.0
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.05)


def test_a_config_that_there_is_no_more_is_a_reason_and_the_others_are_counted(
        planted: Callable[..., list[list[str]]], tmp_path: Path) -> None:
    planted(says=table(LINE))
    path = tmp_path / "bench.json"
    values = json.loads(path.read_text())
    values["rows"].insert(0, {**values["rows"][0], "name": "old", "config": "row_warp:wraps=2"})
    path.write_text(json.dumps(values))
    assert run(tmp_path) == 1
    page = (tmp_path / "out" / "profile.md").read_text()
    assert "Not profiled: " in page and "wraps" in page and "| `row_warp` | 12 |" in page


def test_each_kernel_is_written_as_soon_as_it_is_counted(
        planted: Callable[..., list[list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    path, counts = tmp_path / "bench.json", iter([[line("row_warp", 9.0)]])
    values = json.loads(path.read_text())
    values["rows"].append({**values["rows"][0], "name": "next"})
    path.write_text(json.dumps(values))

    def count(*_: object) -> list[Counted]:
        found = next(counts, None)
        if found is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(profile, "_count", count)
    assert run(tmp_path) == 130
    assert len(json.loads((tmp_path / "out" / "profile.json").read_text())["rows"]) == 1
    assert "what was counted is written" in capsys.readouterr().err


def test_a_folder_that_cannot_be_is_said_before_anything_is_counted(
        planted: Callable[..., list[list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(profile, "_count", lambda *_: pytest.fail("counted"))
    (tmp_path / "out").write_text("mine")
    assert run(tmp_path) == 2
    assert "choose another folder with --out" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "status", "said"), [
    (("--shapes", "none"), 2, "has no row called 'none'; it has mine"),
    (("--dtypes", "float16"), 2, "has no kernel of that kind"),
    (("--from", "nowhere.json"), 2, "there is no nowhere.json")], ids=["shape", "dtype", "file"])
def test_what_is_not_there_to_profile(planted: Callable[..., list[list[str]]], arguments: tuple[str, ...], status: int,
                                      said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planted(says=[])
    assert run(tmp_path, *arguments) == status
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_without_ncu_it_says_so(planted: Callable[..., list[list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    assert run(tmp_path) == 1
    assert capsys.readouterr().err == "profile: ncu is not on the PATH; it comes with the CUDA toolkit as Nsight Compute\n"


def test_one_call_of_several_is_counted(monkeypatch: pytest.MonkeyPatch, store: Store,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeCuda()
    log: list[str] = []
    opened = open_executor(monkeypatch, store, fake)
    problem = Problem(32, 64, 64)
    plan = render(problem, parse_config(CONFIG)).plan
    fake.plan, fake.kernels = plan, {launch.kernel: lambda given: log.append("launch") for launch in plan.launches}
    monkeypatch.setattr(fake.driver, "start_profiler", lambda: log.append("start"), raising=False)
    monkeypatch.setattr(fake.driver, "stop_profiler", lambda: log.append("stop"), raising=False)
    job = json.dumps(Job(problem, 1e-5, 0).as_json())
    place = json.dumps(Place("cuda", "sm_90", store.root, limits=opened.limits).as_json())
    assert profiled.main([CONFIG, "4,8,64,64", BUS_ID, job, place]) == 0
    launches = len(plan.launches)
    assert log == ["launch"] * launches * profiled.CALLS_BEFORE + ["start"] + ["launch"] * launches + ["stop"]
    assert profiled.main([CONFIG, "4,8,64,64", "0000:99:00.0", job, place]) == 1
    assert "no GPU with the PCI address" in capsys.readouterr().out


@pytest.mark.cuda
def test_one_call_is_counted_on_a_gpu(store: Store) -> None:
    """The process that ncu watches; whether anybody may count is a setting of the machine."""
    executor = CudaExecutor(store=store)
    job = json.dumps(Job(Problem(32, 64, 64), 1e-5, 0).as_json())
    place = json.dumps(Place("cuda", executor.limits.arch, store.root, limits=executor.limits).as_json())
    assert profiled.main([CONFIG, "4,8,64,64", executor.bus_id or "", job, place]) == 0
