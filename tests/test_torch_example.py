"""The example: both models learn, and their losses agree."""

from __future__ import annotations

import re

import pytest
import torch

from tests.torch_on_host import install
from tuner.executors import Executor
from tuner.executors.host import HostExecutor
from tuner.store import Store
from tuner.torch.example.__main__ import main
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


@pytest.mark.cuda
def test_on_the_gpu_at_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert torch.cuda.is_available()
    assert main(["--steps", "100"]) == 0
