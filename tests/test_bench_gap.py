"""What is known of the time between a kernel and its floor."""

from __future__ import annotations

from codegen.limits import target
from codegen.problem import Problem
from codegen.space import make_config
from tuner.bench.floors import Floor, Rates
from tuner.bench.gap import known_gap

RATES = Rates(copy_tbps=4.0, launch_us=1.0, matrix_tflops=800.0)
LIMITS = target("sm_90")


def gap(problem: Problem, ours_us: float, variant: str, rates: Rates = RATES, **values: int | str) -> str:
    return known_gap(problem, make_config(variant, values), LIMITS, Floor.of(problem, rates), rates, ours_us)


def test_launches_beyond_the_first() -> None:
    assert gap(Problem(16, 8, 16), 3.0, "row_warp", reduction="two_pass") == "1 more launch, 1.00 of 2.00 us"


def test_one_launch_explains_nothing() -> None:
    assert gap(Problem(16, 8, 16), 3.0, "row_shared", reduction="single_block") == ""


def test_nothing_is_said_near_the_floor() -> None:
    assert gap(Problem(16, 8, 16), 1.04, "row_warp", reduction="two_pass") == ""


def test_what_explains_little_is_not_named() -> None:
    assert gap(Problem(16, 8, 16), 30.0, "row_warp", reduction="two_pass") == ""


def test_products_of_parts() -> None:
    problem = Problem(8192, 4096, 12288)
    floor = 4 * 8192 * 4096 * 12288 / 800e6
    text = gap(problem, 4 * floor, "gemm_mma", arithmetic="fp16x3", split="loop")
    assert text == f"3 16-bit products for one of fp16x3, {2 * floor:.2f} of {3 * floor:.2f} us"


def test_a_part_is_never_more_than_the_gap() -> None:
    problem = Problem(8192, 4096, 12288)
    floor = 4 * 8192 * 4096 * 12288 / 800e6
    text = gap(problem, 2 * floor, "gemm_mma", arithmetic="fp16x3", split="loop")
    assert text.endswith(f"{floor:.2f} of {floor:.2f} us")


def test_without_a_rate_of_products_they_are_not_known() -> None:
    text = gap(Problem(8192, 4096, 12288), 1e5, "gemm_mma", Rates(4.0, 1.0, None), arithmetic="fp16x3", split="loop")
    assert "16-bit" not in text


def test_workspace_beyond_the_cache() -> None:
    problem = Problem(262144, 128, 512)
    text = gap(problem, 1200.0, "gemm_mma", Rates(4.0, 1.0, None), arithmetic="fp16x3", split="first")
    assert "MB of workspace, " in text and text.endswith(f"of {1200 - Floor.of(problem, RATES).bytes_us:.2f} us")
