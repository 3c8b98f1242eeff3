"""Problems, configs, spaces and rendered text."""

from __future__ import annotations

import random
import re
import struct
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import codegen.__main__ as codegen_cli
from codegen.config import Config
from codegen.errors import InvalidConfig, InvalidProblem, UnsupportedDtype
from codegen.expr import ROWS, const
from codegen.limits import TARGETS, target
from codegen.params import declaration, pack, pointer_fields, short_types
from codegen.plan import Buffer, Fill, Launch, Plan
from codegen.problem import GRADIENTS, Problem, Shape
from codegen.reduction import workspace_limit
from codegen.render import render
from codegen.space import make_config, parse_config, valid_configs, why_inexact, why_refused
from codegen.variants import VARIANTS
from tests import cases
from tests.configs import ALWAYS_FIT, every_reduction, first_dtype

LIMITS = target("sm_90")
SMALLEST = min((target(name) for name in TARGETS), key=lambda limits: limits.shared_per_block)
ORDINARY = ("32,16,64,64", "8,128,768,2304", "1,1,1024,1024")
SHAPES = ("4,4,8,16", "32,16,64,64", "2,71,229,33", "1,2,1,1", "8,1024,768,2304", "1,3,100003,2", "1,4,8,70000",
          "4,2048,4096,12288", "1,262144,128,512", "1,10000000,64,64", "0,4,8,16")


@pytest.mark.parametrize("text", ["", "4,4,8", "4,4,8,16,1", "4,4,8,a", "4,4,-8,16", "4,4,0,16", "4,4,8,0", "4.0,4,8,16"])
def test_a_shape_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidProblem):
        Shape.parse(text)


def test_a_shape_round_trips() -> None:
    assert Shape.parse("4,4,8,16") == Shape(4, 4, 8, 16) == Shape.parse(str(Shape(4, 4, 8, 16)))
    assert Shape(4, 4, 8, 16).slug == "4x4x8x16"


def test_a_problem_says_what_is_wrong_with_it() -> None:
    with pytest.raises(UnsupportedDtype, match="float64"):
        Problem(16, 8, 16, dtype="float64")
    with pytest.raises(InvalidProblem, match="dz"):
        Problem(16, 8, 16, wants=frozenset({"dx", "dz"}))
    with pytest.raises(InvalidProblem, match="no gradient"):
        Problem(16, 8, 16, wants=frozenset())


def test_launches_overlap_where_the_gpu_lets_them() -> None:
    config = make_config("weight_ahead", {"launches": "overlapped"})
    refused = {name: why_refused(Problem(4, 768, 2304), config, target(name)) for name in TARGETS}
    assert refused["sm_80"] is not None and "capability 9.0" in refused["sm_80"]
    assert [name for name, reason in refused.items() if reason] == ["sm_80"]
    assert [launch.overlaps for launch in render(Problem(4, 768, 2304), config).plan.launches] == [False, True]


def test_the_first_launch_of_a_plan_overlaps_with_none() -> None:
    with pytest.raises(ValueError, match="kernel overlaps with no launch"):
        Plan((Fill(("dw",)), Launch("kernel", const(1), 32, overlaps=True)))


@pytest.mark.parametrize("name", VARIANTS)
def test_config_strings_round_trip(name: str) -> None:
    rng = random.Random(0)
    for _ in range(1000):
        config = make_config(name, {key: rng.choice(values) for key, values in VARIANTS[name].choices.items()})
        assert parse_config(str(config)) == config


@pytest.mark.parametrize("text", ["row_wrap", "row_warp:warps", "row_warp:warps=3", "row_warp:size=1",
                                  "row_warp:warps=1,warps=2"])
def test_a_config_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig):
        parse_config(text)


@pytest.mark.parametrize("name", VARIANTS)
def test_defaults_are_choices_and_suit_ordinary_sizes(name: str) -> None:
    problems = [Problem.of(Shape.parse(text), dtype=first_dtype(name)) for text in ORDINARY]
    reasons = [why_refused(problem, make_config(name), LIMITS) for problem in problems]
    assert None in reasons, reasons


