"""One bench.json by several invocations: what stays, what is measured, and what may not stand in one file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fake_bench import FakeArena, FakePeer, RatedGpu
from tests.test_bench import SMALL, bench, found
from tuner.bench import cli as bench_cli
from tuner.bench import join
from tuner.bench.report import bench_json
from tuner.bench.sheet import read_results
from tuner.errors import DeviceLost
from tuner.inputs import Inputs

__all__ = ["bench"]

Run = Callable[..., int]


@pytest.fixture(autouse=True)
def revision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LNL_REVISION", "abc")


class Faster(RatedGpu):
    """The same card at another launch rate, as measured later."""

    def measure_launch_us(self) -> float:
        return 0.6


def cut_off(run: Run, tmp_path: Path, *arguments: str) -> None:
    """Leaves the first of the rows."""
    def make(name: str, inputs: Inputs) -> FakePeer:
        if inputs.out == 4:
            raise KeyboardInterrupt
        return FakePeer(name, inputs, 7.0)

    assert run(*arguments, arena=FakeArena(make), gpu=RatedGpu(times=lambda config: 10.0)) == 130
    assert [row["name"] for row in found(tmp_path)[0]["rows"]] == ["seed"]


def test_a_cut_off_run_is_continued(bench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut_off(bench, tmp_path)
    first = found(tmp_path)[0]["rows"][0]
    arena = FakeArena()
    assert bench("--resume", arena=arena, gpu=Faster(times=lambda config: 20.0)) == 0
    assert [case.name for case, _ in arena.seen] == ["other"]
    values, page = found(tmp_path)
    assert values["rows"][0] == first and first["part"] == 0
    second = values["rows"][1]
    assert (second["name"], second["part"], second["ours"]["warm"]["median"]) == ("other", 1, 20.0)
    commands = [part["command"] for part in values["parts"]]
    assert len(commands) == 2 and "--resume" not in commands[0] and "--resume" in commands[1]
    assert page.count("    python -m tuner bench") == 2 and "one launch (0.50 to 0.60 us)" in page
    assert "finished.**" not in page and "| seed |" in page and "| other |" in page
    assert second["floor"]["launch_us"] == 0.6  # its own invocation's
    assert "of 2 rows 1 are there already" in capsys.readouterr().err


def test_nothing_is_left_to_measure(bench: Run, tmp_path: Path) -> None:
    assert bench("--resume", arena=FakeArena()) == 0  # there is nothing yet to continue
    before = found(tmp_path)
    arena = FakeArena()
    assert bench("--resume", arena=arena) == 0
    assert found(tmp_path) == before and not arena.seen


def test_other_shapes_and_types_are_added_to_their_tables(bench: Run, tmp_path: Path) -> None:
    assert bench("--dtypes", "float32,bfloat16", arena=FakeArena()) in (0, 1)
    assert bench("--resume", "--dtypes", "float32,bfloat16", "--shapes", "2,3,8,4", arena=FakeArena()) in (0, 1)
    values, page = found(tmp_path)
    assert [(row["name"], row["dtype"]) for row in values["rows"]] == [
        (name, dtype) for dtype in ("float32", "bfloat16") for name in ("seed", "other", "2x3x8x4")]
    assert page.count("## float32") == 1 and page.count("## bfloat16") == 1


def test_rows_that_an_earlier_invocation_did_not_come_to_are_still_missing(bench: Run, tmp_path: Path) -> None:
    cut_off(bench, tmp_path, "--shapes", "2,3,8,5")
    assert "**1 of 3 rows are finished.** Missing: other float32, class fp32; 2x3x8x5 float32, class fp32." in found(tmp_path)[1]
    assert bench("--resume", arena=FakeArena()) == 0
    values, page = found(tmp_path)
    assert [row["name"] for row in values["rows"]] == ["seed", "other"]
    assert "**2 of 3 rows are finished.** Missing: 2x3x8x5 float32, class fp32." in page
    assert bench("--resume", "--shapes", "2,3,8,5", arena=FakeArena()) == 0
    assert "are finished" not in found(tmp_path)[1]


def test_a_file_that_does_not_say_what_was_asked_for_is_continued(bench: Run, tmp_path: Path) -> None:
    cut_off(bench, tmp_path)
    values = found(tmp_path)[0]
    del values["parts"][0]["asked"]
    (tmp_path / "out/bench.json").write_text(json.dumps(values))
    assert bench("--resume", arena=FakeArena()) == 0
    asked = [part["asked"] for part in found(tmp_path)[0]["parts"]]
    assert asked == [[], ["seed float32, class fp32", "other float32, class fp32"]]


def test_a_row_without_a_time_of_ours_is_measured_again(bench: Run, tmp_path: Path) -> None:
    def lose(inputs: Inputs, wants: frozenset[str], **_: float) -> Any:
        raise DeviceLost("the kernel failed")

    class Dying(RatedGpu):
        def compile(self, source: Any) -> Any:
            program = super().compile(source)
            program.run = lose  # type: ignore[method-assign]
            return program

    assert bench(gpu=Dying(), arena=FakeArena()) == 1
    assert ["the kernel failed" in row["reason"] for row in found(tmp_path)[0]["rows"]] == [True]
    assert bench("--resume", arena=FakeArena()) == 0
    assert [(row["name"], row["reason"]) for row in found(tmp_path)[0]["rows"]] == [("seed", None), ("other", None)]


def test_without_resume_rows_are_replaced_but_not_before_there_is_one(bench: Run, tmp_path: Path) -> None:
    assert bench(arena=FakeArena()) == 0
    before = found(tmp_path)

    def interrupt(name: str, inputs: Inputs) -> FakePeer:
        raise KeyboardInterrupt

    assert bench(arena=FakeArena(interrupt)) == 130
    assert found(tmp_path) == before
    cut_off(bench, tmp_path)
    assert len(found(tmp_path)[0]["parts"]) == 1


@pytest.mark.parametrize(("change", "sentence"), [
    ({"version": "abd"}, "the revision of the sources there: abd, here: abc"),
    ({"device": "NVIDIA Other"}, "the GPU there: NVIDIA Other, here: NVIDIA Test"),
    ({"seed": 3}, "--seed there: 3, here: 0"),
    ({"peers": ["eager"]}, "--peers there: eager, here: eager,compile,gemms"),
    ({"versions": {"driver": "1"}}, "the versions of the software there: driver 1, here: "),
])
def test_what_cannot_be_compared_is_not_mixed(bench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                              change: dict[str, Any], sentence: str) -> None:
    cut_off(bench, tmp_path)
    path = tmp_path / "out" / "bench.json"
    values = json.loads(path.read_text())
    values["parts"][0] |= change
    path.write_text(json.dumps(values))
    refused(bench, tmp_path, capsys, f"bench.json cannot be continued: {sentence}")


def test_changed_sources_have_no_revision_to_compare(bench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LNL_REVISION", "abc+")
    cut_off(bench, tmp_path)
    refused(bench, tmp_path, capsys, "the sources were changed after revision abc")


def test_one_name_is_one_shape(bench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut_off(bench, tmp_path)
    (tmp_path / "shapes").write_text("seed 4,4,8,32\n")
    refused(bench, tmp_path, capsys, "has another shape called 'seed', 4,4,8,16; give the shape 4,4,8,32 another name")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": 1}', '{"schema": 2, "parts": [], "rows": [{}]}', "\x00\xff",
                                  "[" * 100_000])
def test_what_is_no_result_is_not_continued(bench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "bench.json").write_text(text)
    refused(bench, tmp_path, capsys, "is no result of this program")


def refused(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], sentence: str) -> None:
    """Continuing ends with the sentence, and leaves the file as it is."""
    path = tmp_path / "out" / "bench.json"
    before = path.read_bytes()
    capsys.readouterr()
    assert run("--resume", arena=FakeArena()) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench: ") and sentence in error and error.count("\n") == 1
    assert path.read_bytes() == before


def test_a_file_is_read_back_as_it_was_written(bench: Run, tmp_path: Path) -> None:
    assert bench(arena=FakeArena(failed={"compile": "compile: no C compiler"})) == 0
    path = tmp_path / "out" / "bench.json"
    results = read_results(path)
    assert results is not None and bench_json(results) == path.read_text()


def test_what_cannot_be_finished_leaves_the_files_before(bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, done = Path.replace, []

    def full(self: Path, target: Path) -> Path:
        done.append(target)
        if len(done) > 2:  # both files have the first row
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", full)
    assert bench(arena=FakeArena()) == 1
    values, page = found(tmp_path)
    assert [row["name"] for row in values["rows"]] == ["seed"] and "**1 of 2 rows are finished.**" in page


@pytest.mark.parametrize("inside", ["", "/deeper"])
def test_a_folder_that_cannot_be_is_a_sentence(bench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], inside: str,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cli.Rates, "measure", lambda *_: pytest.fail("measured before the folder was looked at"))
    (tmp_path / "file").write_text("mine")
    assert bench("--out", f"{tmp_path}/file{inside}", arena=FakeArena()) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench: cannot write to ") and "choose another folder with --out" in error and error.count("\n") == 1


def test_shapes_may_be_written_out(bench: Run, tmp_path: Path) -> None:
    assert bench("--shapes", "2,3,8,4;3,2,8,4", arena=FakeArena()) == 0
    rows: Sequence[dict[str, Any]] = found(tmp_path)[0]["rows"]
    assert [row["name"] for row in rows] == [line.split()[0] for line in SMALL.splitlines()] + ["2x3x8x4", "3x2x8x4"]


def test_files_of_several_processes_become_one(bench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(arena=FakeArena(), gpu=RatedGpu(times=lambda config: 10.0)) == 0
    first = (tmp_path / "out/bench.json").rename(tmp_path / "first.json")
    assert bench("--dtypes", "bfloat16", arena=FakeArena(), gpu=RatedGpu(times=lambda config: 20.0)) == 0
    second = (tmp_path / "out/bench.json").rename(tmp_path / "second.json")
    assert join.main([str(first), str(second), "--out", str(tmp_path / "out")]) == 0
    values, page = found(tmp_path)
    assert [(row["name"], row["dtype"], row["part"], row["ours"]["warm"]["median"]) for row in values["rows"]] == [
        ("seed", "float32", 0, 10.0), ("other", "float32", 0, 10.0),
        ("seed", "bfloat16", 1, 20.0), ("other", "bfloat16", 1, 20.0)]
    assert values["parts"] == [json.loads(path.read_text())["parts"][0] for path in (first, second)]
    assert page.count("    python -m tuner bench") == 2 and "## bfloat16, class bf16" in page
    assert "4 rows" in capsys.readouterr().out


def test_of_two_rows_of_one_case_the_later_files_stays(bench: Run, tmp_path: Path) -> None:
    assert bench(arena=FakeArena(), gpu=RatedGpu(times=lambda config: 10.0)) == 0
    first = (tmp_path / "out/bench.json").rename(tmp_path / "first.json")
    cut_off(bench, tmp_path)
    assert join.main([str(tmp_path / "out/bench.json"), str(first), "--out", str(tmp_path / "out")]) == 0
    assert [row["part"] for row in found(tmp_path)[0]["rows"]] == [1, 1]


def test_files_that_may_not_be_mixed_are_not_joined(bench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut_off(bench, tmp_path)
    path = tmp_path / "out" / "bench.json"
    values = json.loads(path.read_text())
    values["parts"][0]["device"] = "NVIDIA Other"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(values))
    values = json.loads(path.read_text())
    values["rows"][0]["shape"] = "9,9,9,9"
    misnamed = tmp_path / "misnamed.json"
    misnamed.write_text(json.dumps(values))
    for files, sentence in (([path, other], "the GPU there: NVIDIA Test, here: NVIDIA Other"),
                            ([path, misnamed], "has another shape called 'seed', 9,9,9,9"),
                            ([path, tmp_path / "none.json"], "there is no "),
                            ([path, tmp_path / "shapes"], "is no result of this")):
        assert join.main([*map(str, files), "--out", str(tmp_path / "joined")]) == 2
        assert sentence in capsys.readouterr().err and not (tmp_path / "joined").exists()


@pytest.mark.parametrize("damage", [
    lambda row: row.update(part="0"), lambda row: row.update(part=7), lambda row: row["ours"]["warm"].update(median="12"),
    lambda row: row["ours"]["warm"].update(median=0), lambda row: row["floor"].update(bytes_us="little"),
    lambda row: row["ours"]["errors"].update(dx="small"),
], ids=["no number of a part", "no such part", "no time", "no time at all", "no floor", "no error"])
def test_values_that_are_none_are_a_sentence(bench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                             damage: Callable[[dict[str, Any]], None]) -> None:
    assert bench(arena=FakeArena()) == 0
    path = tmp_path / "out" / "bench.json"
    values = json.loads(path.read_text())
    damage(values["rows"][0])
    path.write_text(json.dumps(values))
    capsys.readouterr()
    assert join.main([str(path), "--out", str(tmp_path / "joined")]) == 2
    assert "bench.json is no result of this program (" in capsys.readouterr().err and not (tmp_path / "joined").exists()


def test_what_the_system_says_of_a_file_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert join.main([str(tmp_path), "--out", str(tmp_path / "joined")]) == 2
    assert capsys.readouterr().err == f"join: {tmp_path} is no result of this program (Is a directory)\n"
