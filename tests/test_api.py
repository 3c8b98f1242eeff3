"""The Python interface: `tuner.backward`, `tuner.configs`, `tuner.tune`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tuner
import tuner.tuning as tuning
from codegen.problem import GRADIENTS, Problem, Shape
from codegen.space import make_config, parse_config
from tests import cases
from tests.fake_gpu import FakeGpu, rugged
from tuner.compare import bound_fault
from tuner.executors import Executor
from tuner.guess import best_predicted
from tuner.inputs import Array32, Gradients, Inputs, random_inputs
from tuner.known import best_known
from tuner.publish import Folder
from tuner.records import Record, RunInfo, Status
from tuner.tuning import Request, TuningRun

ROWS, HIDDEN, OUT = 6, 8, 5


@pytest.fixture(autouse=True)
def no_earlier_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LNL_REPORTS", str(tmp_path / "reports"))


@pytest.fixture
def data() -> Inputs:
    return random_inputs(ROWS, HIDDEN, OUT)


def call(inputs: Inputs, executor: Executor, **options: Any) -> Gradients:
    given = {name: getattr(inputs, name) for name in ("dy", "x", "gamma", "beta", "w", "eps")}
    return tuner.backward(**{**given, **options}, executor=executor)


def same(first: Gradients, second: Gradients) -> bool:
    pairs = [(getattr(first, name), getattr(second, name)) for name in GRADIENTS]
    return all(a.tobytes() == b.tobytes() if a is not None and b is not None else a is b for a, b in pairs)


# --- backward ----------------------------------------------------------------------------------------------------------------


def test_backward_is_right(data: Inputs, executor: Executor) -> None:
    assert bound_fault(data, call(data, executor)) is None


@pytest.mark.parametrize("leading", [(6,), (2, 3), (3, 1, 2), (1, 6), (6, 1, 1)])
def test_leading_dimensions_are_free(data: Inputs, executor: Executor, leading: tuple[int, ...]) -> None:
    result = call(data, executor, x=data.x.reshape(*leading, HIDDEN), dy=data.dy.reshape(*leading, OUT))
    assert result.dx is not None and result.dx.shape == (*leading, HIDDEN)
    assert same(replace(result, dx=result.dx.reshape(ROWS, HIDDEN)), call(data, executor))


def test_s2_one_row_without_leading_dimensions(executor: Executor) -> None:
    one = random_inputs(1, HIDDEN, OUT)
    result = call(one, executor, x=one.x[0], dy=one.dy[0])
    assert result.dx is not None and result.dx.shape == (HIDDEN,)


def fortran(array: Array32) -> Array32:
    return np.asfortranarray(array)


def every_second(array: Array32) -> Array32:
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), np.float32)
    wide[..., ::2] = array
    return wide[..., ::2]


def backwards(array: Array32) -> Array32:
    return np.ascontiguousarray(array[::-1])[::-1]


@pytest.mark.parametrize("layout", [fortran, every_second, backwards])
@pytest.mark.parametrize("name", ["dy", "x", "gamma", "beta", "w"])
def test_l2_any_memory_layout(data: Inputs, executor: Executor, name: str, layout: Callable[[Array32], Array32]) -> None:
    result = call(data, executor, **{name: layout(getattr(data, name))})
    assert same(result, call(data, executor))
    assert all(array.flags.c_contiguous for array in result.present().values())


def test_l1_expanded_gradients(data: Inputs, executor: Executor) -> None:
    for dy in (np.broadcast_to(np.float32(1), (2, 3, OUT)), np.broadcast_to(data.dy[:2, None], (2, 3, OUT))):
        x = data.x.reshape(2, 3, HIDDEN)
        assert same(call(data, executor, x=x, dy=dy), call(data, executor, x=x, dy=dy.copy()))


@pytest.mark.parametrize("shape", cases.NO_ROWS, ids=str)
def test_s7_nothing_to_do(executor: Executor, shape: Shape) -> None:
    x = np.zeros((shape.batch, shape.seq, shape.hidden), np.float32)
    dy = np.zeros((shape.batch, shape.seq, shape.out), np.float32)
    gamma, w = np.ones(shape.hidden, np.float32), np.ones((shape.out, shape.hidden), np.float32)
    result = tuner.backward(dy, x, gamma, gamma, w, executor=executor)
    assert result.dx is not None and result.dx.shape == x.shape
    for name, size in (("dgamma", (shape.hidden,)), ("dbeta", (shape.hidden,)), ("dw", w.shape), ("db", (shape.out,))):
        array = getattr(result, name)
        assert array.shape == size and array.dtype == np.float32 and not array.any()


def test_s7_nothing_is_compiled_for_no_rows(data: Inputs) -> None:
    gpu = FakeGpu()
    tuner.backward(data.dy[:0], data.x[:0], data.gamma, data.beta, data.w, executor=gpu)
    assert gpu.compiled == []


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_s7_no_columns_at_all(executor: Executor, shape: tuple[int, int]) -> None:
    out, hidden = shape
    empty = np.zeros(hidden, np.float32)
    with pytest.raises(ValueError, match="at least 1"):
        tuner.backward(np.zeros((2, out), np.float32), np.zeros((2, hidden), np.float32), empty, empty,
                       np.zeros((out, hidden), np.float32), executor=executor)


@pytest.mark.parametrize("wants", [("dx",), ("dgamma", "dw"), "db", "dx,dbeta", list(GRADIENTS)], ids=str)
def test_only_what_is_wanted(data: Inputs, executor: Executor, wants: Any) -> None:
    chosen = frozenset(wants.split(",") if isinstance(wants, str) else wants)
    result = call(data, executor, wants=wants)
    assert set(result.present()) == chosen
    assert bound_fault(data, result, chosen) is None


def test_without_gamma_and_beta(data: Inputs, executor: Executor) -> None:
    bare = replace(data, gamma=None, beta=None)
    result = call(bare, executor)
    assert set(result.present()) == {"dx", "dw", "db"}
    assert bound_fault(bare, result, frozenset({"dx", "dw", "db"})) is None
    for name in ("gamma", "beta"):
        with pytest.raises(tuner.InputError, match=f"d{name} cannot be wanted where {name} is None"):
            call(data, executor, **{name: None}, wants=["dx", f"d{name}"])


@pytest.mark.parametrize("wants", [(), ("dx", "dz"), ""], ids=str)
def test_wants_that_are_no_gradients(data: Inputs, executor: Executor, wants: Any) -> None:
    with pytest.raises(tuner.InvalidProblem):
        call(data, executor, wants=wants)


@pytest.mark.parametrize("eps", [1e-5, np.float32(1e-5), np.float64(1e-5), np.array(1e-5), np.array(1e-5, np.float32)], ids=repr)
def test_p3_eps_of_any_number_type(data: Inputs, executor: Executor, eps: Any) -> None:
    assert same(call(data, executor, eps=eps), call(data, executor))


@pytest.mark.parametrize("eps", ["1e-5", None, [1e-5], True, np.array([1e-5])], ids=repr)
def test_p3_eps_of_another_type(data: Inputs, executor: Executor, eps: Any) -> None:
    with pytest.raises(TypeError, match="eps"):
        call(data, executor, eps=eps)


def test_t1_the_gradient_is_linear_in_dy(data: Inputs, executor: Executor) -> None:
    once, twice = call(data, executor).present(), call(data, executor, dy=2 * data.dy).present()
    assert all(np.array_equal(2 * once[name], twice[name]) for name in GRADIENTS)


def test_a_config_by_its_string(data: Inputs, executor: Executor) -> None:
    text = "row_warp:warps=2,reduction=single_block,splits=1"
    assert bound_fault(data, call(data, executor, config=text)) is None
    assert same(call(data, executor, config=text), call(data, executor, config=parse_config(text)))


@pytest.mark.parametrize(("config", "said"), [
    ("row_wrap", "no variant"), ("row_warp:warps=3", "no choice"), ("row_warp:vector", "name=value"),
    ("row_warp:reduction=single_block,splits=64", "cannot run these sizes")])
def test_a_config_that_cannot_be(data: Inputs, executor: Executor, config: str, said: str) -> None:
    with pytest.raises(tuner.InvalidConfig, match=said):
        call(data, executor, config=config)


def test_the_best_of_earlier_runs_is_taken(data: Inputs, tmp_path: Path) -> None:
    def tuned(shape: str, favourite: str) -> None:
        gpu = FakeGpu(lambda config: 1.0 if config == parse_config(favourite) else rugged(config))
        run = TuningRun(Request(Shape.parse(shape), variants=("row_warp",)), gpu)
        folder = Folder(tmp_path / "reports" / "test" / shape.replace(",", "x"), run.info)
        with folder:
            run.execute()
        folder.finish(run.result(), interrupted=False, choose=lambda problem: best_predicted(problem, gpu.limits))

    near, far = (f"row_warp:warps={warps},reduction=single_block,splits=1" for warps in (2, 8))
    tuned(f"1,{ROWS},{HIDDEN},{OUT}", near)
    tuned(f"1,4096,{HIDDEN},{OUT}", far)
    tuned("4,4,32,64", far)
    gpu = FakeGpu()
    assert next(best_known(Problem(ROWS, HIDDEN, OUT), gpu)) == parse_config(near)
    assert next(best_known(Problem(3000, HIDDEN, OUT), gpu)).variant == "row_warp"
    with_many_rows = random_inputs(1 << 15, HIDDEN, OUT)
    call(with_many_rows, gpu, wants="db")
    assert all(config["reduction"] != "single_block" for config in gpu.compiled)
    gpu.compiled.clear()
    assert list(best_known(Problem(ROWS, HIDDEN + 1, OUT), gpu)) == []
    tuner.backward(data.dy, data.x, data.gamma, data.beta, data.w, executor=gpu)
    assert gpu.compiled == [parse_config(near)]


RUN = RunInfo(
    shape=f"1,{ROWS},{HIDDEN},{OUT}", dtype="float32", wants="dx", deterministic=False, eps=1e-5, accuracy="fp32",
    executor="cuda", device="NVIDIA Test", target="sm_90a", seed=0, trials=1, timeout_s=None, date="", command="", version="",
    combinations=1, valid=1, refused={})
WON = Record(make_config("row_warp"), Status.OK, None, 1.0, True).as_json()
KNOWN: dict[str, Any] = {"schema": 1, "run": RUN.as_json(), "winner": WON}


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", "7", '{"run": "x"}', '{"run": []}', json.dumps(KNOWN)[:-9], json.dumps({**KNOWN, "winner": None}),
    json.dumps({**KNOWN, "winner": {**WON, "errors": []}}), json.dumps(KNOWN).replace(f"1,{ROWS},", "0,5,"),
    json.dumps(KNOWN).replace(f'"1,{ROWS},{HIDDEN},{OUT}"', "16"), json.dumps(KNOWN).replace('"schema": 1', '"schema": 0'),
    json.dumps(KNOWN).replace("row_warp:", "row_wrap:")])
def test_a_broken_best_json_is_passed_over(data: Inputs, tmp_path: Path, text: str) -> None:
    path = tmp_path / "reports" / "test" / "1" / "best.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    gpu = FakeGpu()
    assert list(best_known(Problem(ROWS, HIDDEN, OUT), gpu)) == []
    assert call(data, gpu, wants="dx").dx is not None
    path.with_name("best.json").write_text(json.dumps(KNOWN) + " ")
    assert list(best_known(Problem(ROWS, HIDDEN, OUT), gpu)) == [make_config("row_warp")]


def test_programs_are_kept_between_calls(data: Inputs) -> None:
    gpu = FakeGpu()
    for rows in (5, 6, 7, 8):
        more = random_inputs(rows, HIDDEN, OUT)
        tuner.backward(more.dy, more.x, more.gamma, more.beta, more.w, executor=gpu)
    assert len(gpu.compiled) == len(set(gpu.compiled))


# --- configs and tune --------------------------------------------------------------------------------------------------------


def test_configs_round_trip() -> None:
    found = tuner.configs("4,4,8,16")
    assert found == tuner.configs((4, 4, 8, 16)) == tuner.configs(Shape(4, 4, 8, 16))
    assert len(found) == len(set(found)) > 100
    assert all(parse_config(str(config)) == config for config in found)
    assert {config.variant for config in tuner.configs("4,4,8,16", variants=["row_warp"])} == {"row_warp"}
    assert all(config["reduction"] != "atomic" for config in tuner.configs("4,4,8,16", deterministic=True))


@pytest.mark.parametrize(("arguments", "error"), [
    (("4,4,8",), tuner.InvalidProblem), (((4, 4, 8),), tuner.InvalidProblem), (("4,4,0,8",), tuner.InvalidProblem)])
def test_configs_of_no_shape(arguments: tuple[Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        tuner.configs(*arguments)


def test_tune_returns_the_records_and_the_winner() -> None:
    result = tuner.tune((4, 4, 8, 16), executor=FakeGpu(), variants=["row_thread"], wants=["dx"])
    assert result.winner in result.records
    assert result.winner is not None and result.winner.config.variant == "row_thread"
    assert set(result.winner.errors) == {"dx"}
    assert result.floor_us > 0
    assert next(iter(result.best_by_variant())) == "row_thread"


def test_names_are_a_list_or_a_text_with_commas() -> None:
    result = tuner.tune("4,4,8,16", executor=FakeGpu(), variants="row_thread", wants="dx, dw", trials=2)
    assert result.winner is not None and set(result.winner.errors) == {"dx", "dw"}
    listed = tuner.configs("4,4,8,16", variants=["row_thread", "row_warp"], wants=["dx", "dw"])
    assert tuner.configs("4,4,8,16", variants="row_thread, row_warp", wants="dx,dw") == listed


def test_an_executor_that_was_opened_for_a_run_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr(tuning, "open_isolated", lambda name, target, store: gpu)
    tuner.tune("4,4,8,16", variants="row_thread", trials=1)
    assert gpu.closed == 1
    tuner.tune("4,4,8,16", variants="row_thread", trials=1, executor=gpu)
    assert gpu.closed == 1


@pytest.mark.parametrize(("options", "error"), [
    ({"shape": "0,4,8,16"}, tuner.InputError), ({"seed": -1}, tuner.InputError), ({"timeout": math.inf}, tuner.InputError),
    ({"timeout": math.nan}, tuner.InputError), ({"shape": "1,1,1000000,1000000"}, tuner.InputError),
    ({"trials": 0}, tuner.InputError), ({"timeout": 0.0}, tuner.InputError),
    ({"eps": -1.0}, tuner.InputError), ({"eps": "1"}, tuner.InputTypeError), ({"dtype": "float8"}, tuner.UnsupportedDtype),
    ({"variants": ["nothing"]}, tuner.InvalidConfig), ({"wants": ["dz"]}, tuner.InvalidProblem),
    ({"target": "sm_1", "executor": "host"}, tuner.InvalidConfig), ({"executor": "abacus"}, tuner.InputError)])
def test_tune_refuses_what_makes_no_sense(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        tuner.tune(**{"shape": "4,4,8,16", "executor": FakeGpu(), **options})


def test_errors_have_roots_and_python_kinds() -> None:
    assert all(issubclass(error, ValueError) for error in (tuner.InputError, tuner.InvalidConfig, tuner.InvalidProblem))
    assert all(issubclass(error, TypeError) for error in (tuner.InputTypeError, tuner.UnsupportedDtype))
    assert issubclass(tuner.NoValidKernel, tuner.TunerError) and issubclass(tuner.InvalidConfig, tuner.CodegenError)
    assert make_config("row_warp") == parse_config("row_warp")
