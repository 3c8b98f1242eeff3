"""Storages that are damaged, cut off, foreign, or lost while a run uses them."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from codegen.config import Config
from tests.fake_gpu import FakeGpu, rugged, stub_artifact
from tests.trials import read_trials
from tuner import cli, publish
from tuner.study.journal import WholeFile

COMMAND = ["--shape", "4,4,8,16", "--variants", "row_warp,row_thread", "--trials", "12"]
Tuned = Callable[..., tuple[int, str]]


@pytest.fixture
def tuned(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tuned:
    """Tunes into the folder `out` with a storage: exit status and standard error."""
    monkeypatch.setattr(publish, "write_artifact", stub_artifact)

    def run(url: str, *arguments: str, gpu: FakeGpu | None = None) -> tuple[int, str]:
        monkeypatch.setattr(cli, "open_isolated", lambda name, target: gpu or FakeGpu())
        status = cli.main([*COMMAND, "--out", str(tmp_path / "out"), "--storage", url, *arguments])
        return status, capsys.readouterr().err

    return run


@pytest.mark.parametrize("cut", [1, 20, -7])
def test_a_journal_that_was_cut_off_can_be_used_again(cut: int, tmp_path: Path, tuned: Tuned) -> None:
    path = tmp_path / "log"
    assert tuned(f"journal:{path}", "--trials", "4")[0] == 0
    whole = path.read_bytes()
    last = whole[:-1].rindex(b"\n") + 1
    path.write_bytes(whole[:-cut] if cut > 0 else whole[:last - cut])
    status, said = tuned(f"journal:{path}")
    assert status == 0 and "was cut off" in said and "Traceback" not in said
    assert path.read_bytes().startswith(whole[:last] + b'{"op_code":')
    assert len(read_trials(tmp_path / "out" / "trials.jsonl")[1]) == 12
    assert "cut off" not in tuned(f"journal:{path}")[1]


def test_half_a_line_of_a_process_that_was_killed_meanwhile_is_not_glued_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = WholeFile(str(path))
    file.append_logs([{"op_code": 1}])
    with path.open("a") as other:
        other.write('{"op_code":2,"wor')
    file.append_logs([{"op_code": 3}])
    assert list(file.read_logs(0)) == [{"op_code": 1}, {"op_code": 3}]


@pytest.mark.parametrize("text", [
    "hello", "hello\n", "[1,2]\n", "3\n", '"op_code"\n', '{"a":1}\n', '{"op_code":0}\nnoise\n', "\0" * 9])
def test_a_file_that_is_no_journal_is_one_sentence_and_not_touched(text: str, tmp_path: Path, tuned: Tuned) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    status, said = tuned(f"journal:{path}")
    assert status == 1 and said.count("\n") == 1 and ("not a journal" in said or "line 2" in said)
    assert path.read_text() == text and [entry.name for entry in tmp_path.iterdir()] == ["log"]


def _noise(path: Path) -> None:
    with path.open("a") as file:
        file.write("noise{{{\n")


def _strange(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"op_code":77,"worker_id":"x"}\n[]\n')


@pytest.mark.parametrize("damage", [_noise, _strange, lambda path: path.write_text(""), Path.unlink,
                                    lambda path: shutil.rmtree(path.parent)],
                         ids=["noise", "strange", "emptied", "removed", "folder removed"])
def test_a_journal_damaged_in_the_middle_ends_the_search_and_not_the_run(damage: Callable[[Path], object], tmp_path: Path,
                                                                         tuned: Tuned) -> None:
    path = tmp_path / "study" / "log"
    path.parent.mkdir()
    done: list[bool] = []

    def times(config: Config) -> float:
        if len(set(gpu.timed)) == 6 and not done:
            done.append(True)
            damage(path)
        return rugged(config)

    gpu = FakeGpu(times)
    status, said = tuned(f"journal:{path}", gpu=gpu)
    assert status == 0 and "Traceback" not in said
    assert "storage journal:" in said.splitlines()[-1] and "went on alone" in said.splitlines()[-1]
    assert 6 <= len(read_trials(tmp_path / "out" / "trials.jsonl")[1]) <= 12 and (tmp_path / "out" / "best.cu").exists()


def test_a_database_of_another_version_of_optuna_is_one_sentence(tmp_path: Path, tuned: Tuned) -> None:
    path = tmp_path / "study.db"
    assert tuned(f"sqlite:///{path}", "--trials", "3")[0] == 0
    with sqlite3.connect(path) as database:
        database.execute("update alembic_version set version_num = 'v1.3.0.a'")
    database.close()
    status, said = tuned(f"sqlite:///{path}")
    assert status == 1 and said.count("\n") == 1 and "optuna storage upgrade" in said


def test_a_storage_that_cannot_be_written_ends_the_run_before_it_begins(tmp_path: Path, tuned: Tuned) -> None:
    path = tmp_path / "study.db"
    assert tuned(f"sqlite:///{path}", "--trials", "3")[0] == 0
    before = (tmp_path / "out" / "trials.jsonl").read_bytes()
    gpu = FakeGpu()
    status, said = tuned(f"sqlite:///file:{path}?mode=ro&uri=true", gpu=gpu)
    assert status == 1 and said.count("\n") == 1 and "readonly" in said and not gpu.compiled
    assert (tmp_path / "out" / "trials.jsonl").read_bytes() == before
