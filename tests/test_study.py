"""Several processes that search one study together: no config twice, nothing lost, and what happens where one of them dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from optuna.trial import FrozenTrial, TrialState

from codegen.config import Config
from codegen.space import parse_config
from tests.fake_gpu import FakeGpu, rugged, stub_artifact
from tests.postgres import PASSWORD, Postgres
from tests.sharing_process import KILLED, KILLS
from tests.trials import read_trials
from tuner import cli, publish
from tuner.calls import configs
from tuner.records import Record, Status
from tuner.search import config_of
from tuner.study.storage import open_storage

ROOT = Path(__file__).resolve().parent.parent
SMALL = configs("4,4,8,16", variants=["row_thread"])
TRIALS = 24
SHAPE = ["--shape", "4,4,8,16", "--variants"]
COMMAND = [*SHAPE, "row_warp,row_thread"]
KINDS = ["journal", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty storage."""
    if request.param == "postgres":
        server: Postgres = request.getfixturevalue("postgres")
        return server.url()
    return {"journal": f"journal:{tmp_path / 'study.log'}", "sqlite": f"sqlite:///{tmp_path / 'study.db'}"}[request.param]


def together(folder: Path, url: str, command: Sequence[str] = (*COMMAND, "--trials", str(TRIALS)), kills: str = "",
             killed: str = "") -> list[tuple[int, str]]:
    """Three processes: exit status and standard error of each. The second has claimed its part before the others come."""
    (folder / "seen").mkdir()
    processes: dict[int, subprocess.Popen[str]] = {}
    try:
        for who in (1, 0, 2):
            processes[who] = subprocess.Popen(
                [sys.executable, "-m", "tests.sharing_process", str(who), "3", str(folder / "seen"), *command,
                 "--out", str(folder / f"out{who}"), "--storage", url],
                cwd=ROOT, env={**os.environ, KILLS: kills, KILLED: killed}, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE)
            while not (folder / "seen" / "1").exists() and processes[1].poll() is None:
                time.sleep(0.05)
        ended = {who: process.communicate(timeout=120) for who, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
    return [(processes[who].returncode, ended[who][1]) for who in range(3)]


def trials_of(url: str) -> list[FrozenTrial]:
    storage = open_storage(url)
    (name,) = storage.names()
    return list(storage.study(name).trials())


def counted(trials: list[FrozenTrial]) -> Counter[Config | None]:
    """How many trials each config has that were not given up."""
    return Counter(config_of(trial.params) for trial in trials if trial.state is not TrialState.FAIL)


def records_of(folder: Path, who: int) -> dict[Config, Record]:
    return {record.config: record for record in read_trials(folder / f"out{who}" / "trials.jsonl")[1]}


def test_processes_share_one_study_and_one_that_dies_costs_nothing(tmp_path: Path, url: str) -> None:
    """The second is killed in its third candidate: two are kept; the third, and what it had claimed, are tried by the others. No
    config is tried twice but that one, and those who are left have all records and the same winner.
    """
    ended = together(tmp_path, url, kills="3", killed="1")
    assert [status for status, _ in ended] == [0, -signal.SIGKILL, 0]
    *finished, last = (tmp_path / "seen" / "1").read_text().split("\n")[:-1]
    assert len(finished) == 2
    trials = trials_of(url)
    counts = counted(trials)
    assert counts.total() == TRIALS == len(counts)
    assert all(trial.state is not TrialState.RUNNING for trial in trials)
    begun = Counter(config_of(trial.params) for trial in trials if trial.user_attrs.get("begun"))
    assert begun == counts + Counter([parse_config(last)])
    assert [str(config_of(trial.params)) for trial in trials if trial.user_attrs.get("lost")] == [last]
    assert len({trial.user_attrs["member"] for trial in trials if trial.user_attrs.get("begun")}) == 3
    for who in (0, 2):
        records = records_of(tmp_path, who)
        assert set(records) == set(counts) and {parse_config(text) for text in (*finished, last)} <= set(records)
        assert all(record.status is Status.OK and record.time_us == rugged(config) for config, record in records.items())
        best = json.loads((tmp_path / f"out{who}" / "best.json").read_text())["winner"]
        assert parse_config(best["config"]) == min(counts, key=lambda config: rugged(config or SMALL[0]))
        assert best["times"]["warm"]["median"] == best["time"]["final_us"]


def test_a_config_that_ends_two_processes_is_blamed_and_tried_no_more(tmp_path: Path) -> None:
    """The first that comes to it dies, then another, and the last one finishes all others."""
    culprit = SMALL[0]
    ended = together(tmp_path, f"journal:{tmp_path / 'study.log'}", [*SHAPE, "row_thread"], kills=str(culprit), killed="0,1,2")
    assert sorted(status for status, _ in ended) == [-signal.SIGKILL, -signal.SIGKILL, 0]
    (survivor,) = (who for who, (status, _) in enumerate(ended) if status == 0)
    records = records_of(tmp_path, survivor)
    assert records[culprit].status is Status.CRASH and "2 processes" in (records[culprit].reason or "")
    assert {config for config, record in records.items() if record.status is Status.OK} == set(SMALL) - {culprit}


def tuned(folder: Path, url: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = cli.main([*COMMAND, "--out", str(folder), "--storage", url, *arguments])
    return status, capsys.readouterr().err


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    found = FakeGpu()
    monkeypatch.setattr(publish, "write_artifact", stub_artifact)
    monkeypatch.setattr(cli, "open_isolated", lambda name, target: found)
    return found


def test_a_later_process_has_all_that_was_finished_before(tmp_path: Path, url: str, gpu: FakeGpu,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    assert tuned(tmp_path / "first", url, capsys, "--trials", "12")[0] == 0
    gpu.timed.clear()
    assert tuned(tmp_path / "second", url, capsys, "--trials", "12")[0] == 0
    first, second = (read_trials(tmp_path / name / "trials.jsonl")[1] for name in ("first", "second"))
    assert {record.config for record in first} == {record.config for record in second} and len(second) == 12
    assert Counter(gpu.timed).most_common()[-1][1] > 2  # in the finals only
    assert tuned(tmp_path / "third", url, capsys, "--trials", "20")[0] == 0
    assert len(read_trials(tmp_path / "third" / "trials.jsonl")[1]) == 20


def test_what_an_interrupted_process_has_not_finished_is_released(tmp_path: Path, url: str, gpu: FakeGpu,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    def times(config: Config) -> float:
        if len(set(gpu.timed)) > 5:
            raise KeyboardInterrupt
        return rugged(config)

    gpu.times = times
    assert tuned(tmp_path, url, capsys, "--trials", "12")[0] == 130
    assert {trial.state for trial in trials_of(url)} == {TrialState.COMPLETE, TrialState.FAIL}
    gpu.times = rugged
    assert tuned(tmp_path, url, capsys, "--trials", "12")[0] == 0
    counts = counted(trials_of(url))
    assert counts.total() == len(counts) == 12


def test_studies_of_other_sources_are_said(tmp_path: Path, url: str, gpu: FakeGpu, capsys: pytest.CaptureFixture[str]) -> None:
    assert "other stud" not in tuned(tmp_path, url, capsys, "--trials", "3")[1]
    assert "other stud" not in tuned(tmp_path, url, capsys, "--trials", "3", "--deterministic")[1]
    said = tuned(tmp_path, url, capsys, "--trials", "3", "--variants", "row_warp")[1]
    assert "the storage has 1 other study of this problem" in said
    assert len(open_storage(url).names()) == 3


@pytest.mark.parametrize(("url", "said"), [
    ("redis://somewhere", "postgresql://"), ("sqlite:/x", "sqlite:///FILE"), ("journal:", "journal:FILE"), ("mysql", "mysql://"),
    ("postgresql://", "postgresql://"), ("/a/file", "journal:FILE"), ("sqlite:///:memory:", "no other process"),
    ("postgresql://u:pw@h:abc/x", "port"), ("postgresql://u:pw@h:99999/x", "99999"), ("postgresql+foo://u:pw@h/x", "driver"),
])
def test_a_url_that_names_no_storage_is_one_sentence(url: str, said: str, tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    status, errors = tuned(tmp_path, url, capsys)
    assert status == 2 and errors.count("\n") == 1 and said in errors and "pw" not in errors


@pytest.mark.parametrize("url", [
    "sqlite:////nowhere/at/all.db", "journal:/nowhere/at/all.log", "sqlite:///{here}/junk", "journal:{here}/junk",
    "mysql://tuner:topsecret@127.0.0.1:1/study"])
def test_a_storage_that_cannot_be_opened_is_one_sentence(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "junk").write_bytes(b"this is neither\nof both\n" * 100)
    status, errors = tuned(tmp_path / "out", url.format(here=tmp_path), capsys)
    assert (status == 1 and errors.count("\n") == 1 and errors.startswith("tuner: the storage ")) or "is not a journal" in errors
    assert "topsecret" not in errors and not (tmp_path / "out").exists()


def test_a_missing_driver_names_what_to_install(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme, driver in (("mysql", "pymysql"), ("postgresql", "psycopg")):
        monkeypatch.setitem(sys.modules, driver, None)
        status, errors = tuned(tmp_path, f"{scheme}://me:topsecret@localhost/study", capsys)
        assert status == 1 and errors.count("\n") == 1 and "lnl-tuner[storage]" in errors and "topsecret" not in errors


def test_resuming_and_sharing_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, errors = tuned(tmp_path, "journal:x", capsys, "--resume")
    assert status == 2 and errors.count("\n") == 1 and "--storage" in errors


def test_a_storage_lost_in_the_middle_ends_the_search_and_not_the_run(tmp_path: Path, gpu: FakeGpu,
                                                                      capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "study").mkdir()

    def times(config: Config) -> float:
        if len(set(gpu.timed)) == 6:
            shutil.rmtree(tmp_path / "study", ignore_errors=True)
        return rugged(config)

    gpu.times = times
    status, errors = tuned(tmp_path / "out", f"journal:{tmp_path / 'study' / 'log'}", capsys, "--trials", "12")
    assert status == 0 and "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("tuner: the storage journal:") and "went on alone" in errors
    records = read_trials(tmp_path / "out" / "trials.jsonl")[1]
    assert 6 <= len(records) <= 12 and any(record.final_us for record in records)


@pytest.mark.postgres
def test_a_wrong_password_is_refused_and_never_shown(tmp_path: Path, postgres: Postgres,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    status, errors = tuned(tmp_path, postgres.url("top secret"), capsys)
    assert status == 1 and errors.count("\n") == 1 and "password authentication failed" in errors
    assert "secret" not in errors and "***" in errors


@pytest.mark.postgres
def test_no_file_and_no_line_shows_the_password(tmp_path: Path, postgres: Postgres, gpu: FakeGpu,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    url = postgres.url()
    assert cli.main([*COMMAND, "--out", str(tmp_path), "--storage", url, "--trials", "3"]) == 0
    said = capsys.readouterr()
    escaped = url.partition(":")[2].partition(":")[2].partition("@")[0]
    for text in (said.out, said.err, *(path.read_text() for path in tmp_path.iterdir())):
        assert PASSWORD not in text and escaped not in text
    assert "***" in (tmp_path / "trials.jsonl").read_text()


@pytest.mark.postgres
def test_a_server_lost_in_the_middle_leaves_what_is_finished(tmp_path: Path, gpu: FakeGpu,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    with Postgres() as server:
        def times(config: Config) -> float:
            if len(set(gpu.timed)) == 6 and not stopped:
                stopped.append(True)
                server.stop()
            return rugged(config)

        stopped: list[bool] = []
        gpu.times = times
        status, errors = tuned(tmp_path, server.url(), capsys, "--trials", "12")
        server.start()
    assert status == 0 and "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("tuner: the storage postgresql://tuner:***@/study1")
    assert "went on alone" in errors
    assert 6 <= len(read_trials(tmp_path / "trials.jsonl")[1]) <= 12 and (tmp_path / "best.cu").exists()
