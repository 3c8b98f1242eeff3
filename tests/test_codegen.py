"""Problems, configs, spaces and rendered text."""

from __future__ import annotations

import re
from itertools import product

import pytest

from codegen.config import Config
from codegen.errors import InvalidConfig, InvalidProblem, UnsupportedDtype
from codegen.limits import TARGETS, target
from codegen.problem import GRADIENTS, Problem, Shape
from codegen.reduction import workspace_limit
from codegen.render import render
from codegen.space import all_configs, make_config, parse_config, valid_configs, why_refused
from codegen.variants import VARIANTS

LIMITS = target("sm_90")
SMALLEST = min((target(name) for name in TARGETS), key=lambda limits: limits.shared_per_block)
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


@pytest.mark.parametrize("name", VARIANTS)
def test_config_strings_round_trip(name: str) -> None:
    for config in list(all_configs([name]))[::17]:
        assert parse_config(str(config)) == config


@pytest.mark.parametrize("text", ["row_wrap", "row_warp:warps", "row_warp:warps=3", "row_warp:size=1",
                                  "row_warp:warps=1,warps=2"])
def test_a_config_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig):
        parse_config(text)


@pytest.mark.parametrize("name", VARIANTS)
def test_defaults_are_choices_and_suit_ordinary_sizes(name: str) -> None:
    problem = Problem.of(Shape.parse("32,16,64,64"))
    assert why_refused(problem, make_config(name), LIMITS) is None


@pytest.mark.parametrize(("text", "deterministic"), list(product(SHAPES, (False, True))))
def test_every_size_has_a_valid_config(text: str, deterministic: bool) -> None:
    problem = Problem.of(Shape.parse(text), deterministic=deterministic)
    configs = valid_configs(problem, SMALLEST)
    assert configs
    assert len(set(configs)) == len(configs)


@pytest.mark.parametrize("text", SHAPES)
def test_valid_configs_keep_their_promises(text: str) -> None:
    problem = Problem.of(Shape.parse(text), deterministic=True)
    for config in valid_configs(problem, LIMITS)[::5]:
        plan = render(problem, config).plan
        assert config["reduction"] != "atomic"
        assert plan.workspace_bytes(problem.rows, 132) <= workspace_limit(problem.rows)
        for launch in plan.launches:
            assert launch.shared_bytes <= LIMITS.shared_per_block
            assert launch.block <= LIMITS.max_threads
            assert launch.grid.evaluate(problem.rows, 132) <= 2**31 - 1
            assert not launch.grid.uses("sms")


def defaults() -> list[Config]:
    return [config for name, variant in VARIANTS.items() for reduction in variant.choices["reduction"]
            if (config := with_reduction(name, str(reduction)))]


def with_reduction(name: str, reduction: str) -> Config:
    splits = 16 if reduction in ("atomic", "two_pass") and (name, reduction) != ("row_thread", "atomic") else 1
    grads = {"grads": "identity"} if reduction == "column_blocks" and "grads" in VARIANTS[name].choices else {}
    return make_config(name, {"reduction": reduction, "splits": splits, **grads})


@pytest.mark.parametrize("config", defaults(), ids=str)
def test_the_text_depends_on_the_row_count_in_no_way(config: Config) -> None:
    one, many = Problem(1, 24, 20), Problem(100_000, 24, 20)
    assert render(one, config).text == render(many, config).text
    assert render(one, config).plan == render(many, config).plan


@pytest.mark.parametrize("config", defaults(), ids=str)
def test_rendered_text_is_plain_tidy_cuda(config: Config) -> None:
    source = render(Problem(16, 8, 16), config)
    text = source.text
    assert "{{" not in text and "{%" not in text
    assert str(config) in text
    assert re.search(r"[ \t]+$", text, re.M) is None
    assert "\n\n\n" not in text
    assert max(len(line) for line in text.splitlines()) <= 132
    outside = re.sub(r"#ifdef __CUDACC__.*?#endif", "", text, flags=re.S)
    assert not re.search(r"\basm\b|__shared__|#include", outside)
    for launch in source.plan.launches:
        assert len(re.findall(rf'extern "C" __global__ .* {launch.kernel}\(const __grid_constant__ Params p\)', text)) == 1
    assert text.count("__global__") == len({launch.kernel for launch in source.plan.launches})


@pytest.mark.parametrize("config", defaults(), ids=str)
def test_unwanted_gradients_are_constants_of_the_text(config: Config) -> None:
    text = render(Problem(16, 8, 16, wants=frozenset({"dx", "db"})), config).text
    for name in GRADIENTS:
        assert f"constexpr bool WANT_{name.upper()} = {'true' if name in ('dx', 'db') else 'false'};" in text


@pytest.mark.parametrize("config", defaults(), ids=str)
def test_golden_sources(config: Config, golden_folder, request: pytest.FixtureRequest) -> None:  # type: ignore[no-untyped-def]
    path = golden_folder / f"{config.variant}-{config['reduction']}.cu"
    text = render(Problem(16, 8, 16), config).text
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text, "the rendered text has changed; look at the change, then run pytest --update-golden"
