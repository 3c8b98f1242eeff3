"""gemm_wgmma with cluster=2: pairs of blocks that share the copies of an operand."""

from __future__ import annotations

from typing import cast

import pytest

from codegen import variants
from codegen.config import Config
from codegen.problem import ALL_GRADIENTS, Problem
from codegen.render import render
from codegen.space import make_config, parse_config, valid_configs, why_not, why_refused
from tests.variant_cases import LIMITS, accuracy_of, assert_right, compiled
from tuner.compare import bound_fault
from tuner.costmodel import predict
from tuner.executors.host import HostExecutor, HostProgram
from tuner.guess import best_predicted
from tuner.inputs import random_inputs
from tuner.store import Store
from tuner.toolchain import REPORT, find_nvcc
from tuner.validate import Validator

NAME = "gemm_wgmma"
SMALL: dict[str, int | str] = {"tile": "64x64", "groups": 1}
HALVES: dict[str, int | str] = {"split": "none", "arithmetic": "bf16", "promote": 0}
GPT2, GPT3 = Problem(8192, 768, 2304, "bfloat16"), Problem(8192, 4096, 12288, "bfloat16")


def config(*given: dict[str, int | str], **values: int | str) -> Config:
    merged: dict[str, int | str] = {"cluster": 2}
    for one in (*given, values):
        merged |= one
    return make_config(NAME, merged)


def alone(pairs: Config) -> Config:
    """The same for blocks that share nothing."""
    return make_config(NAME, {**pairs.as_dict(), "cluster": 1})


@pytest.mark.parametrize(("pairs", "dtype", "shape"), [
    (config(HALVES, SMALL, stages=3, finish="rounded"), "bfloat16", (300, 64, 180)),
    (config(HALVES, SMALL, stages=4, finish="rounded", halved=8), "bfloat16", (700, 64, 130)),
    (config(HALVES, SMALL, stages=6, parts=16), "bfloat16", (1100, 250, 60)),
    (config(HALVES, tile="128x128", stages=2, finish="epilogue", parts=3), "bfloat16", (300, 128, 136)),
    (config(HALVES, tile="128x256", stages=3, finish="wide", arithmetic="fp16", reduction="direct", parts=1), "float16",
     (300, 264, 136)),
    (config(SMALL, stages=4, parts=8), "float32", (520, 300, 130)),
    (config(tile="128x64", depth=32, stages=3, promote=128, parts=3), "float32", (300, 60, 136))],
    ids=["odd rows", "halves", "several pairs", "whole rows", "wide ends", "float32, several pairs", "promoted"])
def test_pairs_compute_what_blocks_do_alone(pairs: Config, dtype: str, shape: tuple[int, int, int],
                                            host_executor: HostExecutor) -> None:
    """The same bits in any order of blocks and threads. In most cases one of the blocks has no tile in the last pair."""
    inputs = random_inputs(*shape, dtype=dtype, param_dtype=dtype)
    problem = Problem(*shape, dtype, accuracy=accuracy_of(pairs, dtype))
    bits = set()
    for chosen, orders in ((pairs, ("forward", "shuffled:1")), (alone(pairs), ("forward",))):
        assert why_refused(problem, chosen, LIMITS) is None
        program = cast(HostProgram, compiled(host_executor, problem, chosen))
        for order in orders:
            got = program.run(inputs, ALL_GRADIENTS, layout="end" if order == "forward" else "shifted", order=order)
            assert bound_fault(inputs, got, ALL_GRADIENTS, problem.accuracy) is None
            bits.add(b"".join(array.tobytes() for array in got.present().values()))
    assert len(bits) == 1


def test_a_block_without_a_tile_adds_nothing(host_executor: HostExecutor) -> None:
    """Sums in place would have its part twice."""
    assert_right(host_executor, config(SMALL, stages=2, reduction="atomic"), random_inputs(200, 100, 150))


@pytest.mark.parametrize("wants", [{"dx"}, {"dbeta"}, {"dgamma", "db"}], ids=lambda wants: "+".join(sorted(wants)))
def test_pairs_without_some_gradients(wants: set[str], host_executor: HostExecutor) -> None:
    inputs = random_inputs(200, 128, 136, dtype="bfloat16", param_dtype="bfloat16")
    assert_right(host_executor, config(HALVES, SMALL, stages=3, parts=3), inputs, frozenset(wants))


