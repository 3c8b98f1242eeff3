"""The recorder on a GPU that is made up: it records all, can be cut off anywhere and goes on, and its file says what it holds."""

from __future__ import annotations

import json
import lzma
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from codegen.config import Config
from codegen.problem import Problem
from codegen.render import Source, render
from codegen.space import make_config
from tests.fake_gpu import FakeBuilds, FakeGpu, failing_launch, lost_at, rugged
from tests.recorded import made_up
from tuner.arguments import FAILED, INTERRUPTED, OK, USAGE
from tuner.errors import ToolchainError
from tuner.executors import Resources
from tuner.records import Status
from tuner.replay import record_cli, recorder
from tuner.replay.recorded import Result, load
from tuner.store import Store

ARGUMENTS = ("--shape", "4,4,8,16", "--variants", "row_thread,row_warp")


def record(path: Path, monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, *more: str) -> int:
    monkeypatch.setattr(record_cli, "open_executor", lambda name, store: gpu)
    monkeypatch.setattr(record_cli, "Builders", lambda problem, arch, store, count: FakeBuilds(gpu, problem))
    return record_cli.main([*ARGUMENTS, "--out", str(path), *more])


def test_the_whole_space_is_recorded_and_its_fastest_timed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "space.json.xz"
    assert record(path, monkeypatch, FakeGpu()) == OK
    found = load(path)
    assert len(found.results) == found.size > 100
    assert all(result.status is Status.OK for result in found.results.values())
    assert found.times == pytest.approx({config: rugged(config) for config in found.results}, rel=1e-5)
    again = [config for config, result in found.results.items() if result.again_us is not None]
    assert min(found.times, key=found.times.__getitem__) in again and len(again) < found.size
    assert found.origin.problem().rows == 16
    command = " ".join(("python -m tuner record", *ARGUMENTS, "--out", str(path)))
    assert [one.command for one in found.slices] == [command]


def test_a_session_goes_on_where_the_last_one_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "space.json.xz"
    now = iter([0.0] * 30)
    with monkeypatch.context() as patch:
        patch.setattr(record_cli.time, "monotonic", lambda: next(now, 1e9))  # the clock is looked at before each config
        assert record(path, patch, FakeGpu(), "--timeout", "60") == FAILED
    assert "so far" in capsys.readouterr().out
    first = load(path)
    assert 0 < len(first.results) < first.size
    second = FakeGpu()
    assert record(path, monkeypatch, second) == OK
    whole = load(path)
    assert len(whole.results) == whole.size and len(whole.slices) == 2
    assert not set(first.results) & set(second.compiled) - {
        config for config, result in whole.results.items() if result.again_us is not None}


