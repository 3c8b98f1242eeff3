"""`python -m tuner verify` where PyTorch is installed: its autograd is the judge."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from codegen.problem import Problem
from tuner.inputs import random_inputs
from tuner.verify import cli
from tuner.verify.check import Request, make_data
from tuner.verify.judge import judge_forward
from tuner.verify.oracle import AutogradOracle, NumPyOracle, find_oracle


@pytest.mark.parametrize("absent", ["", "gamma", "beta"])
def test_autograd_and_numpy_agree(absent: str) -> None:
    inputs = random_inputs(29, 33, 7)
    inputs = replace(inputs, **({absent: None} if absent else {}))
    bias = np.arange(7, dtype=np.float32)
    ours, theirs = (oracle.expected(inputs, bias) for oracle in (NumPyOracle(), find_oracle()))
    assert "autograd" in theirs.by
    assert np.allclose(ours.y, theirs.y, rtol=1e-12, atol=1e-12)
    for name, value in ours.gradients.present().items():
        assert np.allclose(value, theirs.gradients.present()[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("dtype", "param_dtype"), [("float32", ""), ("bfloat16", ""), ("float16", "float32"),
                                                    ("bfloat16", "float32")])
def test_pytorchs_forward_pass_is_within_its_bound(dtype: str, param_dtype: str) -> None:
    oracle = find_oracle()
    assert isinstance(oracle, AutogradOracle)
    data = make_data(Request(Problem(71, 229, 33, dtype, param_dtype=param_dtype), 1e-5, 0), 71, oracle)
    assert judge_forward(data.inputs, data.bias, oracle.forward(data.inputs, data.bias, "cpu"), data.expected).ok


@pytest.mark.parametrize(("hidden", "dtype", "param_dtype"), [(1, "bfloat16", "float32"), (1, "float16", "float32"),
                                                              (2, "float32", ""), (1, "float32", ""), (2, "bfloat16", "")])
def test_where_the_bias_is_most_of_y_the_bound_knows_its_rounding(hidden: int, dtype: str, param_dtype: str) -> None:
    oracle = find_oracle()
    for seed in range(24):
        data = make_data(Request(Problem(64, hidden, 33, dtype, param_dtype=param_dtype), 1e-5, seed), 64, oracle)
        figure = judge_forward(data.inputs, data.bias, oracle.forward(data.inputs, data.bias, "cpu"), data.expected)
        assert figure.ok, (seed, figure.ratio)


def test_on_this_machines_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--executor", "host", "--config", "row_thread"]) == 0
    out = capsys.readouterr().out
    assert "autograd, float64" in out and "forward by tuner.torch, on the CPU" in out


@pytest.mark.cuda
@pytest.mark.parametrize("arguments", [
    [], ["--shape", "8,128,256,1024", "--dtype", "bfloat16"],
    ["--shape", "2,71,229,33", "--dtype", "float16", "--param-dtype", "float32"]], ids=" ".join)
def test_on_this_machines_gpu(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert cli.main(["--executor", "cuda", *arguments]) == 0
    assert "through PyTorch" in capsys.readouterr().out