def test_the_whole_validator_accepts_pairs(host_executor: HostExecutor) -> None:
    problem = Problem(130, 72, 136, "bfloat16")
    program = compiled(host_executor, problem, config(HALVES, SMALL, finish="rounded"))
    for run in (program.run, *program.variations.values()):
        verdict = Validator(problem).validate(run)
        assert verdict.ok, verdict.reason


@pytest.mark.parametrize("rows", [1, 64, 65, 8192])
def test_a_grid_is_whole_pairs(rows: int) -> None:
    launch = next(launch for launch in render(Problem(rows, 64, 64), config(SMALL)).plan.launches if launch.kernel == NAME)
    blocks = launch.grid.evaluate(rows, 132)
    assert blocks % 2 == 0 and 2 <= blocks <= 132


def test_pairs_keep_no_pace() -> None:
    """Where tiles of G and dn would be in step their order is that of pairs; fragments have no other."""
    problem = Problem(262144, 128, 512, "bfloat16")
    values: dict[str, int | str] = {"stages": 6, "parts": 16, "finish": "epilogue", "group": 4}
    assert "PACE" in render(problem, alone(config(HALVES, values))).text
    assert "PACE" not in render(problem, config(HALVES, values)).text
    reason = why_refused(problem, config(HALVES, values, split="fragments"), LIMITS)
    assert reason is not None and "take cluster=1" in reason


def test_texts_name_pairs_alone() -> None:
    """What is known of a config from before there were pairs is still known."""
    assert "cluster" not in str(make_config(NAME)) and str(config()).endswith(",cluster=2")
    for chosen in (make_config(NAME), config()):
        assert parse_config(str(chosen)) == chosen
    before = "gemm_wgmma:split=none,arithmetic=bf16,promote=0,halved=8"
    assert parse_config(before) == parse_config(f"{before},cluster=1")
    assert "CLUSTER" not in render(GPT2, parse_config(before)).text


def test_no_search_takes_what_no_gpu_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {chosen["cluster"] for chosen in valid_configs(GPT2, LIMITS, [NAME])} == {1, 2}
    monkeypatch.setattr(variants, "UNTRIED_VALUES", {(NAME, "cluster"): (2,)})
    configs = valid_configs(GPT2, LIMITS, [NAME])
    assert configs and {chosen["cluster"] for chosen in configs} == {1}
    assert best_predicted.__wrapped__(GPT2, LIMITS).as_dict().get("cluster", 1) == 1
    assert why_not(GPT2, config(HALVES, tile="128x192", stages=5, reduction="direct", parts=1, halved=8), LIMITS) is None


def test_less_is_read_of_l2() -> None:
    pairs = config(HALVES, tile="128x256", stages=4, finish="rounded", reduction="direct", parts=1)
    assert predict(GPT3, pairs, LIMITS).time_us < predict(GPT3, alone(pairs), LIMITS).time_us


@pytest.mark.parametrize(("problem", "pairs"), [
    (GPT3, config(HALVES, tile="128x256", stages=4, finish="rounded", halved=8, reduction="direct", parts=1)),
    (Problem(8192, 4096, 12288), config(reduction="direct", parts=1))], ids=["bfloat16", "float32"])
def test_pairs_keep_to_their_registers(problem: Problem, pairs: Config, store: Store) -> None:
    """No sum goes to memory, and the compiler neither ignores what warpgroups hand over nor makes products wait."""
    assert why_refused(problem, pairs, LIMITS) is None
    binary = find_nvcc("sm_90a").compile(render(problem, pairs).text, "sm_90a", store)
    assert binary.reports[NAME].spill_bytes == binary.reports[NAME].stack_bytes == 0
    assert "C75" not in (binary.cubin.parent / REPORT).read_text()


@pytest.mark.parametrize("pairs", [config(), config(HALVES, finish="rounded", halved=8)], ids=["float32", "bfloat16"])
def test_their_text_is_tidy(pairs: Config) -> None:
    text = render(GPT2 if pairs["split"] == "none" else Problem(16, 100, 60), pairs).text
    assert "{{" not in text and "{%" not in text and "\n\n\n" not in text and " \n" not in text
