"""Timing with a cold cache through the CUDA executor, on a stand-in for the driver; with a GPU, the whole benchmark."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from codegen.expr import const
from codegen.plan import Launch, Plan
from codegen.problem import ALL_GRADIENTS, GRADIENTS, Problem
from codegen.render import Source
from codegen.space import make_config
from tests.fake_cuda import FakeCuda, open_executor
from tuner import cli
from tuner.errors import DeviceLost, LaunchError
from tuner.executors.cuda import CudaProgram
from tuner.executors.cuda_cold import placed
from tuner.inputs import random_inputs, read_only
from tuner.store import Store
from tuner.timing.clocks import Clocks
from tuner.timing.measure import Effort, cold

FLUSH = 1 << 20


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, store: Store) -> tuple[CudaProgram, FakeCuda]:
    """A program of two launches, each of which takes fake.call_ms."""
    fake = FakeCuda()
    executor = open_executor(monkeypatch, store, fake)
    fake.plan = Plan((Launch("kernel", const(1), 32), Launch("kernel", const(1), 32)))
    text = 'extern "C" __global__ void kernel(float*) {}\n'
    return executor.compile(Source(Problem(5, 3, 7), make_config("row_thread"), text, fake.plan)), fake


def test_a_cold_time_is_of_one_call_and_leaves_nothing_behind(made: tuple[CudaProgram, FakeCuda]) -> None:
    program, fake = made
    inputs = read_only(random_inputs(5, 3, 7))
    program.run(inputs, ALL_GRADIENTS)  # afterwards the executor keeps what it needs
    kept = fake.free_bytes
    with placed(program, inputs, ALL_GRADIENTS, FLUSH) as (stream, work):
        timing = cold(stream, work, Effort(4, 1.0), Clocks())
        assert kept - fake.free_bytes == FLUSH
    assert timing.samples == pytest.approx((2 * 1e3 * fake.call_ms,) * 4)
    assert fake.free_bytes == kept and not fake.graphs and fake.depth == 0


def test_no_room_for_the_flush_is_a_launch_error(made: tuple[CudaProgram, FakeCuda]) -> None:
    program, fake = made
    with pytest.raises(LaunchError, match="out of memory"), \
            placed(program, random_inputs(5, 3, 7), ALL_GRADIENTS, 1 << 40) as (stream, _):
        stream.flush()
    assert fake.depth == 0


def test_a_gpu_lost_meanwhile_says_so(made: tuple[CudaProgram, FakeCuda]) -> None:
    program, fake = made
    with pytest.raises(DeviceLost), placed(program, random_inputs(5, 3, 7), ALL_GRADIENTS, FLUSH) as (stream, work):
        fake.sticky = "an illegal memory access was encountered"
        cold(stream, work, Effort(4, 1.0), Clocks())
    assert fake.depth == 0


@pytest.mark.cuda
def test_the_benchmark_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LNL_REPORTS", str(tmp_path / "none"))
    (tmp_path / "shapes").write_text("small 3,5,16,8\n")
    assert cli.main(["bench", "--shapes", str(tmp_path / "shapes"), "--dtypes", "float32,bfloat16,float16", "--accuracy",
                     "fp32,tf32", "--trials", "4", "--out", str(tmp_path / "out")]) == 0
    values = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert len(values["rows"]) == 4
    for row in values["rows"]:
        assert row["reason"] is None and row["ours"]["warm"]["median"] > 0 and row["ours"]["cold"]["median"] > 0
        assert set(row["ours"]["errors"]) == set(GRADIENTS)
    if importlib.util.find_spec("torch") is None:
        assert "PyTorch cannot be used" in values["parts"][0]["absent"]
        return
    assert values["parts"][0]["rates"]["matrix_tflops"] > 1
    for row in values["rows"]:
        assert row["judge"] == "timed" and set(row["peers"]) == {"eager", "compile", "gemms"}
        for name, entry in row["peers"].items():
            assert entry["note"] is None, (name, entry["note"])
            assert entry["warm"]["median"] > 0 and entry["cold"]["median"] > 0
    float32 = values["rows"][0]["peers"]
    assert max(float32["eager"]["errors"].values()) < 2e-6