@pytest.mark.parametrize(("text", "deterministic"), list(product(SHAPES, (False, True))))
def test_every_size_has_a_valid_config(text: str, deterministic: bool) -> None:
    problem = Problem.of(Shape.parse(text), deterministic=deterministic)
    assert valid_configs(problem, SMALLEST, ALWAYS_FIT)


@pytest.mark.parametrize("text", SHAPES)
def test_valid_configs_keep_their_promises(text: str) -> None:
    problem = Problem.of(Shape.parse(text), deterministic=True)
    configs = valid_configs(problem, LIMITS)
    assert len(set(configs)) == len(configs)
    for config in configs[::5]:
        plan = VARIANTS[config.variant].plan(problem, config.as_dict())
        assert config["reduction"] != "atomic"
        assert plan.workspace_bytes(problem.rows, 132) <= workspace_limit(problem)
        for launch in plan.launches:
            assert launch.shared_bytes <= LIMITS.shared_per_block
            assert launch.block <= LIMITS.max_threads
            assert launch.grid.evaluate(problem.rows, 132) <= 2**31 - 1
            assert not launch.grid.uses("sms")


SMALL = Problem(16, 8, 16)
EVERY = every_reduction(SMALL, LIMITS)
IN_LOOP = make_config(
    "gemm_mma", {"split": "loop", "tile": "64x64", "warps": "2x2", "depth": 32, "stages": 2, "finish": "epilogue"})
WHOLE = [make_config("gemm_mma", {**IN_LOOP.as_dict(), "arithmetic": arithmetic, "depth": depth, "finish": "second"})
         for arithmetic, depth in (("tf32x3", 32), ("tf32", 64), ("ffma", 16))]
IN_FRAGMENTS = make_config("gemm_mma", {"split": "fragments", "tile": "64x64", "warps": "4x2", "finish": "epilogue"})


@pytest.mark.parametrize("config", EVERY, ids=str)
def test_the_text_depends_on_the_row_count_in_no_way(config: Config) -> None:
    one, many = Problem(1, 24, 16), Problem(100_000, 24, 16)
    assert render(one, config).text == render(many, config).text
    assert render(one, config).plan == render(many, config).plan


@pytest.mark.parametrize("config", [*EVERY, IN_LOOP, IN_FRAGMENTS, *WHOLE], ids=str)
def test_rendered_text_is_plain_tidy_cuda(config: Config) -> None:
    source = render(Problem(16, 8, 16), config)
    text = source.text
    assert "{{" not in text and "{%" not in text
    assert str(config) in text
    assert re.search(r"[ \t]+$", text, re.M) is None
    assert "\n\n\n" not in text
    assert max(len(line) for line in text.splitlines() if str(config) not in line) <= 132
    outside = re.sub(r"#ifdef __CUDACC__.*?#endif", "", text, flags=re.S)
    assert not re.search(r"\basm\b|__shared__|#include", outside)
    for launch in source.plan.launches:
        assert len(re.findall(rf'extern "C" __global__ .* {launch.kernel}\(const __grid_constant__ Params p\)', text)) == 1
    assert text.count("__global__") == len({launch.kernel for launch in source.plan.launches})


@pytest.mark.parametrize("config", EVERY, ids=str)
def test_unwanted_gradients_are_constants_of_the_text(config: Config) -> None:
    text = render(Problem(16, 8, 16, wants=frozenset({"dx", "db"})), config).text
    for name in GRADIENTS:
        assert f"constexpr bool WANT_{name.upper()} = {'true' if name in ('dx', 'db') else 'false'};" in text


# --- data types ---------------------------------------------------------------------------------------------------