def test_a_session_that_is_short_of_time_times_its_fastest_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second a timing: most of 100 seconds go to configs, the rest to the fastest of them, and a later session does so anew."""
    path = tmp_path / "space.json.xz"
    clock = [0.0]

    def times(config: Config) -> float:
        clock[0] += 1.0
        return rugged(config)

    def session(timeout: int) -> dict[Config, Result]:
        with monkeypatch.context() as patch:
            patch.setattr(record_cli.time, "monotonic", lambda: clock[0])
            assert record(path, patch, FakeGpu(times), "--timeout", str(timeout)) == FAILED
        return load(path).results

    first = session(100)
    assert 20 < len(first) < load(path).size
    again = [config for config in first if first[config].again_us is not None]
    assert min(first, key=rugged) in again and len(again) < len(first)
    second = session(60)
    best = min(second, key=rugged)
    near = [config for config in second if rugged(config) <= recorder.AGAIN_WITHIN * rugged(best)]
    assert len(second) > len(first) and all(second[config].again_us is not None for config in near)


def test_a_space_that_has_grown_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "space.json.xz"
    assert record(path, monkeypatch, FakeGpu(), "--variants", "row_thread") == OK
    first = load(path)
    larger = FakeGpu()
    assert record(path, monkeypatch, larger) == OK
    whole = load(path)
    assert len(whole.results) == whole.size > first.size == len(first.results)
    assert whole.origin.variants == ("row_thread", "row_warp") and set(first.results) <= set(whole.results)
    assert not set(first.results) & set(larger.compiled) - {
        config for config, result in whole.results.items() if result.again_us is not None}
    assert record(path, monkeypatch, FakeGpu(), "--variants", "row_thread") == USAGE
    assert "variants differs" in capsys.readouterr().err


def test_templates_that_have_changed_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "space.json.xz"
    assert record(path, monkeypatch, FakeGpu()) == OK
    changed = sorted(load(path).origin.sources)[0]

    def rendered(problem: Problem, config: Config) -> Source:
        source = render(problem, config)
        return replace(source, text=source.text + "// new\n") if str(config) == changed else source

    monkeypatch.setattr(record_cli, "render", rendered)
    assert record(path, monkeypatch, FakeGpu()) == USAGE
    assert "sources differs" in capsys.readouterr().err


def test_a_session_that_is_told_to_end_writes_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "space.json.xz"
    timed: list[Config] = []

    def times(config: Config) -> float:
        timed.append(config)
        if len(set(timed)) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return rugged(config)

    assert record(path, monkeypatch, FakeGpu(times)) == INTERRUPTED
    assert len(load(path).results) == 4
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_variants_that_are_to_come_first_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    gpu = FakeGpu()
    path = tmp_path / "space.json.xz"
    assert record(path, monkeypatch, gpu, "--first", "row_thread") == OK
    order = list(load(path).results)
    count = sum(config.variant == "row_thread" for config in order)
    assert 0 < count < len(order) and {config.variant for config in order[:count]} == {"row_thread"}
    assert record(path, monkeypatch, gpu, "--first", "gemm_mma") == USAGE
    assert "choose from row_thread, row_warp" in capsys.readouterr().err


def test_what_cannot_win_is_recorded_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Spilling(FakeGpu):
        def compile(self, source):  # type: ignore[no-untyped-def]
            program = super().compile(source)
            if source.config == spilling:
                program.resources = {"row_warp": Resources(255, 0, spill_bytes=8)}
            return program

    spilling, refused, failing = (make_config("row_warp", {"warps": warps, "splits": 1, "reduction": "single_block"})
                                  for warps in (1, 2, 4))
    path = tmp_path / "space.json.xz"
    gpu = Spilling(refused=frozenset({refused}), kernels={failing: failing_launch})
    assert record(path, monkeypatch, gpu) == OK
    results = load(path).results
    assert {results[config].status for config in (spilling, refused, failing)} == {
        Status.SPILLS, Status.COMPILE_ERROR, Status.WRONG}
    assert all(results[config].reason and results[config].time_us is None for config in (spilling, refused, failing))
    assert spilling not in gpu.timed
    assert results[spilling].resources == {"row_warp": Resources(255, 0, spill_bytes=8)}


def test_a_config_that_takes_the_gpu_with_it_is_recorded_and_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                       capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "space.json.xz"
    seen: list[Config] = []

    def doomed(gpu: FakeGpu, config: Config) -> bool:
        seen.append(config)
        return len(set(seen)) == 9

    assert record(path, monkeypatch, lost_at(doomed)) == FAILED
    assert "run the same command again" in capsys.readouterr().err
    killer = seen[-1]
    assert load(path).results[killer].status is Status.LAUNCH_ERROR
    healthy = FakeGpu()
    assert record(path, monkeypatch, healthy) == OK
    assert killer not in healthy.timed
    assert Counter(result.status for result in load(path).results.values())[Status.LAUNCH_ERROR] == 1


def test_a_config_that_hangs_is_recorded_before_the_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(BaseException):
        pass

    ended: list[int] = []
    hanging = make_config("row_warp", {"warps": 1, "splits": 1, "reduction": "single_block"})
    path = tmp_path / "space.json.xz"

    def times(config: Config) -> float:
        if config == hanging:
            for _ in range(500):
                recorder.time.sleep(0.01)
                if ended:
                    raise Ended
        return rugged(config)

    monkeypatch.setattr(recorder, "HANG_S", 0.3)
    monkeypatch.setattr(recorder.os, "_exit", ended.append)
    with pytest.raises(Ended):
        record(path, monkeypatch, FakeGpu(times))
    assert ended == [FAILED]
    assert "did not end" in (load(path).results[hanging].reason or "")


@pytest.mark.parametrize("change", [("--seed", "1"), ("--deterministic",), ("--eps", "1e-3")])
def test_another_space_does_not_go_into_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str], change: tuple[str, ...]) -> None:
    path = tmp_path / "space.json.xz"
    assert record(path, monkeypatch, FakeGpu()) == OK
    before = path.read_bytes()
    assert record(path, monkeypatch, FakeGpu(), *change) == USAGE
    assert "name another file" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.parametrize("data", [b"", b"noise", lzma.compress(b"{}"), lzma.compress(json.dumps({"schema": 99}).encode())])
def test_a_file_that_is_no_recorded_space_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str], data: bytes) -> None:
    path = tmp_path / "space.json.xz"
    path.write_bytes(data)
    assert record(path, monkeypatch, FakeGpu()) == USAGE
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert path.read_bytes() == data


def test_without_a_gpu_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    def absent(name: str, store: Store) -> FakeGpu:
        raise ToolchainError(f"there is no {name}")

    monkeypatch.setattr(record_cli, "open_executor", absent)
    assert record_cli.main([*ARGUMENTS, "--out", str(tmp_path / "space")]) == FAILED
    assert capsys.readouterr().err == "record: there is no cuda\n"
    assert not list(tmp_path.iterdir())


def test_the_more_careful_time_counts_and_the_others_are_of_the_same_state() -> None:
    """The GPU was a tenth slower when the fastest were timed again: what was not among them is none the faster for that."""
    space = made_up(lambda config: None, ("row_thread",))
    slow, lucky, best, other = list(space.results)[:4]
    space.results |= {
        best: Result(Status.OK, time_us=2.0, again_us=2.2), lucky: Result(Status.OK, time_us=1.9, again_us=2.3),
        other: Result(Status.OK, time_us=2.1, again_us=2.31), slow: Result(Status.OK, time_us=2.15)}
    assert space.times == pytest.approx({best: 2.2, lucky: 2.3, other: 2.31, slow: 2.15 * 1.1})
    space.results = {slow: space.results[slow]}
    assert space.times == {slow: 2.15}
