"""Runs that go on with what an earlier one has left in their folder, however that ended."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from codegen.config import Config
from codegen.space import make_config, parse_config
from tests.fake_gpu import FakeGpu, failing_launch, rugged, stub_artifact
from tests.test_records import INFO
from tests.trials import read_trials
from tuner import cli, publish
from tuner.calls import configs
from tuner.errors import InputError
from tuner.records import Record, RunInfo, Status
from tuner.study.earlier import read_earlier

ROOT = Path(__file__).resolve().parent.parent
SPACE = configs("4,4,8,16", variants=["row_warp", "row_thread"])
COMMAND = "--shape 4,4,8,16 --variants row_warp,row_thread --trials 30"

KILLED = f"""
import os, signal, sys
from tests.fake_gpu import FakeGpu, rugged
from tuner import cli

def times(config):
    if len(dict.fromkeys(gpu.timed)) == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return rugged(config)

gpu = FakeGpu(times)
cli.open_isolated = lambda name, target: gpu
cli.main("{COMMAND} --out {{out}}".split())
"""
"""A run that is killed while its seventh candidate is timed."""

Tuned = Callable[..., tuple[int, str]]


@pytest.fixture
def tuned(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tuned:
    """Tunes into the test's folder: exit status and standard error."""
    monkeypatch.setattr(publish, "write_artifact", stub_artifact)

    def run(arguments: str = "", gpu: FakeGpu | None = None, command: str = COMMAND) -> tuple[int, str]:
        monkeypatch.setattr(cli, "open_isolated", lambda name, target: gpu or FakeGpu())
        status = cli.main([*command.split(), "--out", str(tmp_path), *arguments.split()])
        return status, capsys.readouterr().err

    return run


def interrupted(after: int) -> FakeGpu:
    """A GPU at which the user presses Ctrl-C while the candidate after so many is timed."""
    def times(config: Config) -> float:
        if len(dict.fromkeys(gpu.timed)) > after:
            raise KeyboardInterrupt
        return rugged(config)

    gpu = FakeGpu(times)
    return gpu


def header(folder: Path, **changes: Any) -> None:
    """Changes the first line of trials.jsonl."""
    first, rest = (folder / "trials.jsonl").read_text().split("\n", 1)
    (folder / "trials.jsonl").write_text(json.dumps({**json.loads(first), **changes}) + "\n" + rest)


def trials(folder: Path) -> tuple[RunInfo, list[Record]]:
    return read_trials(folder / "trials.jsonl")


# --- ends of the first run ---------------------------------------------------------------------------------------------------


