"""Several GPUs of one machine that tune together, one candidate on each: times are made up, processes and their ends are real."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from codegen.problem import Shape
from tests.fake_gpu import FakeGpu, rugged
from tests.planted_worker import DEAD, GPUS, SEEN
from tests.planted_worker import __name__ as PLANTED
from tuner import cli
from tuner.arguments import parse_gpus
from tuner.calls import configs
from tuner.errors import InputError, ToolchainError
from tuner.outcome import TuneResult
from tuner.records import Status
from tuner.request import Request
from tuner.store import Store
from tuner.tuning import TuningRun
from tuner.workers import judge as workers_judge
from tuner.workers.lanes import Lanes
from tuner.workers.messages import Place
from tuner.workers.patience import Patience
from tuner.workers.pool import Workers

SHAPE = Shape(4, 4, 8, 16)
SPACE = configs("4,4,8,16", variants=["row_thread"])

Open = Callable[..., Workers]


@pytest.fixture
def opened(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens workers on a machine with GPUs of these models, and ends them."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent))
    monkeypatch.setenv(SEEN, str(tmp_path / "seen"))
    monkeypatch.setattr(workers_judge, "builder", lambda workers: lambda source: None)
    made: list[Workers] = []

    def open_workers(models: str = "NVIDIA A,NVIDIA A", gpus: tuple[int, ...] = (), dead: str = "") -> Workers:
        monkeypatch.setenv(GPUS, models)
        monkeypatch.setenv(DEAD, dead)
        made.append(Workers(Place("cuda", "sm_90", store.root), Patience(least=5.0), PLANTED, gpus=gpus))
        return made[-1]

    yield open_workers
    for workers in made:
        workers.close()


def tuned(workers: Workers) -> TuneResult:
    run = TuningRun(Request(SHAPE, variants=("row_thread",)), workers)
    run.execute()
    return run.result()


def timed(tmp_path: Path) -> list[tuple[int, str]]:
    """Which GPU timed what, in order."""
    lines = [line.split(" ", 1) for line in (tmp_path / "seen").read_text().splitlines()]
    return [(int(gpu), config) for gpu, config in lines]


def test_candidates_are_tried_on_all_gpus_and_the_finals_on_one(opened: Open, tmp_path: Path) -> None:
    result = tuned(opened())
    assert {record.config for record in result.valid()} == set(SPACE)
    assert result.winner is not None and result.winner.config == min(SPACE, key=rugged)
    calls = timed(tmp_path)
    search, finals = calls[:2 * len(SPACE)], calls[2 * len(SPACE):]
    assert Counter(config for _, config in search) == dict.fromkeys(map(str, SPACE), 2)
    assert Counter(gpu for gpu, _ in search)[0] >= 8 <= Counter(gpu for gpu, _ in search)[1]
    assert finals and {gpu for gpu, _ in finals} == {0}
    assert "candidates were tried on GPUs 0, 1; the finals and the safety gate ran on GPU 0" in result.said[-1]


def test_several_candidates_are_timed_at_a_time(opened: Open) -> None:
    """Two lanes of which each sleeps 40 ms a candidate are in use together."""
    workers = opened()
    judge = workers.judge(Request(SHAPE).problem())
    busy: list[int] = []
    asked = workers.lanes[0].ask

    def watched(*arguments: object) -> object:
        busy.append(sum(lane.worker is not None for lane in workers.lanes))
        return asked(*arguments)  # type: ignore[arg-type]

    workers.lanes[0].ask = watched  # type: ignore[method-assign, assignment]
    threads = [threading.Thread(target=lambda config=config: judge.judge(judge.compile(config))) for config in SPACE[:6]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(busy, default=0) == 2 == len(workers.lanes)


@pytest.mark.parametrize(("models", "gpus", "used"), [
    ("A,A,A", (), [0, 1, 2]), ("A,A,A", (2, 0), [0, 2]), ("A,B,A", (0, 2), [0, 2]), ("A,B", (1,), [1]), ("A", (), [0])])
def test_the_gpus_that_are_named_are_used(opened: Open, models: str, gpus: tuple[int, ...], used: list[int]) -> None:
    assert [lane.gpu for lane in opened(models, gpus).lanes] == used


def test_gpus_of_two_models_are_refused(opened: Open) -> None:
    with pytest.raises(InputError, match="GPU 0 is NVIDIA A, GPU 1 NVIDIA B; name those of one model with --gpus"):
        opened("NVIDIA A,NVIDIA B")


def test_a_gpu_that_is_not_there_is_a_sentence(opened: Open) -> None:
    with pytest.raises(ToolchainError, match="no GPU 5; this machine has 2"):
        opened("A,A", (0, 5))


@pytest.mark.parametrize("dead", [0, 1])
def test_a_gpu_that_is_lost_costs_its_candidate_and_the_other_goes_on(opened: Open, tmp_path: Path, dead: int) -> None:
    """It dies with the first candidate that it times, and no process can open it any more."""
    workers = opened("A,A", (), str(dead))
    result = tuned(workers)
    statuses = Counter(record.status for record in result.records)
    assert statuses == {Status.OK: len(SPACE) - 1, Status.CRASH: 1} and result.lost is None
    (victim,) = (record for record in result.records if record.status is Status.CRASH)
    assert [config for gpu, config in timed(tmp_path) if gpu == dead] == [str(victim.config)]
    assert result.winner is not None and result.winner.config == min(set(SPACE) - {victim.config}, key=rugged)
    said = " ".join(result.said)
    assert f"GPU {dead} was lost" in said and f"the safety gate ran on GPU {1 - dead}" in said
    assert [lane.gpu for lane in workers.lanes] == [1 - dead]


def test_the_last_gpu_that_is_lost_ends_the_run(opened: Open) -> None:
    result = tuned(opened("A", (), "0"))
    assert result.lost is not None and "processes in a row" in result.lost and result.winner is None


# --- lanes -------------------------------------------------------------------------------------------------------------------


def test_a_lane_is_used_by_one_at_a_time_and_waited_for() -> None:
    lanes = Lanes(["a", "b"])
    assert (lanes.take(), lanes.take()) == ("a", "b")
    taken: list[str] = []
    waiting = threading.Thread(target=lambda: taken.append(lanes.take()))
    waiting.start()
    time.sleep(0.05)
    assert not taken
    lanes.give("b")
    waiting.join(10)
    assert taken == ["b"]


def test_a_lost_lane_is_not_used_again_but_the_last_one_is_kept() -> None:
    lanes = Lanes(["a", "b", "c"])
    assert lanes.lose(lanes.take()) and lanes.living == ("b", "c")
    assert lanes.lose(lanes.take()) and lanes.living == ("c",)
    assert not lanes.lose(lanes.take()) and lanes.take() == "c"


def test_all_but_the_first_can_be_given_up() -> None:
    lanes = Lanes(["a", "b"])
    assert lanes.lose(lanes.take())
    assert lanes.keep_first() == "b" == lanes.take()


# --- the command line --------------------------------------------------------------------------------------------------------


def test_numbers_of_gpus() -> None:
    assert (parse_gpus("all"), parse_gpus("0, 3"), parse_gpus("2")) == ((), (0, 3), (2,))


@pytest.mark.parametrize("text", ["", "0,", "-1", "1,1", "first", "0-3"])
def test_other_numbers_are_one_sentence_and_exit_2(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--shape", "4,4,8,16", f"--gpus={text}"])
    errors = capsys.readouterr().err
    assert stop.value.code == 2 and errors.count("\n") == 1 and "'0,1'" in errors


def test_gpus_are_handed_on_and_without_any_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[int, ...]] = []

    class Predicting(FakeGpu):
        measures = False

    def opened(name: str, target: str, gpus: tuple[int, ...]) -> FakeGpu:
        asked.append(gpus)
        return Predicting() if gpus else FakeGpu()

    monkeypatch.setattr(cli, "open_isolated", opened)
    command = ["--shape", "4,4,8,16", "--variants", "row_thread", "--trials", "2", "--out", str(tmp_path), "--gpus"]
    assert cli.main([*command, "all"]) == 0 and "--gpus" not in capsys.readouterr().err
    assert cli.main([*command, "1,2"]) == 0 and "--gpus is ignored" in capsys.readouterr().err
    assert asked == [(), (1, 2)]
