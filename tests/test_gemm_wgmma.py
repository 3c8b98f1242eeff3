"""What is gemm_wgmma's own: the GPU it needs, blocks that take several tiles, stages of every size, and registers."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from codegen import variants
from codegen.config import Config
from codegen.gemm_plan import MOST_BLOCKS
from codegen.limits import TARGETS, target
from codegen.problem import ALL_GRADIENTS, Problem
from codegen.render import render
from codegen.space import make_config, valid_configs, why_not, why_refused
from codegen.variants import default_names
from tests.adversarial import adversarial_inputs
from tests.variant_cases import LIMITS, accuracy_of, assert_right, compiled
from tuner.compare import bound_fault
from tuner.executors.host import HostExecutor, HostProgram
from tuner.executors.host_runtime import Layout
from tuner.inputs import random_inputs
from tuner.probe import exact_gradients, probe_inputs
from tuner.reference import reference
from tuner.store import Store
from tuner.toolchain import REPORT, find_nvcc

NAME = "gemm_wgmma"


def config(**values: int | str) -> Config:
    return make_config(NAME, values)


@pytest.mark.parametrize("arch", TARGETS)
def test_other_gpus_lack_its_instructions(arch: str) -> None:
    reason = why_refused(Problem(512, 256, 192), config(), target(arch))
    assert reason is None if arch == "sm_90" else reason is not None and "instructions of sm_90a" in reason


def test_what_no_gpu_has_run_takes_part_where_it_is_named_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(512, 256, 192)
    assert NAME in default_names()
    monkeypatch.setattr(variants, "UNTRIED", frozenset((NAME,)))
    assert NAME not in default_names()
    found = {config.variant for config in valid_configs(problem, LIMITS)}
    assert found and NAME not in found
    assert valid_configs(problem, LIMITS, [NAME])


@pytest.mark.parametrize(("chosen", "hidden"), [
    (config(tile="64x64", groups=1, arithmetic="fp16", depth=32, promote=128, parts=4, stages=2, group=4), 500),
    (config(tile="128x64", groups=2, arithmetic="bf16", promote=0, parts=8, stages=2, group=4), 900),
], ids=["promoted", "in the tensor cores"])
def test_blocks_take_tile_after_tile(chosen: Config, hidden: int, host_executor: HostExecutor) -> None:
    """More tiles than blocks, which take them in another order in each run: the same bits, and right."""
    inputs = random_inputs(700, hidden, 70)
    problem = Problem(inputs.rows, inputs.hidden, inputs.out, accuracy=accuracy_of(chosen))
    launch = next(launch for launch in render(problem, chosen).plan.launches if launch.kernel == NAME)
    assert launch.grid.evaluate(problem.rows, 132) == MOST_BLOCKS
    program = compiled(host_executor, problem, chosen)
    bits = set()
    for order in ("forward", "shuffled:1"):
        got = program.run(inputs, ALL_GRADIENTS, order=order)  # type: ignore[call-arg]
        assert bound_fault(inputs, got, ALL_GRADIENTS, problem.accuracy) is None
        bits.add(b"".join(array.tobytes() for array in got.present().values()))
    assert len(bits) == 1


@pytest.mark.parametrize("chosen", [
    config(), config(tile="128x192", depth=32, stages=5), config(tile="64x128", groups=1, finish="epilogue", stages=3),
    config(arithmetic="bf16x6", stages=2, tile="128x64")], ids=str)
def test_tiles_and_stages_of_every_size(chosen: Config, host_executor: HostExecutor) -> None:
    assert_right(host_executor, chosen, random_inputs(200, 100, 150))


OF_FLOATS = config(split="fragments", group=4, finish="epilogue", stages=2)
OF_HALVES = config(split="fragments", group=4, finish="epilogue", arithmetic="bf16", promote=0)


@pytest.mark.parametrize(("chosen", "dtype", "shape"), [
    (config(split="fragments", group=8, finish="epilogue", parts=3), "float32", (900, 128, 256)),
    (OF_FLOATS, "float32", (200, 100, 152)),
    (config(split="fragments", group=4, tile="64x64", groups=1, arithmetic="bf16x6", parts=3), "float32", (200, 100, 152)),
    (OF_HALVES, "bfloat16", (300, 128, 200)),
    (config(split="fragments", group=4, finish="epilogue", arithmetic="bf16", promote=0, depth=128), "bfloat16", (300, 128, 248)),
    (config(split="fragments", group=4, tile="256x128", arithmetic="fp16", promote=0), "float16", (300, 100, 136))],
    ids=["keeping pace", "narrow rows", "bf16x6", "bfloat16", "deep stages", "two tiles a warpgroup"])
@pytest.mark.parametrize("layout", ["end", "shifted"])
def test_dy_is_multiplied_out_of_registers(chosen: Config, dtype: str, shape: tuple[int, int, int], layout: Layout,
                                           host_executor: HostExecutor) -> None:
    """Tiles that end beyond the edges of dy, rows that are copied in bulk, and rows whose addresses do not allow it."""
    inputs = random_inputs(*shape, dtype=dtype, param_dtype=dtype)
    problem = Problem(*shape, dtype, accuracy=accuracy_of(chosen, dtype))
    assert why_refused(problem, chosen, LIMITS) is None
    program = cast(HostProgram, compiled(host_executor, problem, chosen))
    got = program.run(inputs, ALL_GRADIENTS, layout=layout, order="shuffled:1")
    assert bound_fault(inputs, got, ALL_GRADIENTS, problem.accuracy) is None


def of_cells(**values: int | str) -> Config:
    return config(**{"split": "none", "arithmetic": "bf16", "promote": 0, **values})


@pytest.mark.parametrize(("chosen", "dtype", "shape"), [
    (of_cells(stages=6), "bfloat16", (700, 200, 200)),
    (of_cells(group=4, finish="epilogue", stages=4, parts=3), "bfloat16", (900, 128, 256)),
    (of_cells(arithmetic="fp16", tile="256x128", stages=2), "float16", (300, 100, 136)),
    (of_cells(tile="64x128", groups=1, stages=4, halved=8), "bfloat16", (700, 200, 200)),
    (of_cells(tile="64x64", groups=1, stages=4, halved=8), "bfloat16", (300, 90, 60)),
    (of_cells(tile="64x64", groups=1, stages=3, parts=8), "bfloat16", (600, 70, 90)),
    (of_cells(finish="rounded", stages=6, reduction="direct", parts=1), "bfloat16", (300, 256, 200)),
    (of_cells(finish="rounded", tile="64x128", groups=1, stages=4, halved=8), "bfloat16", (700, 200, 200)),
    (of_cells(finish="rounded", tile="64x64", groups=1, stages=3), "bfloat16", (300, 70, 90)),
    (of_cells(finish="wide", arithmetic="fp16", tile="128x256", stages=3, reduction="direct", parts=1), "float16",
     (300, 264, 136))],
    ids=["several tiles", "keeping pace", "two stages", "halves", "nothing but halves", "odd rows",
         "rounded", "rounded halves", "rounded odd rows", "wide ends"])
@pytest.mark.parametrize("layout", ["end", "shifted"])
def test_dy_of_16_bits_is_copied_to_its_cells(chosen: Config, dtype: str, shape: tuple[int, int, int], layout: Layout,
                                              host_executor: HostExecutor) -> None:
    """Tiles that end beyond the edges of dy, rows whose addresses do not allow 16 bytes at once; in each order the same bits."""
    inputs = random_inputs(*shape, dtype=dtype, param_dtype=dtype)
    problem = Problem(*shape, dtype, accuracy=accuracy_of(chosen, dtype))
    assert why_refused(problem, chosen, LIMITS) is None
    program = cast(HostProgram, compiled(host_executor, problem, chosen))
    bits = set()
    for order in ("forward", "reverse", "shuffled:1"):
        got = program.run(inputs, ALL_GRADIENTS, layout=layout, order=order)
        assert bound_fault(inputs, got, ALL_GRADIENTS, problem.accuracy) is None
        bits.add(b"".join(array.tobytes() for array in got.present().values()))
    assert len(bits) == 1


OF_WORDS = of_cells(finish="rounded", tile="64x64", groups=1, stages=4, reduction="direct", parts=1)


@pytest.mark.parametrize("kind", ["dy over twelve decades", "outliers", "everything at once"])
def test_dn_in_16_bits_keeps_the_bound_where_dx_cancels(kind: str, host_executor: HostExecutor) -> None:
    inputs = adversarial_inputs(kind, 130, 128, 128).rounded_to("bfloat16", "bfloat16")
    assert_right(host_executor, OF_WORDS, inputs)


def test_rounded_dn_is_exact_where_it_has_few_bits(host_executor: HostExecutor) -> None:
    """No row or column of whole tiles is left out, or comes twice."""
    inputs = probe_inputs(130, 128, 128, dtype="bfloat16", param_dtype="bfloat16")
    right, got = reference(inputs).present(), assert_right(host_executor, OF_WORDS, inputs).present()
    exact = exact_gradients(inputs)
    assert exact == ALL_GRADIENTS
    for name in exact:
        assert (got[name] == right[name].astype(got[name].dtype)).all(), name


@pytest.mark.parametrize("wants", [{"dx"}, {"dw"}, {"dgamma"}, {"dx", "dbeta"}], ids=lambda wants: "+".join(sorted(wants)))
def test_ends_of_tiles_without_some_gradients(wants: set[str], host_executor: HostExecutor) -> None:
    chosen = OF_WORDS if "dx" in wants else make_config(NAME, {**OF_WORDS.as_dict(), "finish": "wide"})
    inputs = replace(random_inputs(130, 128, 128, dtype="bfloat16", param_dtype="bfloat16"), gamma=None, beta=None)
    assert_right(host_executor, chosen, inputs, frozenset(wants))


def test_dn_that_is_rounded_needs_no_room() -> None:
    rounded, wide = ({buffer.name for buffer in render(WORDS, of_cells(finish=finish)).plan.workspace}
                     for finish in ("rounded", "wide"))
    assert wide - rounded == {"dn"}


@pytest.mark.parametrize(("problem", "changed", "says"), [
    ("bfloat16", {"finish": "rounded"}, None), ("bfloat16", {"finish": "second"}, None),
    ("bfloat16", {"finish": "wide"}, "finish=rounded takes 16"), ("float16", {"finish": "wide", "arithmetic": "fp16"}, None),
    ("float16", {"finish": "rounded", "arithmetic": "fp16"}, "larger than float16 holds"),
    ("bfloat16", {"finish": "rounded", "split": "first"}, "split=none for such"),
    ("float32", {"finish": "wide", "split": "first"}, "take finish=second"),
    ("bfloat16", {"finish": "rounded", "halved": 24}, "take halved=8")], ids=str)
def test_where_ends_of_tiles_move_words(problem: str, changed: dict[str, int | str], says: str | None) -> None:
    chosen = of_cells(**{"tile": "128x256", "stages": 4, "reduction": "direct", "parts": 1, **changed})
    reason = why_not(replace(WORDS, dtype=problem, param_dtype=problem, accuracy=""), chosen, LIMITS)
    assert reason is None if says is None else reason is not None and says in reason


def test_words_are_moved_of_whole_rows_of_16_bytes_where_there_is_dn() -> None:
    rounded, wide = of_cells(finish="rounded", stages=6), of_cells(finish="wide", stages=6)
    assert "16 bytes at a time" in (why_not(replace(WORDS, hidden=4100), rounded, LIMITS) or "")
    of_parameters = replace(WORDS, wants=ALL_GRADIENTS - {"dx"})
    assert "no dn to round" in (why_not(of_parameters, rounded, LIMITS) or "")
    assert why_not(of_parameters, wide, LIMITS) is None
    assert "parameters" in (why_refused(replace(WORDS, param_dtype="float32"), rounded, LIMITS) or "")


@pytest.mark.parametrize(("depth", "promote"), [(128, 64), (64, 128), (64, 256)])
def test_fragments_of_16_bit_data_promote_after_each_stage_or_never(depth: int, promote: int) -> None:
    half = {"split": "fragments", "arithmetic": "bf16", "depth": depth}
    reason = why_refused(Problem(512, 256, 192, "bfloat16"), config(**half, promote=promote), LIMITS)
    assert reason is not None and f"take promote=0 or promote={depth}" in reason
    assert why_refused(Problem(512, 256, 192, "bfloat16"), config(**half, promote=0, stages=2), LIMITS) is None


def test_fragments_leave_no_planes_of_dy() -> None:
    names = {buffer.name for buffer in render(TALL, OF_FLOATS).plan.workspace}
    assert not [name for name in names if name.startswith("dy")] and "xhat_planes" in names
    assert why_not(TALL, OF_FLOATS, LIMITS) is None
    assert "16 bytes at a time" in (why_not(Problem(262144, 128, 510), OF_FLOATS, LIMITS) or "")
    assert why_refused(Problem(262144, 128, 510), OF_FLOATS, LIMITS) is None


@pytest.mark.parametrize(("changed", "says"), [
    ({}, None), ({"split": "first"}, "split=none makes nothing"), ({"split": "fragments"}, "split=none makes nothing"),
    ({"halved": 8, "finish": "second"}, "the last of so many tiles"), ({"promote": 128}, "take promote=0"),
    ({"tile": "128x256", "stages": 4}, "take finish=second"), ({"halved": 8}, "finish=second")], ids=str)
def test_dy_of_16_bits_is_copied_as_it_is_wherever_it_can_be(changed: dict[str, int | str], says: str | None) -> None:
    reason = why_not(TALL_HALF, of_cells(**{"stages": 6, "finish": "epilogue", "parts": 16, "group": 4, **changed}), LIMITS)
    assert reason is None if says is None else reason is not None and says in reason


def test_rows_of_dy_that_begin_anywhere_become_planes() -> None:
    chosen: dict[str, int | str] = {"finish": "epilogue", "parts": 16, "group": 4, "stages": 6}
    problem = Problem(262144, 128, 510, "bfloat16")
    assert "16 bytes at a time" in (why_not(problem, of_cells(**chosen), LIMITS) or "")
    assert why_not(problem, of_cells(**chosen, split="first"), LIMITS) is None


WORDS = Problem(2048, 4096, 1024, "bfloat16")
WIDE = Problem(8192, 768, 2304)
HALF = Problem(8192, 768, 2304, "bfloat16")
ROWS = Problem(2048, 16384, 1024, "bfloat16")
TALL = Problem(262144, 128, 512)
TALL_HALF = Problem(262144, 128, 512, "bfloat16")


@pytest.mark.parametrize(("problem", "chosen"), [
    (WIDE, config()), (WIDE, config(tile="128x192", depth=32, stages=5, reduction="direct", parts=1)),
    (HALF, config(arithmetic="bf16", promote=0, tile="128x256", stages=3)),
    (HALF, config(arithmetic="bf16", promote=0, tile="256x128", stages=3)),
    (HALF, of_cells(tile="128x192", stages=5, reduction="direct", parts=1, halved=8)),
    (HALF, of_cells(tile="128x256", stages=4)), (HALF, of_cells(tile="256x128", stages=4)),
    (TALL_HALF, of_cells(stages=6, parts=16, finish="epilogue", group=4)),
    (HALF, of_cells(tile="128x256", stages=4, finish="rounded", reduction="direct", parts=1)),
    (HALF, of_cells(tile="256x128", stages=4, finish="rounded", halved=8)),
    (ROWS, of_cells(tile="128x256", stages=4, finish="rounded", reduction="direct", parts=1)),
    (TALL, config(split="fragments", parts=16, finish="epilogue", group=4)),
    (TALL_HALF, config(split="fragments", arithmetic="bf16", promote=0, stages=6, parts=16, finish="epilogue", group=4)),
    (TALL_HALF, config(split="fragments", arithmetic="bf16", promote=0, depth=128, parts=16, finish="epilogue", group=4))],
    ids=["128x128", "128x192", "128x256-bfloat16", "256x128-bfloat16", "halves",
         "128x256-none", "256x128-none", "none",
         "rounded", "rounded halves", "rounded long rows", "fragments", "fragments-bfloat16", "deep stages"])
def test_large_tiles_keep_to_their_registers(problem: Problem, chosen: Config, store: Store) -> None:
    """No sum goes to memory, and the compiler neither ignores what warpgroups hand over nor makes products wait."""
    binary = find_nvcc("sm_90a").compile(render(problem, chosen).text, "sm_90a", store)
    for kernel in (NAME, "gemm_finish"):
        assert binary.reports[kernel].spill_bytes == binary.reports[kernel].stack_bytes == 0
    assert "C75" not in (binary.cubin.parent / REPORT).read_text()
