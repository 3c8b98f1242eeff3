"""The Python interface: `tuner.backward`, `tuner.configs`, `tuner.tune`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tuner
import tuner.entry as entry
from codegen.problem import GRADIENTS, Shape
from codegen.space import make_config, parse_config
from tests import cases
from tests.fake_gpu import FakeGpu, rugged
from tuner.compare import bound_fault
from tuner.executors import Executor
from tuner.inputs import Array32, Gradients, Inputs, random_inputs

ROWS, HIDDEN, OUT = 6, 8, 5


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


def test_a_runs_winner_is_what_backward_takes(data: Inputs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LNL_WISDOM", str(tmp_path / "wisdom"))
    gpu = FakeGpu()
    call(data, gpu)
    guess = gpu.compiled[0]
    gpu.times = lambda config: rugged(config) * (2 if config == guess else 1)
    won = tuner.tune((1, ROWS, HIDDEN, OUT), executor=gpu, trials=20).winner
    assert won is not None and won.config != guess
    gpu.compiled.clear()
    call(data, gpu)
    assert gpu.compiled == [won.config]


def test_a_run_of_some_variants_only_decides_nothing(data: Inputs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LNL_WISDOM", str(tmp_path / "wisdom"))
    tuner.tune((1, ROWS, HIDDEN, OUT), executor=FakeGpu(), variants="row_thread")
    assert not (tmp_path / "wisdom").exists()


def test_programs_are_kept_between_calls(data: Inputs) -> None:
    gpu = FakeGpu()
    for rows in (5, 6, 7, 8):
        more = random_inputs(rows, HIDDEN, OUT)
        tuner.backward(more.dy, more.x, more.gamma, more.beta, more.w, executor=gpu)
    assert len(gpu.compiled) == len(set(gpu.compiled))


# --- configs and tune --------------------------------------------------------------------------------------------------------


def test_configs_round_trip() -> None:
    found = tuner.configs("4,4,8,16")
    assert len(found) == len(set(found)) > 100
    few = tuner.configs("4,4,8,16", variants=["row_warp", "row_shared"])
    assert few == tuner.configs((4, 4, 8, 16), variants=["row_warp", "row_shared"])
    assert few == tuner.configs(Shape(4, 4, 8, 16), variants=("row_warp", "row_shared")) == [
        config for config in found if config.variant in ("row_warp", "row_shared")]
    assert all(parse_config(str(config)) == config for config in found)
    assert {config.variant for config in tuner.configs("4,4,8,16", variants=["row_warp"])} == {"row_warp"}
    assert all(config["reduction"] != "atomic" for config in tuner.configs(
        "4,4,8,16", variants=["row_warp", "row_shared"], deterministic=True))


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
    monkeypatch.setattr(entry, "open_isolated", lambda name, target, store: gpu)
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


@pytest.mark.parametrize(("options", "said"), [
    ({"config": 3}, "config must be a text, not 3 (int)"), ({"config": b"row_warp"}, "config must be a text"),
    ({"wants": 3}, "names are a list"), ({"wants": [3]}, "names are a list"), ({"wants": ["dx", None]}, "names are a list"),
    ({"executor": 3}, "executor must be one of auto, cuda, host"), ({"executor": FakeGpu}, "executor must be one of"),
    ({"eps": "1"}, "eps must be a number")], ids=str)
def test_backward_says_which_argument_has_the_wrong_type(data: Inputs, options: dict[str, Any], said: str) -> None:
    given = {"executor": FakeGpu(), **options}
    with pytest.raises(tuner.InputTypeError, match="^" + re.escape(said)) as caught:
        tuner.backward(data.dy, data.x, data.gamma, data.beta, data.w, **given)
    assert "\n" not in str(caught.value)


def test_a_config_put_together_by_hand_is_looked_at(data: Inputs, executor: Executor) -> None:
    for variant, params in (("row_wrap", ()), ("row_warp", (("warps", 3),)), ("row_warp", (("x", 1),))):
        with pytest.raises(tuner.InvalidConfig):
            call(data, executor, config=tuner.Config(variant, params))
    assert same(call(data, executor, config=tuner.Config("row_thread", ())), call(data, executor, config="row_thread"))


@pytest.mark.parametrize("options", [
    {"shape": None}, {"shape": 4}, {"trials": 1.5}, {"trials": "3"}, {"trials": True}, {"timeout": "3"}, {"timeout": True},
    {"seed": 1.0}, {"seed": None}, {"variants": 3}, {"variants": [1]}, {"wants": 3}, {"dtype": 3}, {"dtype": None},
    {"dtype": np.float64}, {"dtype": dict}, {"param_dtype": 3}, {"accuracy": 3}, {"accuracy": None}, {"deterministic": "no"},
    {"deterministic": None}, {"executor": 3}, {"executor": None}, {"target": None}, {"eps": None}], ids=str)
def test_tune_says_which_argument_has_the_wrong_type(options: dict[str, Any]) -> None:
    for function in (tuner.tune, tuner.configs):
        if set(options) & {"trials", "timeout", "seed", "executor", "eps"} and function is tuner.configs:
            continue
        fixed = {"executor": FakeGpu()} if function is tuner.tune else {}
        with pytest.raises(TypeError) as caught:
            function(**{"shape": "4,4,8,16", **fixed, **options})
        assert isinstance(caught.value, tuner.InputTypeError | tuner.UnsupportedDtype)
        assert "\n" not in str(caught.value) and len(str(caught.value)) > 20


def test_numbers_and_types_of_numpy_are_as_good_as_python_s() -> None:
    some = {"variants": ("row_thread", "row_warp")}
    assert tuner.configs(np.array([4, 4, 8, 16]), dtype=np.float16, **some) == tuner.configs("4,4,8,16", dtype="float16", **some)
    assert tuner.configs("4,4,8,16", dtype=ml_dtypes.bfloat16, param_dtype=np.float32, **some) == tuner.configs(
        "4,4,8,16", dtype=np.dtype("bfloat16"), param_dtype="float32", deterministic=np.bool_(False), **some)
    result = tuner.tune("4,4,8,16", executor=FakeGpu(), variants="row_thread", dtype=np.float32, trials=np.int64(2),
                        seed=np.int32(1), timeout=np.float32(100))
    assert result.winner is not None and len(result.records) == result.info.trials == 2
    json.dumps(result.info.as_json())
