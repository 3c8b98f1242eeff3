"""`python -m tuner verify`: what it says, when it fails, and that it sees what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tuner.cli
from codegen.limits import target
from codegen.problem import Problem
from codegen.render import Source
from tests.fake_gpu import failing_launch
from tests.numpy_kernels import PLAIN
from tuner.errors import ToolchainError
from tuner.executors import Run
from tuner.inputs import Gradients, Inputs, random_inputs
from tuner.verify import cli
from tuner.verify.check import Request, make_data, rows_on
from tuner.verify.judge import FORWARD, NAMES, judge_forward, judge_gradients
from tuner.verify.oracle import NumPyOracle

MEASURED = tuple(NAMES.values())


class Device:
    """An executor whose kernels are a Python function."""

    limits, device = target("sm_90"), "NVIDIA Test"

    def __init__(self, name: str, run: Run = PLAIN) -> None:
        self.name, self.measures, self._run = name, name == "cuda", run

    def compile(self, source: Source) -> Any:
        device = self

        class Program:
            def run(self, inputs: Inputs, wants: frozenset[str]) -> Gradients:
                return device._run(inputs, wants)

        return Program()

    def close(self) -> None:
        pass


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine without PyTorch whose devices are those given, by executor."""
    def install(**devices: Run | ToolchainError) -> None:
        def opened(name: str) -> Device:
            found = devices[name]
            if isinstance(found, ToolchainError):
                raise found
            return Device(name, found)

        monkeypatch.setattr(cli, "open_executor", opened)
        monkeypatch.setattr(cli, "why_unavailable", lambda: None if "cuda" in devices else "there is no GPU")
        monkeypatch.setitem(sys.modules, "torch", None)

    return install


def test_both_devices_are_right(machine: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    machine(host=PLAIN, cuda=PLAIN)
    assert tuner.cli.main(["verify", "--shape", "2,9,16,24"]) == 0
    out = capsys.readouterr().out
    assert all(out.count(f"│ {name} ") == 2 for name in (FORWARD, *MEASURED))
    assert "CPU: ✓ correct" in out and "GPU: ✓ correct" in out and "NumPy, float64" in out


def test_an_absent_gpu_is_skipped_and_said(machine: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    machine(host=PLAIN)
    assert cli.main([]) == 0
    assert "GPU: skipped, as there is no GPU" in capsys.readouterr().out


def test_an_absent_gpu_that_was_asked_for_is_a_failure(machine: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    machine(host=PLAIN, cuda=ToolchainError("no driver"))
    assert cli.main(["--executor", "cuda"]) == 1
    out = capsys.readouterr().out
    assert "GPU: ✗ could not be checked: no driver" in out and "CPU" not in out


@pytest.mark.parametrize("name", ["dx", "dgamma", "dbeta", "dw", "db"])
def test_one_wrong_gradient_shows(machine: Callable[..., None], capsys: pytest.CaptureFixture[str], name: str) -> None:
    def wrong(inputs: Inputs, wants: frozenset[str]) -> Gradients:
        right = PLAIN(inputs, wants)
        return replace(right, **{name: getattr(right, name) * np.float32(1.00001)})

    machine(host=wrong, cuda=PLAIN)
    assert cli.main([]) == 1
    out = capsys.readouterr().out
    cpu, gpu = out.split("GPU: NVIDIA Test")
    assert cpu.count("✗") == 3 and "✗ WRONG" in cpu and f"{NAMES[name]}: {name}" in cpu
    assert "CPU: ✗ WRONG" in gpu and "GPU: ✓ correct" in gpu


def test_a_kernel_that_fails_on_one_device_leaves_the_other(
        machine: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    machine(host=failing_launch, cuda=PLAIN)
    assert cli.main([]) == 1
    out = capsys.readouterr().out
    assert "CPU: ✗ could not be checked: too many resources" in out and "GPU: ✓ correct" in out


@pytest.mark.parametrize("arguments", [
    ["--shape", "4,4,8"], ["--shape", "0,4,8,16"], ["--dtype", "float64"], ["--accuracy", "fp64"], ["--eps", "-1"],
    ["--seed", "-1"], ["--config", "row_wrap"]], ids=" ".join)
def test_arguments_that_make_no_sense(machine: Callable[..., None], capsys: pytest.CaptureFixture[str],
                                      arguments: list[str]) -> None:
    machine(host=PLAIN)
    assert cli.main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("verify: ") and len(said.err.splitlines()) == 1


def test_the_cpu_takes_fewer_rows_of_large_shapes() -> None:
    large = Problem(8192, 768, 2304)
    assert rows_on(Device("cuda"), large) == 8192
    assert 1 <= rows_on(Device("host"), large) < 100
    assert rows_on(Device("host"), Problem(16, 8, 16)) == 16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sizes", [(16, 8, 16), (71, 229, 33), (3, 1, 1)], ids=str)
def test_a_forward_pass_is_judged_element_by_element(dtype: str, sizes: tuple[int, int, int]) -> None:
    oracle = NumPyOracle()
    data = make_data(Request(Problem(*sizes, dtype), 1e-5, 0), sizes[0], oracle)
    y = oracle.forward(data.inputs, data.bias, "cpu")
    assert judge_forward(data.inputs, data.bias, y, data.expected).ok
    y = y.copy()
    y[0, 0] += np.abs(y).max()
    assert not judge_forward(data.inputs, data.bias, y, data.expected).ok


def test_the_last_addition_of_a_forward_pass_may_round() -> None:
    oracle, inputs = NumPyOracle(), random_inputs(16, 8, 16)
    assert inputs.gamma is not None
    inputs = replace(inputs, gamma=inputs.gamma * np.float32(1e-6), beta=np.zeros(8, np.float32))
    bias = np.linspace(-1000.0, 1000.0, 16).astype(np.float32)  # next to which the products are small
    expected = oracle.expected(inputs, bias)
    assert judge_forward(inputs, bias, expected.y.astype(np.float32), expected).ok
    assert not judge_forward(inputs, bias, (expected.y * (1 + 1e-6)).astype(np.float32), expected).ok


def test_a_result_without_numbers_is_wrong() -> None:
    inputs = random_inputs(4, 8, 16)
    data = make_data(Request(Problem(4, 8, 16), 1e-5, 0), 4, NumPyOracle())
    right = PLAIN(inputs, frozenset(NAMES))
    assert right.dw is not None
    faults = [replace(right, dw=None), replace(right, dw=np.full_like(right.dw, np.nan)), replace(right, dw=right.dw.T.copy())]
    for got in faults:
        figures = judge_gradients(data.inputs, got, data.expected)
        assert [figure.name for figure in figures if not figure.ok] == ["grad_linear_weight"]


def test_on_this_machines_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--executor", "host", "--config", "row_thread"]) == 0
    assert "kernel: row_thread:" in capsys.readouterr().out