def test_params_are_typed() -> None:
    plan = Plan((), (Buffer("sums", ROWS), Buffer("planes", ROWS * 8, "bfloat16"), Buffer("halves", const(1), "float16"),
                     Buffer("flags", const(3), "uint8"), Buffer("count", const(1), "int32")))
    fields = re.findall(r"^  ((?:const )?\w+ \w+|(?:const )?[\w ]+\*) ?(\w+)?;", declaration(plan), re.M)
    types = {name: kind for kind, name in fields if name}
    assert types == {
        **dict.fromkeys(("dy", "x"), "const data_t*"), "dx": "data_t*",
        **dict.fromkeys(("gamma", "beta", "w"), "const param_t*"),
        **dict.fromkeys(("dgamma", "dbeta", "dw", "db"), "param_t*"), **dict.fromkeys(("mean", "rstd"), "const float*"),
        "sums": "float*", "planes": "bfloat16_t*", "halves": "float16_t*", "flags": "unsigned char*", "count": "int*"}
    assert short_types(SMALL, plan) == ("bfloat16", "float16")
    assert short_types(SMALL, Plan(())) == ()
    assert short_types(replace(SMALL, dtype="float16", param_dtype="float32", accuracy=""), Plan(())) == ("float16",)


def test_params_are_packed_in_the_order_of_the_declaration() -> None:
    plan = Plan((), (Buffer("planes", ROWS, "bfloat16"),))
    addresses = {name: 256 * (index + 1) for index, name in enumerate(pointer_fields(plan))}
    packed = pack(plan, {**addresses, "rows": 2**40, "eps": 0.5, "splits": 7})
    assert struct.unpack("<13Qqfi", packed) == (*addresses.values(), 2**40, 0.5, 7)
    declared = re.findall(r"\* (\w+);", declaration(plan))
    assert declared == list(addresses)
    assert struct.unpack("<13Q", pack(plan, {"rows": 0, "eps": 0.0, "splits": 0})[:104]) == (0,) * 13


def test_scratch_memory_is_counted_in_the_sizes_of_its_elements() -> None:
    for dtype, size in (("float32", 4), ("bfloat16", 2), ("float16", 2), ("uint8", 1), ("int32", 4)):
        buffer = Buffer("buffer", ROWS * 256, dtype)
        assert buffer.bytes(3, 1) == 768 * size
        assert Plan((), (buffer, replace(buffer, size=const(1)))).workspace_bytes(3, 1) == 768 * size + 256


@pytest.mark.parametrize(("dtype", "param_dtype", "read"), [
    ("float32", "float32", 100 * (8 + 16) * 4 + 8 * 16 * 4), ("bfloat16", "float32", 100 * (8 + 16) * 2 + 8 * 16 * 4),
    ("float16", "float16", 100 * (8 + 16) * 2 + 8 * 16 * 2)])
def test_the_workspace_limit_follows_the_bytes_of_the_inputs(dtype: str, param_dtype: str, read: int) -> None:
    problem = Problem(100, 8, 16, dtype=dtype, param_dtype=param_dtype)
    assert workspace_limit(problem) == (64 << 20) + 1600 + 3 * read


@pytest.mark.parametrize(("dtype", "param_dtype"), cases.DATA_TYPES)
def test_atomic_sums_are_refused_where_parameter_gradients_have_16_bits(dtype: str, param_dtype: str) -> None:
    problem = Problem(16, 8, 16, dtype=dtype, param_dtype=param_dtype)
    reason = why_refused(problem, parse_config("row_thread:reduction=atomic"), LIMITS)
    assert reason is None if param_dtype == "float32" else f"atomic additions to {param_dtype}" in (reason or "")
    found = any(config["reduction"] == "atomic" for config in every_reduction(problem, LIMITS))
    assert found == (param_dtype == "float32")


def test_coarser_classes_allow_longer_chains() -> None:
    config = parse_config("row_thread:reduction=atomic")
    for accuracy, length in (("fp32", 4096), ("tf32", 1 << 20), ("bf16", 1 << 20)):
        assert why_inexact(Problem(length, 8, 16, accuracy=accuracy), config) is None
        assert f"class {accuracy}" in (why_inexact(Problem(length + 1, 8, 16, accuracy=accuracy), config) or "")


