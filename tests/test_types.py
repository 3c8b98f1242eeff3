"""N9: data types and accuracy classes, from arrays and arguments to results, records, reports and folder names."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tuner
from codegen.dtypes import ACCURACIES
from codegen.problem import GRADIENTS
from codegen.render import Source
from codegen.tensors import BY_NAME
from tests.cases import DATA_TYPES
from tests.fake_gpu import FakeGpu, FakeProgram
from tests.trials import read_trials
from tuner import cli
from tuner.compare import bound_fault
from tuner.dtypes import NUMPY
from tuner.errors import CompileError
from tuner.executors import Executor
from tuner.inputs import Inputs, random_inputs

ROWS, HIDDEN, OUT = 6, 8, 5
BFLOAT16 = ml_dtypes.bfloat16


@pytest.fixture(autouse=True)
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder where results are looked for."""
    monkeypatch.setenv("LNL_REPORTS", str(tmp_path / "reports"))
    return tmp_path / "reports"


def call(inputs: Inputs, executor: Executor, **options: Any) -> tuner.Gradients:
    given = {name: getattr(inputs, name) for name in ("dy", "x", "gamma", "beta", "w", "eps")}
    return tuner.backward(**{**given, **options}, executor=executor)


# --- backward ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "param_dtype"), DATA_TYPES)
def test_n9_backward_takes_the_types_of_its_arrays(executor: Executor, dtype: str, param_dtype: str) -> None:
    data = random_inputs(ROWS, HIDDEN, OUT, dtype=dtype, param_dtype=param_dtype)
    got = call(data, executor, dy=data.dy.reshape(2, 3, OUT), x=data.x.reshape(2, 3, HIDDEN))
    assert got.dx is not None and got.dx.shape == (2, 3, HIDDEN)
    for name, array in got.present().items():
        assert array.dtype == NUMPY[BY_NAME[name].dtype(dtype, param_dtype)] and array.flags.c_contiguous
    flat = {name: array.reshape(-1, HIDDEN) if name == "dx" else array for name, array in got.present().items()}
    assert bound_fault(data, tuner.Gradients(**flat)) is None


@pytest.mark.parametrize(("dtype", "param_dtype"), DATA_TYPES)
def test_s7_without_rows_results_have_their_types_too(executor: Executor, dtype: str, param_dtype: str) -> None:
    got = call(random_inputs(0, HIDDEN, OUT, dtype=dtype, param_dtype=param_dtype), executor)
    for name, array in got.present().items():
        assert array.dtype == NUMPY[BY_NAME[name].dtype(dtype, param_dtype)] and not array.any()


@pytest.mark.parametrize(("dtype", "param_dtype", "total"), [
    ("bfloat16", "bfloat16", 4992), ("bfloat16", "float32", 5000), ("float16", "float16", 5000), ("float16", "float32", 5000)])
def test_n9_sums_are_float32(executor: Executor, dtype: str, param_dtype: str, total: int) -> None:
    """5000 ones: a bfloat16 sum stays at 256, a float16 one at 2048; the result alone is rounded."""
    data, param = NUMPY[dtype], NUMPY[param_dtype]
    x = random_inputs(5000, 4, 1, dtype=dtype).x
    got = tuner.backward(np.ones((5000, 1), data), x, np.ones(4, param), np.zeros(4, param), np.ones((1, 4), param),
                         executor=executor)
    assert got.db is not None and got.dbeta is not None
    assert got.db.astype(float).tolist() == [total] and got.dbeta.astype(float).tolist() == [total] * 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_n9_statistics_are_float32(executor: Executor, dtype: str) -> None:
    """A row of which no square, and in bfloat16 no sum either, is a number of its type: 240 to 255 in steps of 1."""
    x = np.arange(240, 256).reshape(1, 16).astype(NUMPY[dtype])
    ones = np.ones(16, NUMPY[dtype])
    w = (np.arange(16) % 4).reshape(1, 16).astype(NUMPY[dtype])
    inputs = Inputs(np.ones((1, 1), NUMPY[dtype]), x, ones, 0 * ones, w, 1e-5)
    assert bound_fault(inputs, call(inputs, executor)) is None


@pytest.mark.parametrize("name", ["dy", "x", "gamma", "beta", "w"])
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float64, np.int16, np.int32], ids=lambda dtype: np.dtype(dtype).name)
def test_n9_one_array_of_another_type_is_a_type_error(executor: Executor, name: str, dtype: Any) -> None:
    data = random_inputs(ROWS, HIDDEN, OUT)
    with pytest.raises(TypeError, match=rf"\b{name}\b"):
        call(data, executor, **{name: getattr(data, name).astype(dtype)})


def test_n9_data_in_float32_beside_16_bit_parameters_is_a_type_error(executor: Executor) -> None:
    data, short = random_inputs(ROWS, HIDDEN, OUT), random_inputs(ROWS, HIDDEN, OUT, dtype="float16")
    with pytest.raises(TypeError, match="w must be float32 where x is float32, not float16"):
        call(data, executor, gamma=short.gamma, beta=short.beta, w=short.w)


# --- configs and tune --------------------------------------------------------------------------------------------------------


def test_configs_of_16_bit_data() -> None:
    short, mixed = tuner.configs("4,4,8,16", dtype="bfloat16"), tuner.configs("4,4,8,16", dtype="bfloat16", param_dtype="float32")
    assert {config.variant for config in short} >= {"row_thread", "row_warp", "row_shared"}
    assert not any(config["reduction"] == "atomic" for config in short if config.variant.startswith("row_"))
    assert any(config["reduction"] == "atomic" for config in mixed)