def test_a5_a_run_killed_in_a_trial_loses_no_finished_one(tmp_path: Path, tuned: Tuned) -> None:
    """The one in flight is tried again and was not counted; the records that were finished are the same afterwards."""
    done = subprocess.run([sys.executable, "-c", KILLED.format(out=tmp_path)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    _, before = trials(tmp_path)
    assert len(before) == 6
    gpu = FakeGpu()
    status, said = tuned("--resume", gpu)
    assert status == 0 and "6 of its 6 finished trials are kept" in said
    _, after = trials(tmp_path)
    assert len(after) == 30 == len({record.config for record in after})
    assert [record.config for record in after[:6]] == [record.config for record in before]
    assert [(record.time_us, record.errors, record.rows) for record in after[:6]] == [
        (record.time_us, record.errors, record.rows) for record in before]
    assert len(set(gpu.timed) - {record.config for record in before}) == 24
    assert "6 of the candidates were tried by the run that began at" in (tmp_path / "report.md").read_text().replace("\n", " ")


@pytest.mark.parametrize("cut", [1, 2, 40, -1])
def test_a_last_line_that_was_cut_off_costs_one_trial(cut: int, tmp_path: Path, tuned: Tuned) -> None:
    assert tuned("", interrupted(8))[0] == 130
    text = (tmp_path / "trials.jsonl").read_text()
    last = text.rstrip("\n").rpartition("\n")[2]
    (tmp_path / "trials.jsonl").write_text(text[:-cut] if cut > 0 else text[:1 - len(last)])
    status, said = tuned("--resume")
    _, records = trials(tmp_path)
    assert status == 0 and len({record.config for record in records}) == len(records) == 30
    assert ("8 of its 8" if cut == 1 else "7 of its 7") in said and ("1 could not be read" in said) == (cut != 1)


def test_a_run_that_time_ended_can_be_resumed_and_its_time_is_its_own(tmp_path: Path, tuned: Tuned) -> None:
    assert tuned("", interrupted(5))[0] == 130
    header(tmp_path, timeout_s=1e-3, finished=True, trials=7, date="2001-01-01T00:00:00+00:00")
    status, said = tuned("--resume --timeout 60")
    assert status == 0 and "resumed the run of 2001" in said
    info, records = trials(tmp_path)
    assert len(records) == 30 and info.timeout_s == 60.0


def test_a_space_where_all_fail_ends_without_artifact_however_often_it_is_resumed(tmp_path: Path, tuned: Tuned) -> None:
    def broken(after: int) -> FakeGpu:
        gpu = FakeGpu(kernels=dict.fromkeys(SPACE, failing_launch))
        compile_one = gpu.compile

        def compiled(source: Any) -> Any:
            if len(gpu.compiled) >= after:
                raise KeyboardInterrupt
            return compile_one(source)

        gpu.compile = compiled  # type: ignore[method-assign]
        return gpu

    assert tuned("", broken(20))[0] == 130
    status, said = tuned("--resume", broken(1000))
    assert status == 1 and said.splitlines()[-1].startswith("tuner: no valid kernel: 30 of 30") and "Traceback" not in said
    assert {path.name for path in tmp_path.iterdir()} == {"trials.jsonl", "report.md"}


# --- what is tried again -----------------------------------------------------------------------------------------------------


def test_a_finished_run_that_is_resumed_only_times_its_fastest_again(tmp_path: Path, tuned: Tuned) -> None:
    assert tuned()[0] == 0
    first = json.loads((tmp_path / "best.json").read_text())["winner"]["config"]
    _, before = trials(tmp_path)
    gpu = FakeGpu(lambda config: 0.9 * rugged(config))
    assert tuned("--resume", gpu)[0] == 0
    _, after = trials(tmp_path)
    assert [(record.config, record.time_us) for record in after] == [(record.config, record.time_us) for record in before]
    finalists = [record for record in after if record.final_us is not None]
    end = json.loads((tmp_path / "trials.jsonl").read_text().splitlines()[0])["end"]
    changed = {parse_config(one["config"]) for one in end["ablation"]}
    again = {record.config for record in finalists}
    assert again <= set(gpu.timed) <= again | changed and 1 < len(finalists) < 30
    assert all(record.final_us == pytest.approx(0.9 * rugged(record.config)) for record in finalists)
    assert json.loads((tmp_path / "best.json").read_text())["winner"]["config"] == first


def test_more_trials_may_be_asked_for_than_before(tmp_path: Path, tuned: Tuned) -> None:
    """Those that come on top are all faster, so the finals are theirs alone: no other record has a time of any finals."""
    assert tuned()[0] == 0
    earlier = {record.config for record in trials(tmp_path)[1]}
    assert tuned("--resume --trials 40", FakeGpu(lambda config: 0.3 * rugged(config)))[0] == 0
    _, records = trials(tmp_path)
    assert len(records) == 40 == len({record.config for record in records})
    finalists = {record.config for record in records if record.final_us is not None}
    assert finalists and not finalists & earlier


def test_a_space_that_is_tried_whole_is_resumed_too(tmp_path: Path, tuned: Tuned) -> None:
    command = "--shape 4,4,8,16 --variants row_thread"
    assert tuned("", interrupted(5), command)[0] == 130
    before = [record.config for record in trials(tmp_path)[1]]
    gpu = FakeGpu(lambda config: 2.0 if config in before else 3.0)  # which keeps the others out of the finals
    assert tuned("--resume", gpu, command)[0] == 0
    _, records = trials(tmp_path)
    assert len(before) == 5 and {record.config for record in records} == set(configs("4,4,8,16", variants=["row_thread"]))
    assert [record.config for record in records][:5] == before
    assert not any(record.time_us == 2.0 for record in records)


def test_a_resumed_run_that_is_killed_again_has_lost_nothing(tmp_path: Path, tuned: Tuned) -> None:
    assert tuned("", interrupted(5))[0] == 130
    found: list[int] = []

    def times(config: Config) -> float:
        found.append(len(trials(tmp_path)[1]))  # as a run would find them that came after a kill at this moment
        return rugged(config)

    assert tuned("--resume", FakeGpu(times))[0] == 0
    assert found[0] == 5 and found[1] == 5 and found[2] == 6


def test_kernels_that_have_changed_are_tried_again_and_the_others_kept(tmp_path: Path, tuned: Tuned) -> None:
    assert tuned("", interrupted(10))[0] == 130
    path = tmp_path / "trials.jsonl"
    first, *lines = path.read_text().splitlines()
    others = [{**json.loads(line), "source": "another"} for line in lines[:3]]
    path.write_text("\n".join([first, *map(json.dumps, others), *lines[3:]]) + "\n")
    header(tmp_path, sources="of another revision")
    gpu = FakeGpu()
    status, said = tuned("--resume", gpu)
    assert status == 0
    assert "7 of its 10 finished trials are kept; 3 will be tried again, since their kernels have changed" in said
    _, records = trials(tmp_path)
    assert len(records) == 30 and {other["config"] for other in others} <= {str(config) for config in gpu.compiled}


def test_a_changed_space_is_said(tmp_path: Path, tuned: Tuned) -> None:
    assert tuned("", interrupted(10), "--shape 4,4,8,16 --variants row_warp --trials 30")[0] == 130
    status, said = tuned("--resume")
    assert status == 0 and "10 of its 10" in said and "the space has changed, from" in said


def test_what_is_not_asked_for_stays_in_the_file_and_counts_again_when_it_is(tmp_path: Path, tuned: Tuned) -> None:
    assert tuned("", interrupted(10))[0] == 130
    _, before = trials(tmp_path)
    in_warp = [record for record in before if record.config.variant == "row_warp"]
    gpu = FakeGpu()
    status, said = tuned("--resume", gpu, "--shape 4,4,8,16 --variants row_warp --trials 20")
    assert status == 0 and 0 < len(in_warp) < 10
    assert f"{len(in_warp)} of its 10 finished trials are kept; {10 - len(in_warp)} stay in the file but do not count" in said
    assert "space has changed" not in said and {config.variant for config in gpu.timed} == {"row_warp"}
    _, after = trials(tmp_path)
    assert len(after) == 20 + 10 - len(in_warp) and after[20:] == [record for record in before if record not in in_warp]
    status, said = tuned("--resume")
    assert status == 0 and f"{len(after)} of its {len(after)} finished trials are kept" in said


def test_what_is_not_asked_for_and_has_changed_is_dropped_and_said(tmp_path: Path, tuned: Tuned) -> None:
    assert tuned("", interrupted(10))[0] == 130
    path = tmp_path / "trials.jsonl"
    path.write_text(re.sub('"source":"[^"]*"', '"source":"another"', path.read_text()))
    header(tmp_path, sources="of another revision")
    status, said = tuned("--resume", None, "--shape 4,4,8,16 --variants row_warp --trials 20")
    assert status == 0 and "0 of its 10" in said and "are dropped, since their kernels have changed" in said
    assert {record.config.variant for record in trials(tmp_path)[1]} == {"row_warp"}


def test_records_say_of_which_source_they_are(tmp_path: Path, tuned: Tuned) -> None:
    assert tuned()[0] == 0
    info, records = trials(tmp_path)
    assert info.sources and all(len(record.source) == 16 for record in records)
    assert len({record.source for record in records}) == len(records)


# --- what is refused, and what is kept beside --------------------------------------------------------------------------------


@pytest.mark.parametrize(("field", "value", "said"), [
    ("shape", "4,4,8,17", "shape (4,4,8,17 then, 4,4,8,16 now)"), ("dtype", "float16", "data type"),
    ("param_dtype", "float16", "parameters"), ("wants", "dx,dw", "gradients"), ("accuracy", "tf32", "accuracy"),
    ("deterministic", True, "deterministic"), ("eps", 1e-6, "eps"), ("regime", "cold", "regime"), ("seed", 1, "seed"),
    ("executor", "host", "executor"), ("device", "NVIDIA Other", "NVIDIA Other then, NVIDIA Test now"),
    ("target", "sm_80", "sm_80"),
])
def test_another_problem_or_device_is_refused_and_nothing_is_touched(field: str, value: object, said: str, tmp_path: Path,
                                                                     tuned: Tuned) -> None:
    assert tuned("", interrupted(4))[0] == 130
    header(tmp_path, **{field: value})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    status, errors = tuned("--resume")
    assert status == 2 and errors.count("\n") == 1 and said in errors and "--out" in errors
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


ODD: list[dict[str, Any]] = [
    {"time": {"us": "abc"}}, {"time": {"us": float("nan")}}, {"time": {"us": -1.0}}, {"time": None}, {"time": "x"},
    {"errors": {}}, {"errors": {"dx": {"normwise": "x", "bound_ratio": 1}}}, {"rows": ["x"]}, {"rows": 3}, {"reason": 3},
    {"resources": {"row_warp": {"registers": "x", "shared_bytes": 0}}}, {"source": 3}, {"config": 3}, {"status": "good"}]


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_a_line_with_odd_values_is_tried_again(odd: dict[str, Any], tmp_path: Path, tuned: Tuned) -> None:
    assert tuned("", interrupted(6))[0] == 130
    path = tmp_path / "trials.jsonl"
    first, *lines = path.read_text().splitlines()
    lines[2] = json.dumps({**json.loads(lines[2]), **odd})
    path.write_text("\n".join([first, *lines]) + "\n")
    earlier = read_earlier(path)
    assert earlier is not None and (len(earlier.records), earlier.damaged) == (5, 1)


@pytest.mark.parametrize("damaged", ["{", '{"schema": 99}'])
def test_without_resume_a_file_that_cannot_be_read_is_kept_beside(damaged: str, tmp_path: Path, tuned: Tuned) -> None:
    assert tuned("", interrupted(4))[0] == 130
    path = tmp_path / "trials.jsonl"
    text = damaged + "\n" + path.read_text().partition("\n")[2]
    path.write_text(text)
    status, said = tuned()
    assert status == 0 and "trials-unread.jsonl" in said and (tmp_path / "trials-unread.jsonl").read_text() == text


def test_a_run_killed_before_its_first_trial_or_with_nothing_on_disk(tmp_path: Path, tuned: Tuned) -> None:
    assert tuned("", interrupted(0))[0] == 130
    status, said = tuned("--resume", interrupted(0))
    assert status == 130 and "it has finished no trial" in said
    (tmp_path / "trials.jsonl").write_text("")
    status, said = tuned("--resume", interrupted(0))
    assert status == 130 and "no run to resume" in said


@pytest.mark.parametrize("first", ["", "{", "[]", '{"schema": 99}', '{"schema": 1, "shape": "4,4,8,16"}', "\0" * 40,
                                   json.dumps({**INFO.as_json(), "date": 5})])
def test_a_file_that_is_no_journal_is_refused_and_not_touched(first: str, tmp_path: Path, tuned: Tuned) -> None:
    (tmp_path / "trials.jsonl").write_text(first + "\n")
    status, errors = tuned("--resume")
    assert status == 2 and errors.count("\n") == 1 and "trials.jsonl" in errors
    assert (tmp_path / "trials.jsonl").read_text() == first + "\n"


def test_without_resume_an_unfinished_run_is_kept_beside(tmp_path: Path, tuned: Tuned) -> None:
    beside: list[bytes] = []
    for name in ("trials-2026-01-02T03-04-05.jsonl", "trials-2026-01-02T03-04-05-2.jsonl"):
        assert tuned("", interrupted(4))[0] == 130
        header(tmp_path, date="2026-01-02T03:04:05+00:00")
        beside.append((tmp_path / "trials.jsonl").read_bytes())
        status, said = tuned()
        assert status == 0 and name in said and "--resume" in said and "4 trials" in said
        assert (tmp_path / name).read_bytes() == beside[-1]
    assert len(list(tmp_path.glob("trials-*"))) == 2
    status, said = tuned()
    assert status == 0 and said.count("trials-") == 0 and len(list(tmp_path.glob("trials-*"))) == 2


def test_nothing_to_resume_is_said_and_a_new_run_begins(tmp_path: Path, tuned: Tuned) -> None:
    status, said = tuned("--resume")
    assert status == 0 and "no run to resume" in said and len(trials(tmp_path)[1]) == 30


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path: Path, tuned: Tuned) -> None:
    second: list[tuple[int, str]] = []

    def times(config: Config) -> float:
        if not second:
            second.append((0, ""))
            second[0] = tuned("--resume", FakeGpu())
        return rugged(config)

    assert tuned("", FakeGpu(times))[0] == 0
    assert second[0][0] == 2 and "another run is writing" in second[0][1]
    assert tuned()[0] == 0


def test_lines_that_say_nothing_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    assert read_earlier(path) is None
    path.write_text("\n")
    with pytest.raises(InputError):
        read_earlier(path)


def test_a_run_without_times_is_resumed_too(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU: what was validated is not validated again; its times are what the cost model says now."""
    monkeypatch.setattr(publish, "write_artifact", stub_artifact)
    arguments = ["--shape", "4,4,8,16", "--executor", "host", "--variants", "row_thread", "--trials", "3", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    _, before = trials(tmp_path)
    path = tmp_path / "trials.jsonl"
    done = [record for record in before if record.status is Status.OK]
    lines = path.read_text().splitlines()
    path.write_text("\n".join((lines[0], *(line.replace('"us":', '"us":1') for line in lines[1:3]))) + "\n")
    header(tmp_path, finished=False)
    assert cli.main([*arguments, "--resume"]) == 0
    assert "2 of its 2 finished trials are kept" in capsys.readouterr().err
    _, after = trials(tmp_path)
    assert {record.config: (record.status, record.time_us) for record in after} == {
        record.config: (record.status, record.time_us) for record in before}
    assert len(done) >= 3 and make_config("row_thread").variant == "row_thread"
