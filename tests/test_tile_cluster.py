"""What is tile_cluster's own: the data and the shapes it takes, tiles that blocks share out, and registers."""

from __future__ import annotations

import pytest

from codegen.config import Config
from codegen.limits import TARGETS, target
from codegen.problem import ALL_GRADIENTS, Problem
from codegen.render import render
from codegen.space import make_config, valid_configs, why_not, why_refused
from tests.variant_cases import LIMITS, compiled
from tuner.compare import bound_fault
from tuner.executors.host import HostExecutor
from tuner.inputs import hard_inputs
from tuner.store import Store
from tuner.toolchain import REPORT, find_nvcc
from tuner.validate import Validator

NAME = "tile_cluster"
BF16 = "bfloat16"


def config(**values: int | str) -> Config:
    return make_config(NAME, values)


@pytest.mark.parametrize("arch", TARGETS)
def test_other_gpus_lack_its_instructions(arch: str) -> None:
    reason = why_refused(Problem(512, 64, 256, BF16), config(), target(arch))
    assert reason is None if arch == "sm_90" else reason is not None and "instructions of sm_90a" in reason


@pytest.mark.parametrize(("hidden", "out", "dtype", "values", "says"), [
    (128, 512, "float32", {}, "multiplies 16-bit data, not float32"), (128, 512, "float16", {}, "take arithmetic=fp16"),
    (129, 512, BF16, {}, "rows of up to 128 values of x"), (128, 513, BF16, {}, "rows of up to 512 values of dy"),
    (128, 257, BF16, {"cluster": 1}, "rows of up to 256 values of dy"), (128, 512, BF16, {"stages": 4}, "shared memory"),
    (128, 128, BF16, {}, "take tile_wgmma"), (128, 512, BF16, {"reduction": "single_block"}, "one block for 8192 rows"),
])
def test_what_does_not_fit_is_refused(hidden: int, out: int, dtype: str, values: dict[str, int | str], says: str) -> None:
    reason = why_not(Problem(8192, hidden, out, dtype), config(**values), LIMITS)
    assert reason is not None and says in reason


@pytest.mark.parametrize("out", [129, 256, 257, 512])
@pytest.mark.parametrize("hidden", [64, 128])
def test_there_are_configs_between_one_multiprocessor_and_two(hidden: int, out: int) -> None:
    assert valid_configs(Problem(262144, hidden, out, BF16), LIMITS, [NAME])


@pytest.mark.parametrize("values", [{}, {"cluster": 1}])
def test_its_text_is_tidy(values: dict[str, int]) -> None:
    text = render(Problem(16, 128, 256, BF16), config(**values)).text
    assert max(map(len, text.splitlines())) <= 132
    assert "{{" not in text and "{%" not in text and "\n\n\n" not in text and " \n" not in text


def test_a_grid_is_whole_clusters_of_any_gpu() -> None:
    plan = render(Problem(262144, 128, 512, BF16), config()).plan
    for sms, blocks in ((132, 132), (131, 130), (2, 2)):
        assert plan.launches[0].grid.evaluate(262144, sms) == blocks
        assert plan.splits.evaluate(262144, sms) == blocks // 2
    assert plan.launches[0].grid.evaluate(65, 132) == 4


# Tiles of 64 rows: fewer than the ring has places, an odd and an even number, the last of them whole and not.
@pytest.mark.parametrize(("rows", "hidden", "out", "dtype", "values"), [
    (1, 128, 512, BF16, {}), (100, 128, 512, "float16", {}), (192, 128, 512, BF16, {"prefetch": 2}), (1000, 128, 512, BF16, {}),
    (1050, 128, 512, BF16, {"stages": 2}), (700, 101, 301, BF16, {"prefetch": 0}), (640, 64, 512, BF16, {"stages": 5}),
    (700, 128, 256, BF16, {"cluster": 1}), (700, 64, 200, "float16", {"cluster": 1, "stages": 4}),
    (700, 40, 130, BF16, {"stages": 6}),
])
def test_many_tiles_in_one_cluster(rows: int, hidden: int, out: int, dtype: str, values: dict[str, int | str],
                                   host_executor: HostExecutor) -> None:
    """In any order of blocks and threads: the same bits, and right on hard rows."""
    arithmetic = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    chosen = config(reduction="single_block", arithmetic=arithmetic, **values)
    problem = Problem(rows, hidden, out, dtype)
    assert why_refused(problem, chosen, LIMITS) is None
    inputs = hard_inputs(rows, hidden, out, dtype=dtype)
    program = compiled(host_executor, problem, chosen)
    bits = set()
    for order in ("forward", "reverse", "shuffled:1"):
        got = program.run(inputs, ALL_GRADIENTS, order=order)  # type: ignore[call-arg]
        assert bound_fault(inputs, got, ALL_GRADIENTS, problem.accuracy) is None
        bits.add(b"".join(array.tobytes() for array in got.present().values()))
    assert len(bits) == 1


@pytest.mark.parametrize(("out", "values"), [(512, {}), (256, {"cluster": 1})])
def test_the_whole_validator_accepts_it(out: int, values: dict[str, int], host_executor: HostExecutor) -> None:
    problem = Problem(130, 128, out, BF16)
    program = compiled(host_executor, problem, config(**values))
    for run in (program.run, *program.variations.values()):
        verdict = Validator(problem).validate(run)
        assert verdict.ok, verdict.reason


@pytest.mark.parametrize(("hidden", "out", "values"), [
    (128, 512, {}), (128, 256, {"stages": 4}), (128, 256, {"cluster": 1}), (64, 512, {"stages": 4}),
])
def test_tiles_keep_to_their_registers(hidden: int, out: int, values: dict[str, int | str], store: Store) -> None:
    """No sum goes to memory, and the compiler neither ignores what warpgroups hand over nor makes products wait."""
    problem = Problem(262144, hidden, out, BF16)
    assert why_refused(problem, config(**values), LIMITS) is None
    binary = find_nvcc("sm_90a").compile(render(problem, config(**values)).text, "sm_90a", store)
    report = binary.reports[NAME]
    assert report.spill_bytes == report.stack_bytes == 0
    assert "C75" not in (binary.cubin.parent / REPORT).read_text()
