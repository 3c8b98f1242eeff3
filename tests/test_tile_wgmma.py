"""What is tile_wgmma's own: the GPU and the shapes it takes, teams that take tiles in turn, and registers."""

from __future__ import annotations

import pytest

from codegen.config import Config
from codegen.limits import TARGETS, target
from codegen.problem import ALL_GRADIENTS, Problem
from codegen.render import render
from codegen.space import make_config, why_refused
from tests.variant_cases import LIMITS, accuracy_of, compiled
from tuner.compare import bound_fault
from tuner.executors.host import HostExecutor
from tuner.inputs import hard_inputs
from tuner.store import Store
from tuner.toolchain import REPORT, find_nvcc

NAME = "tile_wgmma"


def config(**values: int | str) -> Config:
    return make_config(NAME, values)


@pytest.mark.parametrize("arch", TARGETS)
def test_other_gpus_lack_its_instructions(arch: str) -> None:
    reason = why_refused(Problem(512, 64, 64), config(), target(arch))
    assert reason is None if arch == "sm_90" else reason is not None and "instructions of sm_90a" in reason


@pytest.mark.parametrize(("hidden", "out", "values", "says"), [
    (129, 64, {}, "rows of up to 128 values"), (64, 129, {}, "rows of up to 128 values"),
    (128, 128, {"stages": 3}, "shared memory"), (64, 64, {"stages": 2, "teams": 2}, "2 stages hold no tile more"),
    (128, 128, {"stages": 3, "teams": 2, "arithmetic": "bf16"}, "too few registers"),
])
def test_what_does_not_fit_is_refused(hidden: int, out: int, values: dict[str, int | str], says: str) -> None:
    dtype = "bfloat16" if "arithmetic" in values else "float32"
    reason = why_refused(Problem(512, hidden, out, dtype), config(**values), LIMITS)
    assert reason is not None and says in reason


HALF = "bfloat16"


@pytest.mark.parametrize(("chosen", "hidden", "out", "dtype"), [
    (config(teams=2, stages=3), 64, 64, "float32"), (config(teams=1, stages=2), 128, 128, "float32"),
    (config(teams=1, stages=3), 72, 64, "float32"), (config(teams=2, stages=3), 64, 100, "float32"),
    (config(teams=1, stages=4, arithmetic="bf16"), 128, 128, HALF), (config(teams=2, stages=5, arithmetic="bf16"), 61, 64, HALF),
    (config(teams=3, stages=4, arithmetic="bf16"), 64, 64, HALF),
], ids=["64x64", "128x128", "72x64", "64x100", "128x128-bfloat16", "61x64-bfloat16", "64x64-bfloat16"])
def test_many_tiles_in_one_block(chosen: Config, hidden: int, out: int, dtype: str, host_executor: HostExecutor) -> None:
    """More tiles than stages, in any order of threads: the same bits, and right on hard rows."""
    chosen = make_config(NAME, {**chosen.as_dict(), "reduction": "single_block"})
    inputs = hard_inputs(1000, hidden, out, dtype=dtype)
    problem = Problem(inputs.rows, hidden, out, dtype, accuracy=accuracy_of(chosen, dtype))
    assert why_refused(problem, chosen, LIMITS) is None
    program = compiled(host_executor, problem, chosen)
    bits = set()
    for order in ("forward", "reverse", "shuffled:1"):
        got = program.run(inputs, ALL_GRADIENTS, order=order)  # type: ignore[call-arg]
        assert bound_fault(inputs, got, ALL_GRADIENTS, problem.accuracy) is None
        bits.add(b"".join(array.tobytes() for array in got.present().values()))
    assert len(bits) == 1


@pytest.mark.parametrize(("chosen", "hidden", "dtype"), [
    (config(), 128, "float32"), (config(teams=2, stages=4), 64, "float32"),
    (config(stages=5, arithmetic="bf16"), 128, HALF), (config(teams=2, stages=6, arithmetic="bf16"), 64, HALF),
    (config(teams=3, stages=6, arithmetic="bf16"), 64, HALF),
], ids=["128", "64", "128-bfloat16", "64-bfloat16", "64-bfloat16-3"])
def test_large_tiles_keep_to_their_registers(chosen: Config, hidden: int, dtype: str, store: Store) -> None:
    """No sum goes to memory, and the compiler neither ignores what warpgroups hand over nor makes products wait."""
    binary = find_nvcc("sm_90a").compile(render(Problem(262144, hidden, hidden, dtype), chosen).text, "sm_90a", store)
    report = binary.reports[NAME]
    assert report.spill_bytes == report.stack_bytes == 0
    assert "C75" not in (binary.cubin.parent / REPORT).read_text()