@pytest.mark.parametrize(("dtype", "param_dtype"), cases.DATA_TYPES)
def test_the_text_names_the_data_types_and_declares_those_it_uses(dtype: str, param_dtype: str) -> None:
    problem = Problem(16, 8, 16, dtype=dtype, param_dtype=param_dtype)
    words = dtype if dtype == param_dtype else f"{dtype} with float32 parameters"
    names = {"float32": "float", "bfloat16": "bfloat16_t", "float16": "float16_t"}
    for config in every_reduction(problem, LIMITS):
        source = render(problem, config)
        assert f"y = Linear(LayerNorm(x)), {words}, for rows" in source.text
        assert f"using data_t = {names[dtype]};" in source.text and f"using param_t = {names[param_dtype]};" in source.text
        used = {dtype, param_dtype, *(buffer.dtype for buffer in source.plan.workspace)} & {"bfloat16", "float16"}
        assert set(re.findall(r"^struct (b?float16_t) {", source.text, re.M)) == {names[name] for name in used}


@pytest.mark.parametrize(("text", "types"), list(product(SHAPES, cases.DATA_TYPES[1:])))
def test_every_size_has_a_valid_config_in_every_data_type(text: str, types: tuple[str, str]) -> None:
    problem = Problem.of(Shape.parse(text), dtype=types[0], param_dtype=types[1])
    for name in ("row_thread", "row_warp"):
        assert valid_configs(problem, SMALLEST, [name])


def test_the_command_line_takes_data_types_and_a_class(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--variant", "row_warp", "--shape", "4,4,8,16", "--set", "reduction=two_pass", "--dtype", "bfloat16"]
    mixed = ["--param-dtype", "float32", "--accuracy", "bf16"]
    for more, words in (([], "bfloat16,"), (mixed, "bfloat16 with float32 parameters,")):
        assert codegen_cli.main([*asked, *more]) == 0
        assert f"LayerNorm(x)), {words} for rows" in capsys.readouterr().out
    for wrong, said in ((["--param-dtype", "float16"], "use bfloat16 or float32"), (["--accuracy", "fp32"], "ask for bf16"),
                        (["--accuracy", "fp64"], "choose from fp32, tf32")):
        assert codegen_cli.main([*asked, *wrong]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(("rows", "parts", "promote", "exact"), [
    (4096 * 64, 1, 64, True), (4096 * 64 + 1, 1, 64, False), (4096 * 64 + 1, 2, 64, True),
    (1 << 25, 64, 64, False), (1 << 25, 128, 64, True)])
def test_gemm_mma_adds_no_long_chains(rows: int, parts: int, promote: int, exact: bool) -> None:
    config = make_config("gemm_mma", {"parts": parts, "reduction": "direct" if parts == 1 else "two_pass", "promote": promote})
    reason = why_inexact(Problem(rows, 64, 64), config)
    assert reason is None if exact else reason is not None and "in one float32 chain" in reason


def test_many_rows_have_configs_of_gemm_mma() -> None:
    assert valid_configs(Problem(1 << 25, 64, 64), LIMITS, ["gemm_mma"])


# --- golden sources -----------------------------------------------------------------------------------------------


def golden() -> list[tuple[str, Config, Problem]]:
    """File name, config and problem: every reduction in float32, and one of each variant in 16 bits."""
    found = [(f"{config.variant}-{config['reduction']}", config, SMALL) for config in EVERY]
    found.append(("gemm_mma-two_pass-loop-epilogue", IN_LOOP, SMALL))
    found += [(f"gemm_mma-two_pass-{config['arithmetic']}", config, SMALL) for config in WHOLE if config["arithmetic"] != "tf32"]
    found.append(("gemm_mma-two_pass-fragments-epilogue", IN_FRAGMENTS, SMALL))
    for dtype, param_dtype in (("bfloat16", "bfloat16"), ("float16", "float32")):
        problem = Problem(16, 8, 16, dtype=dtype, param_dtype=param_dtype)
        found += [(f"{config.variant}-{config['reduction']}-{dtype}-{param_dtype}", config, problem)
                  for config in every_reduction(problem, LIMITS) if config["reduction"] == "two_pass"]
    return found


@pytest.mark.parametrize(("name", "config", "problem"), golden(), ids=[name for name, *_ in golden()])
def test_golden_sources(name: str, config: Config, problem: Problem, golden_folder: Path, request: pytest.FixtureRequest) -> None:
    path = golden_folder / f"{name}.cu"
    text = render(problem, config).text
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text, "the rendered text has changed; look at the change, then run pytest --update-golden"
