"""compute-sanitizer in the safety gate: what its tools find costs a winner its place; what they cannot do is said."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from codegen.config import Config
from codegen.expr import ROWS, const
from codegen.limits import target
from codegen.plan import Buffer, Fill, Launch, Plan
from codegen.problem import ALL_GRADIENTS, Problem
from codegen.render import Source, render
from codegen.space import make_config, parse_config
from codegen.tensors import INPUTS
from tests import fake_sanitizer
from tests.fake_cuda import Arguments, FakeCuda, open_executor
from tests.fake_gpu import FakeProgram
from tests.gate_cases import BUS_ID, EVERY, PROBLEM, VALID, GpuWithAddress, by_place, outcomes, tuned
from tuner import evaluate, tuning
from tuner.companions import choose_companion
from tuner.executors.cuda import CudaExecutor
from tuner.executors.cuda_apart import ApartMemory
from tuner.gate import sanitized, sanitizer
from tuner.gate.checks import Check, Outcome
from tuner.gate.gate import seconds_of
from tuner.gate.sanitizer import TOOLS, Sanitizer, find_sanitizer
from tuner.inputs import random_inputs
from tuner.publish import Folder
from tuner.records import Status
from tuner.store import Store
from tuner.timing.health import Watch
from tuner.workers.messages import Job, Place

ROOT = Path(__file__).resolve().parent.parent

Plant = Callable[[Mapping[Config, Mapping[str, str]]], Path]


@pytest.fixture
def planted_sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Puts a fake on the PATH; the file where it writes down what it was asked."""
    monkeypatch.setattr(tuning, "open_watch", lambda bus_id: Watch())
    monkeypatch.setattr(evaluate, "open_watch", lambda bus_id: Watch())
    program, plans = tmp_path / sanitizer.NAME, tmp_path / "plans.json"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} {ROOT / 'tests' / 'fake_sanitizer.py'} \"$@\"\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv(fake_sanitizer.PLANS, str(plans))

    def plant(behaviours: Mapping[Config, Mapping[str, str]]) -> Path:
        plans.write_text(json.dumps({str(config): told for config, told in behaviours.items()}))
        return Path(f"{plans}.log")

    return plant


@pytest.mark.parametrize(("tool", "behaviour", "said"), [
    ("memcheck", "out of bounds", "Invalid __global__ read of size 4 bytes at row_warp(Params)+0x70 in kernel.cu:310"),
    ("initcheck", "out of bounds", "Invalid __global__ read"), ("racecheck", "race, status 0", "Error: Race reported between")])
def test_a_winner_in_which_a_tool_finds_something_loses_to_the_next_finalist(planted_sanitizer: Plant, tool: str,
                                                                             behaviour: str, said: str) -> None:
    log = planted_sanitizer({VALID[0]: {tool: behaviour}})
    result = tuned(GpuWithAddress(by_place))
    assert result.winner is not None and result.winner.config == VALID[1]
    assert result.winner.final_us is not None
    rejected = next(record for record in result.records if record.config == VALID[0])
    assert rejected.status is Status.UNSAFE and rejected.reason is not None
    assert rejected.reason.startswith(f"{tool} of compute-sanitizer: {said}")
    assert result.rejections()["unsafe"] == 1
    assert any(str(VALID[0]) in clause and said in clause for clause in result.said)
    assert outcomes(result) == {"other data": Outcome.PASSED, **dict.fromkeys(TOOLS, Outcome.PASSED)}
    asked = [line.split() for line in log.read_text().splitlines()]
    assert {(config, bus_id) for _, config, bus_id in asked} == {(str(VALID[0]), BUS_ID), (str(VALID[1]), BUS_ID)}
    assert {tool for tool, config, _ in asked if config == str(VALID[1])} == set(TOOLS)


def test_those_that_a_tool_rejects_go_in_the_order_of_the_finals(planted_sanitizer: Plant) -> None:
    log = planted_sanitizer({config: {"memcheck": "out of bounds"} for config in VALID[:3]})
    result = tuned(GpuWithAddress(by_place))
    assert result.winner is not None and result.winner.config == VALID[3]
    asked = dict.fromkeys(line.split()[1] for line in log.read_text().splitlines())
    assert list(asked) == [str(config) for config in VALID[:4]]