@pytest.mark.parametrize(("options", "error", "said"), [
    ({"param_dtype": "bfloat16"}, tuner.UnsupportedDtype, "parameters of bfloat16 beside data of float32"),
    ({"dtype": "bfloat16", "param_dtype": "float16"}, tuner.UnsupportedDtype, "use bfloat16 or float32"),
    ({"param_dtype": "float8"}, tuner.UnsupportedDtype, "'float8' is not supported"),
    ({"accuracy": "best"}, tuner.InvalidProblem, "choose from fp32, tf32"),
    ({"dtype": "bfloat16", "accuracy": "fp32"}, tuner.InvalidProblem, "cannot meet the accuracy class fp32; ask for bf16"),
    ({"dtype": "float16", "accuracy": "tf32"}, tuner.InvalidProblem, "ask for fp16"),
])
def test_types_and_classes_that_do_not_go_together(options: dict[str, str], error: type[Exception], said: str) -> None:
    for function in (tuner.configs, lambda shape, **given: tuner.tune(shape, executor=FakeGpu(), **given)):
        with pytest.raises(error, match=said):
            function("4,4,8,16", **options)


@pytest.mark.parametrize(("dtype", "param_dtype"), DATA_TYPES)
def test_tune_validates_in_the_types_asked_for(dtype: str, param_dtype: str) -> None:
    gpu = FakeGpu()
    result = tuner.tune("4,4,8,16", executor=gpu, variants="row_warp", trials=3, dtype=dtype, param_dtype=param_dtype)
    assert (result.info.dtype, result.info.param_dtype) == (dtype, param_dtype)
    assert result.info.accuracy == {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype]
    assert result.winner is not None
    rounded = {name for name in GRADIENTS if result.winner.errors[name].normwise > 2e-5}
    assert rounded == {name for name in GRADIENTS if BY_NAME[name].dtype(dtype, param_dtype) != "float32"}


# --- the command line --------------------------------------------------------------------------------------------------------


class Refusing(FakeGpu):
    """Has no winner, which is quickest."""

    def compile(self, source: Source) -> FakeProgram:
        raise CompileError("error: out of luck")


@pytest.mark.parametrize(("options", "folder", "words"), [
    ("", "float32", "4,4,8,16, float32"),
    ("--param-dtype float32 --accuracy fp32", "float32", "4,4,8,16, float32"),
    ("--accuracy tf32", "float32-tf32", "4,4,8,16, float32, accuracy class tf32"),
    ("--dtype bfloat16", "bfloat16", "4,4,8,16, bfloat16"),
    ("--dtype bfloat16 --param-dtype bfloat16 --accuracy bf16", "bfloat16", "4,4,8,16, bfloat16"),
    ("--dtype float16 --param-dtype float32", "float16-param-float32", "4,4,8,16, float16 with float32 parameters"),
    ("--dtype float16 --param-dtype float32 --accuracy bf16 --deterministic --wants dx",
     "float16-param-float32-bf16-deterministic-dx", "4,4,8,16, float16 with float32 parameters, accuracy class bf16"),
])
def test_types_and_class_name_the_folder_and_head_the_report(reports: Path, monkeypatch: pytest.MonkeyPatch, options: str,
                                                             folder: str, words: str) -> None:
    monkeypatch.setattr(cli, "open_isolated", lambda name, target: Refusing())
    assert cli.main(["--shape", "4,4,8,16", "--variants", "row_warp", "--trials", "2", *options.split()]) == 1
    path = reports / "test" / f"4x4x8x16-{folder}"
    report = (path / "report.md").read_text()
    assert report.splitlines()[0] == f"# LayerNorm+Linear backward, {words}"
    info, _ = read_trials(path / "trials.jsonl")
    assert f"Accuracy class {info.accuracy}." in report


def test_types_and_class_stand_in_everything_a_run_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "open_isolated", lambda name, target: FakeGpu())
    assert cli.main(["--shape", "4,4,8,16", "--variants", "row_warp", "--trials", "2", "--out", str(tmp_path),
                     "--dtype", "float16", "--param-dtype", "float32"]) == 0
    words = "float16 with float32 parameters"
    output = " ".join(capsys.readouterr().out.split())
    assert words in output and "0.0015" in output
    assert words in (tmp_path / "best.cu").read_text()
    run = json.loads((tmp_path / "best.json").read_text())["run"]
    assert (run["dtype"], run["param_dtype"], run["accuracy"]) == ("float16", "float32", "fp16")


@pytest.mark.parametrize(("options", "said"), [
    ("--dtype float64", "use float32, bfloat16 or float16"),
    ("--param-dtype bfloat16", "parameters of bfloat16 beside data of float32"),
    ("--dtype bfloat16 --accuracy fp32", "ask for bf16"),
    ("--accuracy exact", ", ".join(ACCURACIES)),
])
def test_types_and_classes_that_do_not_go_together_exit_2(capsys: pytest.CaptureFixture[str], options: str, said: str) -> None:
    assert cli.main(["--shape", "4,4,8,16", *options.split()]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("tuner: ") and errors.count("\n") == 1 and said in errors


def test_bench_is_a_command_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    bench = ModuleType("tuner.bench.cli")
    bench.main = lambda arguments: given.append(list(arguments)) or 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tuner.bench.cli", bench)
    monkeypatch.setattr("tuner.bench.cli", bench, raising=False)
    assert cli.main(["bench", "--shapes", "pair"]) == 7
    assert given == [["--shapes", "pair"]]
