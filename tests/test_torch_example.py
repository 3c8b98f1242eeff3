"""The example: both models learn, and their losses agree."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.torch_on_host import install
from tuner.executors import Executor
from tuner.executors.host import HostExecutor
from tuner.store import Store
from tuner.torch.example import __main__ as example
from tuner.torch.example import training
from tuner.torch.example.__main__ import main
from tuner.torch.example.sheet import markdown
from tuner.torch.example.training import read_text

SMALL = ["--device", "cpu", "--steps", "12", "--batch", "2", "--length", "16", "--width", "16", "--heads", "2", "--layers", "1",
         "--rate", "0.01"]


def test_the_text_is_small_and_real() -> None:
    text, characters = read_text()
    assert 15_000 < len(text) < 50_000 and 50 < characters < 80


def test_the_losses_agree_and_fall(monkeypatch: pytest.MonkeyPatch, host_executor: Executor, store: Store,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(host_executor, HostExecutor)
    fake = install(monkeypatch, host_executor, store)
    assert main(SMALL) == 0
    out = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"(\d\.\d{4})", out)]
    assert losses[0] > losses[-1] > 0
    assert fake.log and "ms a step" in out


def test_a_wrong_kernel_shows_in_the_losses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tuner.torch import engine as engine_module
    from tuner.torch import ops

    monkeypatch.setattr(engine_module, "serves", lambda x: True)
    monkeypatch.setattr(engine_module, "backward", lambda grad, *given: None)
    real = ops.plain_backward
    monkeypatch.setattr(ops, "plain_backward", lambda grad, *given: [-found for found in real(grad, *given)])
    assert main(SMALL) == 1


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--width", "15", "--heads", "2"], ["--length", "100000"]], ids=" ".join)
def test_arguments_that_make_no_sense(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main([*SMALL, *arguments]) == 2
    assert capsys.readouterr().err.startswith("example: --")


def test_runs_are_kept_in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times: Iterator[float] = itertools.count(0.0, 0.25)
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    for arguments in (SMALL, [*SMALL, "--seed", "1"], SMALL):
        assert main([*arguments, "--out", str(tmp_path / "new")]) == 0
    assert f"written: {tmp_path}/new/training.md, {tmp_path}/new/training.json" in capsys.readouterr().out
    runs = json.loads((tmp_path / "new" / "training.json").read_text())["runs"]
    assert [run["setting"]["seed"] for run in runs] == [1, 0]  # the last took the place of the first
    assert all(run["command"].endswith(f"--out {tmp_path}/new") and run["device"] == "CPU" and run["date"] and run["version"]
               and run["step_ms"] == {"PyTorch": 250.0, "tuned": 250.0} and len(run["losses"]["tuned"]) == 12 for run in runs)
    page = (tmp_path / "new" / "training.md").read_text()
    assert page.count("## 2 texts of 16, width 16, 1 layers, float32") == 2
    assert page.count("| eager | 250.000 | 250.000 | 1.00 |") == 2


def a_run() -> dict[str, Any]:
    times = {"PyTorch": 6.0, "tuned": 3.0, "PyTorch, torch.compile": 4.0, "tuned, torch.compile": 2.5}
    setting = {"batch": 8, "length": 1024, "width": 768, "layers": 1, "autocast": None, "steps": 2}
    return {"command": "c", "device": "d", "date": "t", "version": "v", "versions": {"PyTorch": "2"}, "setting": setting,
            "step_ms": times, "losses": {name: [4.0, 3.0] for name in times}, "apart": 1e-5,
            "tuned": [{"problem": "8 rows", "config": "row_warp", "us": 1.25}]}


def test_the_page_compares_like_with_like() -> None:
    page = markdown([a_run()])
    for line in ("| eager | 6.000 | 3.000 | 2.00 |", "| torch.compile | 4.000 | 2.500 | 1.60 |",
                 "| best | 4.000 | 2.500 | 1.60 |", "* tuned in this run: 8 rows, 1.2 us, `row_warp`"):
        assert line in page.splitlines()


DAMAGED: list[Any] = [None, 3, "runs", {"a": 1}, [3], [{}], [{**a_run(), "setting": {}}], [{**a_run(), "losses": {"tuned": []}}],
                      [{**a_run(), "step_ms": {"PyTorch": 6.0, "tuned": 0.0}}], [{**a_run(), "versions": None}],
                      [{**a_run(), "apart": "far"}], [a_run(), {**a_run(), "tuned": [{}]}]]


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 0, "runs": []}', '{"schema": 1}',
                                     *(json.dumps({"schema": 1, "runs": runs}) for runs in DAMAGED)])
def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    (tmp_path / "training.json").write_text(content)
    assert main([*SMALL, "--out", str(tmp_path)]) == 2
    assert "choose another folder with --out" in capsys.readouterr().err
    assert (tmp_path / "training.json").read_text() == content


def test_the_seconds_of_autotune_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def autotune(step: object, timeout: float) -> list[object]:
        asked.append(timeout)
        return []

    monkeypatch.setattr(example, "autotune", autotune)
    assert main([*SMALL, "--steps", "1", "--layers", "2", "--autotune", "30"]) == 0
    assert asked == [10.0]  # queries, keys and values; the wide layer; the head


def test_where_nothing_was_tuned_it_trains_all_the_same(monkeypatch: pytest.MonkeyPatch,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    def autotune(step: object, timeout: float) -> list[object]:
        warnings.warn("a backward pass stays as it was", stacklevel=2)
        return []

    monkeypatch.setattr(example, "autotune", autotune)
    assert main([*SMALL, "--steps", "1", "--autotune", "30"]) == 0
    assert capsys.readouterr().err == "example: a backward pass stays as it was\n"


@pytest.mark.cuda
def test_on_the_gpu_at_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert torch.cuda.is_available()
    assert main(["--steps", "100"]) == 0