def test_where_all_are_rejected_there_is_no_winner(planted_sanitizer: Plant) -> None:
    few = VALID[:2]
    planted_sanitizer({config: {"memcheck": "out of bounds"} for config in few})
    result = tuned(GpuWithAddress(by_place, refused=frozenset(EVERY) - set(few)))
    assert result.winner is None and result.rejections()["unsafe"] == 2


@pytest.mark.parametrize(("behaviour", "said"), [
    ("fails", "it failed: Error: cannot attach to the device"), ("runs nothing", "it failed: ERROR SUMMARY: 0 errors")])
def test_a_tool_that_cannot_look_says_nothing_against_the_winner(planted_sanitizer: Plant, behaviour: str, said: str) -> None:
    planted_sanitizer({VALID[0]: {"racecheck": behaviour}})
    result = tuned(GpuWithAddress(by_place))
    assert result.winner is not None and result.winner.config == VALID[0]
    assert Check("racecheck", Outcome.NOT_RUN, said) in result.checks
    assert outcomes(result)["memcheck"] is Outcome.PASSED


def test_a_tool_that_hangs_is_ended_with_all_that_it_started(planted_sanitizer: Plant, tmp_path: Path) -> None:
    planted_sanitizer({VALID[0]: {"racecheck": "hangs"}})
    began = time.monotonic()
    checks = {check.name: check for check in checker(tmp_path).check(VALID[0], 6.0)}
    assert time.monotonic() - began < 15.0
    assert checks["racecheck"] == Check("racecheck", Outcome.NOT_RUN, "it did not end within 6 s")
    assert checks["memcheck"].outcome is Outcome.PASSED
    assert not [command for command in commands() if str(tmp_path) in command or "fake_sanitizer" in command]


def checker(store: Path) -> Sanitizer:
    return Sanitizer(PROBLEM, BUS_ID, target("sm_90"), store)


