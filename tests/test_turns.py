"""Kernels timed in turns by a command: the winners of several runs (retime), and those that somebody names (race)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from codegen.config import Config
from codegen.limits import target
from codegen.problem import Problem, Shape
from tests import planted_worker
from tests.fake_gpu import rugged, stub_artifact
from tests.planted_worker import PLANTS, SEEN
from tuner import cli, race_cli, retime_cli
from tuner.arguments import FAILED, OK, USAGE
from tuner.candidates import survey
from tuner.errors import ToolchainError
from tuner.guess import rank
from tuner.publish import Folder
from tuner.tuning import Request, TuningRun
from tuner.workers import judge as workers_judge
from tuner.workers.messages import Place
from tuner.workers.pool import Workers

ROOT = Path(__file__).resolve().parent.parent
SHAPE, VARIANT = "4,4,8,16", "row_thread"
RANKED = list(rank(survey(Problem.of(Shape.parse(SHAPE)), target("sm_90"), (VARIANT,))))


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workers:
    """Workers on a GPU with made-up times."""
    monkeypatch.setenv(SEEN, str(tmp_path / "seen"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(workers_judge, "builder", lambda workers: lambda source: None)
    workers = Workers(Place("cuda", "sm_90", tmp_path), module=planted_worker.__name__)
    for command in (retime_cli, race_cli):
        monkeypatch.setattr(command, "open_isolated", lambda name: workers)
    return workers


def tuned(folder: Path, workers: Workers, config: Config, shape: str = SHAPE) -> Path:
    """A run's folder whose winner is that config."""
    run = TuningRun(Request(Shape.parse(shape), variants=(VARIANT,), trials=1), workers)
    with Folder(folder, run.info) as written:
        run.execute()
        written.finish(run.result(), False, lambda *_: None)
    values = json.loads((folder / "best.json").read_text())
    values["winner"]["config"] = str(config)
    (folder / "best.json").write_text(json.dumps(values))
    return folder


def test_winners_are_timed_in_turns_each_config_once_a_round(tmp_path: Path, gpu: Workers, capsys: pytest.CaptureFixture[str],
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.publish.write_artifact", stub_artifact)
    slow, fast = sorted(RANKED[:2], key=rugged, reverse=True)
    folders = [tuned(tmp_path / name, gpu, config) for name, config in (("a", slow), ("b", fast), ("c", slow))]
    capsys.readouterr()
    (tmp_path / "seen").unlink()
    assert cli.main(["retime", *map(str, folders), "--rounds", "3"]) == OK
    said = capsys.readouterr().out.splitlines()
    lines = [line for line in said if " us (" in line]
    assert len(lines) == 2 and str(fast) in lines[0] and "+0.0%" in lines[0]
    assert str(slow) in lines[1] and f"{folders[0]}, {folders[2]}" in lines[1]
    assert f"{rugged(slow) / rugged(fast) - 1:.1%} more" in said[-1]
    order = [line.partition(" ")[2] for line in (tmp_path / "seen").read_text().splitlines()]
    assert order == [str(config) for turn in ((slow, fast), (fast, slow), (slow, fast)) for config in turn for _ in range(2)]


def test_runs_of_different_problems_are_not_compared(tmp_path: Path, gpu: Workers, capsys: pytest.CaptureFixture[str],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.publish.write_artifact", stub_artifact)
    first = tuned(tmp_path / "a", gpu, RANKED[0])
    second = tuned(tmp_path / "b", gpu, RANKED[0], "4,8,8,16")
    assert cli.main(["retime", str(first), str(second)]) == USAGE
    assert "another shape" in capsys.readouterr().err
    assert cli.main(["retime", str(tmp_path / "nothing")]) == USAGE
    assert "no best.json" in capsys.readouterr().err


# --- race --------------------------------------------------------------------------------------------------------------------


def test_kernels_that_somebody_names_are_validated_and_timed(tmp_path: Path, gpu: Workers,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = sorted(RANKED[:2], key=rugged, reverse=True)
    file = tmp_path / "configs"
    file.write_text(f"# what is asked\n\n{fast}  # a guess\n{slow}\n")
    assert cli.main(["race", "--shape", SHAPE, str(slow), str(file), "--rounds", "3"]) == OK
    lines = [line for line in capsys.readouterr().out.splitlines() if " us (" in line]
    assert len(lines) == 2 and str(fast) in lines[0] and "+0.0%" in lines[0]
    assert str(slow) in lines[1] and f"{rugged(slow) / rugged(fast) - 1:+.1%}" in lines[1]
    assert all(float(line.rpartition("(error ")[2].removesuffix(")")) < 2e-6 for line in lines)


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch) -> Config:
    """A config whose kernel ends its process. A test must ask for it before `gpu`, whose processes inherit it."""
    monkeypatch.setenv(PLANTS, json.dumps({str(RANKED[0]): "segfaults"}))
    return RANKED[0]


def test_one_that_fails_costs_the_others_nothing(crashing: Config, gpu: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    unfit = "row_thread:reduction=single_block,splits=64"
    assert cli.main(["race", "--shape", SHAPE, str(crashing), unfit, str(RANKED[1]), "--rounds", "1"]) == FAILED
    said = capsys.readouterr().out.splitlines()
    assert [str(RANKED[1]) in line for line in said if " us (" in line] == [True]
    assert any(line.startswith(f"crash: {crashing} (") for line in said)
    assert any(line.startswith("not run: row_thread:") and "single_block" in line for line in said)
    assert cli.main(["race", "--shape", SHAPE, unfit]) == FAILED


@pytest.mark.parametrize(("arguments", "says"), [
    (("row_thread:threads=7",), "threads=7 is no choice"), (("nothing.txt",), "there is no variant 'nothing.txt'"),
    (("row_thread", "--rounds", "0"), "one round at least"), (("row_thread", "--wants", "dy"), "'dy'"),
    (("x" * 300,), "there is no variant"), ((".",), "cannot be read (Is a directory)")])
def test_a_race_that_makes_no_sense(arguments: tuple[str, ...], says: str, gpu: Workers,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["race", "--shape", SHAPE, *arguments]) == USAGE
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("content", "says"), [
    (b"# none yet\n", "names no config"), (b"\x89PNG\xff", "is no text"),
    (f"{RANKED[0]}\nrow_thread:threads=7".encode(), "line 2: threads=7 is no choice")])
def test_a_file_that_is_no_list_of_configs(content: bytes, says: str, tmp_path: Path, gpu: Workers,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_bytes(content)
    assert cli.main(["race", "--shape", SHAPE, str(tmp_path / "file")]) == USAGE
    assert f"{tmp_path / 'file'}" in (said := capsys.readouterr().err) and says in said


def test_without_a_gpu_there_is_no_race(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> Workers:
        raise ToolchainError("there is no GPU")

    monkeypatch.setattr(race_cli, "open_isolated", none)
    assert cli.main(["race", "--shape", SHAPE, "row_thread"]) == FAILED
    assert capsys.readouterr().err == "race: there is no GPU\n"


def test_one_kernel_is_compared_with_none(gpu: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["race", "--shape", SHAPE, str(RANKED[0]), "--rounds", "1"]) == OK
    said = capsys.readouterr().out
    assert "1 round:" in said and ", cold " in said and "the slowest" not in said