def commands() -> list[str]:
    """Of all processes below this one or left by it that are about this test's config."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(VALID[0]) in text and BUS_ID in text:
            found.append(text)
    return found


def test_a_tool_that_is_not_there_is_said_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tuning, "open_watch", lambda bus_id: Watch())
    monkeypatch.setattr(evaluate, "open_watch", lambda bus_id: Watch())
    monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: None)
    gpu = GpuWithAddress(by_place)
    result = tuned(gpu)
    assert result.winner is not None and result.winner.config == VALID[0]
    said = "compute-sanitizer: not run, it was not found on this machine"
    with Folder(tmp_path, result.info) as folder:
        folder.finish(result, interrupted=False, choose=partial(choose_companion, gpu, result))
    assert f"* {said}" in (tmp_path / "report.md").read_text()
    banner = (tmp_path / "best.cu").read_text()
    assert f"//           {said}" in banner
    others = "safety gate of the configs that best.cu holds for other row counts: not run"
    assert f"* {others}" in (tmp_path / "report.md").read_text()
    assert others in " ".join(line.removeprefix("//").strip() for line in banner.splitlines())
    assert [check["outcome"] for check in json.loads((tmp_path / "best.json").read_text())["gate"]] == ["passed", "not run"]


def test_without_time_no_tool_is_started_and_other_data_is_looked_at_all_the_same(planted_sanitizer: Plant,
                                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "LEAST_SECONDS", 1000.0)
    log = planted_sanitizer({})
    result = tuned(GpuWithAddress(by_place))
    assert result.winner is not None
    assert outcomes(result) == {"other data": Outcome.PASSED, "compute-sanitizer": Outcome.NOT_RUN}
    assert result.checks[-1].said == "time was up" and not log.exists()


def test_the_tools_have_what_is_left_of_the_time(planted_sanitizer: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    planted_sanitizer({})
    given: list[float] = []

    def check(self: Sanitizer, config: Config, seconds: float) -> list[Check]:
        given.append(seconds)
        return []

    monkeypatch.setattr(Sanitizer, "check", check)

    class Slow(GpuWithAddress):
        def compile(self, source: Source) -> FakeProgram:
            time.sleep(0.1)
            return super().compile(source)

    tuned(Slow(by_place), timeout=40.0, trials=3)
    assert 10.0 < given[0] < 40.0
    assert seconds_of(180.0) == 18.0 and seconds_of(60.0) == 15.0 and seconds_of(8.0) == 2.0


def test_the_program_is_found_where_toolkits_and_packages_put_it(tmp_path: Path) -> None:
    def program(*parts: str) -> str:
        path = tmp_path.joinpath(*parts, sanitizer.NAME)
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return str(path)

    def found(environ: dict[str, str]) -> str | None:
        return find_sanitizer(environ, tmp_path / "toolkits", [str(tmp_path / "packages")])

    assert found({"PATH": ""}) is None
    wheel = program("packages", "nvidia", "cu13", "bin")
    assert found({"PATH": "/nowhere"}) == wheel
    toolkit = program("toolkits", "cuda", "compute-sanitizer")
    assert found({}) == toolkit
    home = program("home", "bin")
    assert found({"CUDA_HOME": str(tmp_path / "home")}) == home
    path = program("path")
    assert found({"CUDA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")}) == path


# --- the memory that is watched ----------------------------------------------------------------------------------------------


def test_each_tensor_has_an_allocation_of_its_own_of_which_only_inputs_are_set(monkeypatch: pytest.MonkeyPatch,
                                                                               store: Store) -> None:
    fake = FakeCuda()
    open_executor(monkeypatch, store, fake)  # in place of the real modules
    executor = CudaExecutor(store=store, memory=ApartMemory)
    fake.plan = Plan((Fill(("db",)), Launch("kernel", const(1), 32)), (Buffer("partial", ROWS * 2),))
    sizes = {"dy": 5 * 7, "x": 5 * 3, "gamma": 3, "beta": 3, "w": 7 * 3, "dx": 5 * 3, "dgamma": 3, "dbeta": 3, "dw": 7 * 3,
             "db": 7, "partial": 10}
    inputs = random_inputs(5, 3, 7)
    filled: list[int] = []
    set_words = fake.driver.memset_d32_async

    def noting(address: int, *rest: object) -> None:
        filled.append(int(address))
        set_words(address, *rest)

    monkeypatch.setattr(fake.driver, "memset_d32_async", noting)

    def kernel(given: Arguments) -> None:
        held = {name: given.pointers[name] for name in sizes}
        assert sorted(held.values()) == sorted(fake.allocated)
        assert (1 << 30) - fake.free_bytes == 4 * sum(sizes.values())
        for name in INPUTS:
            assert given.array(name, *getattr(inputs, name).shape).tolist() == getattr(inputs, name).tolist()
        assert filled == [held["db"]] and not given.array("db", 7).any()

    fake.kernels = {"kernel": kernel}
    text = 'extern "C" __global__ void kernel(float*) {}\n'
    program = executor.compile(Source(Problem(5, 3, 7), make_config("row_thread"), text, fake.plan))
    program.execute(inputs, ALL_GRADIENTS)
    assert len(fake.launches) == 1 and not fake.allocated and fake.depth == 0


def test_what_runs_under_the_tools_runs_the_config_at_each_row_count(monkeypatch: pytest.MonkeyPatch, store: Store,
                                                                     capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeCuda()
    opened = open_executor(monkeypatch, store, fake)
    config = parse_config("row_warp:splits=1,reduction=single_block")
    source = render(PROBLEM, config)
    fake.plan, fake.kernels = source.plan, {launch.kernel: lambda given: None for launch in source.plan.launches}
    job = json.dumps(Job(PROBLEM, 1e-5, 0).as_json())
    place = json.dumps(Place("cuda", "sm_90", store.root, limits=opened.limits).as_json())
    assert sanitized.main([str(config), "1,33", opened.bus_id or "", job, place]) == 0
    assert [given.rows for _, given in fake.launches] == [1, 33]
    assert capsys.readouterr().out == sanitized.done([1, 33]) + "\n"
    assert sanitized.main([str(config), "1", "0000:99:00.0", job, place]) == 1
    assert "no GPU with the PCI address" in capsys.readouterr().out
