"""The artifact's C interface and self-test, run on the CPU: results, dispatch, sizes, arguments, errors. No GPU is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from codegen.artifact import MAX_GRID, MAX_ROWS, ArtifactKernel, artifact
from codegen.plan import Fill, Plan
from codegen.problem import GRADIENTS, Problem, Shape
from codegen.tensors import gradient_shapes, itemsize
from tests.artifact_cases import EVERY_REDUCTION, INFO, LIMITS, PROBLEM, THREE, make, one, source, suited, typed, with_sms
from tests.cases import DATA_TYPES
from tests.configs import every_reduction
from tests.host_artifact import INVALID_VALUE, NO_KERNEL_IMAGE, TENSORS, HostArtifact, anywhere, self_test
from tuner.compare import bound_fault
from tuner.executors.host_runtime import Layout
from tuner.inputs import random_inputs
from tuner.store import Store

HIDDEN, OUT = PROBLEM.hidden, PROBLEM.out
ALL = frozenset(GRADIENTS)
MASKS = [frozenset(names) for count in range(6) for names in combinations(GRADIENTS, count)]
SIZE_MAX = 2**64 - 1
ROW_COUNTS = (*range(301), 65535, 65536, 2**31 + 1)
ATOMIC, SINGLE = "row_thread:reduction=atomic", "row_thread:reduction=single_block,splits=1"

Load = Callable[[str], HostArtifact]


@pytest.fixture
def load(store: Store, tmp_path: Path) -> Load:
    return lambda cu: HostArtifact(cu, store, tmp_path)


@pytest.fixture
def three(load: Load) -> HostArtifact:
    return load(make(*THREE).cu)


def expected_log(plan: Plan, rows: int, sms: int = 132) -> list[str]:
    """The steps of a plan in the words of the log."""
    sizes = {name: int(np.prod(shape)) for name, shape in gradient_shapes(rows, HIDDEN, OUT).items()}
    lines = []
    for step in plan.steps:
        if isinstance(step, Fill):
            lines += [f"fill {4 * sizes[name]}" for name in step.names]
        elif grid := step.grid.evaluate(rows, sms):
            overlaps = "overlapping " if step.overlaps and lines else ""  # nothing comes before the call's first
            lines.append(f"{overlaps}launch {grid} {step.block} {step.shared_bytes}")
    return lines


# --- Results --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", EVERY_REDUCTION)
def test_gradients_of_every_variant_with_every_reduction(config: str, load: Load) -> None:
    loaded = load(one(config).cu)
    for rows in (1, 16, 17, 71):
        inputs = random_inputs(rows, HIDDEN, OUT)
        assert bound_fault(inputs, loaded.run(inputs, ALL)) is None
    nothing = loaded.run(random_inputs(0, HIDDEN, OUT), ALL)
    assert nothing.dx is not None and nothing.dx.shape == (0, HIDDEN)
    for name in ("dgamma", "dbeta", "dw", "db"):
        assert not np.any(getattr(nothing, name)), name


@pytest.mark.parametrize(("dtype", "param_dtype"), DATA_TYPES[1:])
def test_gradients_of_every_variant_in_every_data_type(dtype: str, param_dtype: str, store: Store, tmp_path: Path) -> None:
    """With one reduction each: the interface does not know them apart but by their plans, which float32 ones have too."""
    problem = typed(dtype, param_dtype)
    for config in {config.variant: config for config in every_reduction(problem, LIMITS)}.values():
        (folder := tmp_path / str(config)).mkdir()
        loaded = HostArtifact(one(str(config), problem).cu, store, folder)
        for rows in (0, 1, 17, 71):
            inputs = random_inputs(rows, HIDDEN, OUT, dtype=dtype, param_dtype=param_dtype)
            assert bound_fault(inputs, loaded.run(inputs, ALL)) is None, config


@pytest.mark.parametrize("layout", ["end", "begin"])
def test_gradients_on_both_sides_of_each_change_of_config(layout: Layout, three: HostArtifact) -> None:
    for rows in (40, 41, 300, 301):
        inputs = random_inputs(rows, HIDDEN, OUT)
        assert bound_fault(inputs, three.run(inputs, ALL, layout)) is None


@pytest.mark.parametrize("config", ["row_thread:reduction=atomic", "row_shared:reduction=two_pass"])
def test_what_is_null_is_not_computed(config: str, load: Load) -> None:
    loaded, inputs = load(one(config).cu), random_inputs(33, HIDDEN, OUT)
    for wants in MASKS:
        got = loaded.run(inputs, wants)
        assert not wants or bound_fault(inputs, got, wants) is None
        fills = [line for line in loaded.log() if line.startswith("fill")]
        assert len(fills) == (len(wants - {"dx"}) if "atomic" in config else 0)


def test_gamma_and_beta_may_be_null(three: HostArtifact) -> None:
    inputs = random_inputs(33, HIDDEN, OUT)
    for bare in (replace(inputs, gamma=None), replace(inputs, beta=None), replace(inputs, gamma=None, beta=None)):
        assert bound_fault(bare, three.run(bare, ALL)) is None


def test_eps_reaches_the_kernels(three: HostArtifact) -> None:
    inputs = replace(random_inputs(20, HIDDEN, OUT), eps=2.0)
    assert bound_fault(inputs, three.run(inputs, ALL)) is None


@pytest.mark.parametrize("config", ["weight_ahead:threads=128,rows=2,outs=8,launches=overlapped",
                                    "weight_mma:rows=16,outs=32,columns=32,warp_outs=16,launches=overlapped"])
def test_launches_overlap_with_those_of_the_call_alone(config: str, load: Load) -> None:
    """Of no rows, the first launch has no blocks; then the second waits for what the stream had before, as any launch does."""
    made = source(config)
    assert any(step.overlaps for step in made.plan.launches)
    loaded = load(one(config).cu)
    for rows in (1, 33):
        inputs = random_inputs(rows, HIDDEN, OUT)
        assert bound_fault(inputs, loaded.run(inputs, ALL)) is None
    loaded.library.host_cudart_dry(1)
    for rows in (0, 1, 33):
        loaded.log()
        assert loaded.call(anywhere(), rows) == 0
        assert loaded.log() == expected_log(made.plan, rows)


def test_more_than_48_kib_of_shared_memory_is_asked_for(load: Load) -> None:
    problem = Problem(64, 96, 96)
    text = one("row_shared:threads=256,lanes=32,tile=4x4,reduction=single_block,splits=1", problem)
    inputs = random_inputs(20, 96, 96)
    loaded = load(text.cu)
    assert bound_fault(inputs, loaded.run(inputs, ALL)) is None
    assert max(int(line.split()[3]) for line in loaded.log() if line.startswith("launch")) > 48 << 10


# --- Dispatch and sizes ---------------------------------------------------------------------------------------


def test_the_row_count_chooses_config_grid_and_workspace(three: HostArtifact) -> None:
    three.library.host_cudart_dry(1)
    plans = [(source(config).plan, last) for config, last in THREE]
    for rows in ROW_COUNTS:
        plan = next(plan for plan, last in plans if last is None or rows <= last)
        assert three.workspace_bytes(rows) == plan.workspace_bytes(rows, 132)
        three.log()
        assert three.call(anywhere(), rows) == 0
        assert three.log() == expected_log(plan, rows)


@pytest.mark.parametrize("sms", [1, 108, 132])
def test_sizes_may_depend_on_the_number_of_sms(sms: int, load: Load) -> None:
    made = with_sms()
    loaded = load(artifact([ArtifactKernel(made)], INFO).cu)
    loaded.library.host_cudart_device(0, sms)
    inputs = random_inputs(71, HIDDEN, OUT)
    assert bound_fault(inputs, loaded.run(inputs, ALL)) is None
    loaded.log()
    loaded.library.host_cudart_dry(1)
    for rows in ROW_COUNTS:
        assert loaded.call(anywhere(), rows) == 0
        assert loaded.log() == expected_log(made.plan, rows, sms), "and the SMs are not counted again"
        assert loaded.workspace_bytes(rows) == made.plan.workspace_bytes(rows, sms)
        loaded.log()


def test_each_device_has_its_own_number_of_sms(load: Load) -> None:
    made = with_sms()
    loaded = load(artifact([ArtifactKernel(made)], INFO).cu)
    loaded.library.host_cudart_dry(1)
    for call in (1, 2):
        for device, sms in ((0, 4), (1, 8), (100, 12)):
            loaded.library.host_cudart_device(device, sms)
            assert loaded.call(anywhere(), 2000) == 0
            log = loaded.log()
            assert [line for line in log if line.startswith("launch")] == expected_log(made.plan, 2000, sms)
            assert ("load" in log) == (call == 1 or device == 100), "the hundredth is beyond what is remembered"


def test_a_grid_beyond_the_largest_is_refused_and_the_limit_stated(load: Load) -> None:
    text = one("row_thread:reduction=atomic,threads=32")
    loaded = load(text.cu)
    loaded.library.host_cudart_dry(1)
    most = 32 * MAX_GRID
    assert json.loads(loaded.info)["max_rows"] == most and f"0 to {most};" in text.header
    assert loaded.call(anywhere(), most) == 0
    loaded.log()
    assert loaded.call(anywhere(), most + 1) == INVALID_VALUE and loaded.log() == []
    assert loaded.workspace_bytes(most + 1) == SIZE_MAX


# --- Arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dy", "x", "w", "workspace"])
def test_what_is_needed_must_not_be_null(name: str, three: HostArtifact) -> None:
    given = {key: address for key, address in anywhere().items() if key != name}
    assert three.call(given, 30) == INVALID_VALUE
    assert three.last_error == 0 and not any(line.startswith(("launch", "fill")) for line in three.log())


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_must_lie_at_multiples_of_four_bytes(name: str, three: HostArtifact) -> None:
    three.library.host_cudart_dry(1)
    given = anywhere()
    assert three.call({**given, name: given[name] + 4}, 30) == 0
    three.log()
    for offset in (1, 2, 3):
        assert three.call({**given, name: given[name] + offset}, 30) == INVALID_VALUE
    assert three.log() == [] and three.last_error == 0


@pytest.mark.parametrize(("dtype", "param_dtype"), DATA_TYPES[1:])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_must_lie_at_multiples_of_an_element(name: str, dtype: str, param_dtype: str, load: Load) -> None:
    loaded = load(one("row_shared:reduction=two_pass", typed(dtype, param_dtype)).cu)
    loaded.library.host_cudart_dry(1)
    given, size = anywhere(), itemsize(name, dtype, param_dtype)
    assert loaded.call({**given, name: given[name] + size}, 30) == 0
    for offset in (*range(1, size), size + 1):
        assert loaded.call({**given, name: given[name] + offset}, 30) == INVALID_VALUE


def test_the_workspace_must_lie_at_a_multiple_of_256_bytes(three: HostArtifact) -> None:
    given = anywhere()
    three.library.host_cudart_dry(1)
    assert three.call({**given, "workspace": given["workspace"] + 256}, 30) == 0
    assert three.call({**given, "workspace": given["workspace"] + 128}, 30) == INVALID_VALUE


def test_no_workspace_is_needed_where_none_is_used(three: HostArtifact) -> None:
    three.library.host_cudart_dry(1)
    assert three.workspace_bytes(300) == 0
    assert three.call({name: address for name, address in anywhere().items() if name != "workspace"}, 300) == 0


@pytest.mark.parametrize("rows", [-1, -(2**63), MAX_ROWS + 1, 2**63 - 1])
def test_row_counts_out_of_range(rows: int, three: HostArtifact) -> None:
    assert three.call(anywhere(), rows) == INVALID_VALUE and three.workspace_bytes(rows) == SIZE_MAX
    assert three.last_error == 0


def test_without_rows_the_tensors_of_rows_may_be_null(three: HostArtifact) -> None:
    three.library.host_cudart_dry(1)
    given = {name: address for name, address in anywhere().items() if name not in ("dy", "x", "dx")}
    assert three.call(given, 0) == 0


def test_a_gradient_the_file_does_not_compute_is_refused(load: Load) -> None:
    loaded = load(one("row_warp", replace(PROBLEM, wants=frozenset({"dx", "dw"}))).cu)
    inputs, wants = random_inputs(20, HIDDEN, OUT), frozenset({"dx", "dw"})
    assert bound_fault(inputs, loaded.run(inputs, wants), wants) is None
    given = anywhere()
    right = {key: given[key] for key in (*wants, "dy", "x", "w", "workspace")}
    for name in ("dgamma", "dbeta", "db"):
        assert loaded.call({**right, name: given[name]}, 20) == INVALID_VALUE


# --- Streams and errors ---------------------------------------------------------------------------------------


def test_a_call_is_captured_whole_once_the_kernels_are_loaded(three: HostArtifact) -> None:
    three.workspace_bytes(0)
    loads = three.log()
    assert loads == ["load"] * 4, "the kernels of all configs"
    three.library.host_cudart_begin_capture()
    assert three.call(anywhere(), 300, stream=4096) == 0
    assert three.library.host_cudart_end_capture() == len(expected_log(source(THREE[1][0]).plan, 300))
    assert three.log() == [], "nothing ran, nothing was loaded again"


def test_a_first_call_loads_by_itself(three: HostArtifact) -> None:
    three.library.host_cudart_dry(1)
    assert three.call(anywhere(), 300) == 0
    assert three.log()[:4] == ["load"] * 4


@pytest.mark.parametrize("function", ["cudaGetDevice", "cudaFuncGetAttributes"])
def test_a_gpu_it_was_not_built_for_is_a_stated_error(function: str, three: HostArtifact) -> None:
    three.fail(function, NO_KERNEL_IMAGE)
    assert three.workspace_bytes(30) == SIZE_MAX and three.last_error == 0
    assert three.call(anywhere(), 30) == NO_KERNEL_IMAGE and three.last_error == 0
    assert not any(line.startswith(("launch", "fill")) for line in three.log())


@pytest.mark.parametrize("function", ["cudaLaunchKernel", "cudaMemsetAsync"])
def test_a_step_that_fails_ends_the_call_with_its_code(function: str, three: HostArtifact) -> None:
    three.library.host_cudart_dry(1)
    three.fail(function, 719)
    assert three.call(anywhere(), 300) == 719 and three.last_error == 0
    assert not any(line.startswith("launch") for line in three.log())


def test_shared_memory_that_the_gpu_lacks_is_a_stated_error(load: Load) -> None:
    loaded = load(one("row_shared:threads=256,lanes=32,tile=4x4,reduction=single_block,splits=1", Problem(64, 96, 96)).cu)
    loaded.fail("cudaFuncSetAttribute", INVALID_VALUE)
    assert loaded.workspace_bytes(1) == SIZE_MAX and loaded.call(anywhere(), 1) == INVALID_VALUE and loaded.last_error == 0


# --- The self-test --------------------------------------------------------------------------------------------


def test_the_self_test_passes_and_prints_a_time(store: Store) -> None:
    done = self_test(make(*THREE).cu, store)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("PASSED\n") and " us a call on 15 rows" in done.stdout
    for rows in (0, 1, 16, 17, 40, 41, 300, 301, 15):
        assert f"\n{rows} rows, first call: " in done.stdout and f"\n{rows} rows, second call: " in done.stdout


@pytest.mark.parametrize(("dtype", "param_dtype"), DATA_TYPES[1:])
def test_the_self_test_passes_in_every_data_type(dtype: str, param_dtype: str, store: Store) -> None:
    problem = typed(dtype, param_dtype)
    done = self_test(make(*suited(problem), problem=problem).cu, store)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("PASSED\n")


@pytest.mark.parametrize(("dtype", "param_dtype"), [("bfloat16", "bfloat16"), ("float16", "float32")])
@pytest.mark.parametrize(("right", "wrong"), [
    ("g[h] - mean_g -", "g[h] -"),
    ("from_float<data_t>(stats.rstd * ", "from_float<data_t>(1.02f * stats.rstd * "),
    ("from_float<param_t>(value);", "from_float<param_t>(1.02f * value);"),
    ("return {float_to_{short}(value)};", "{ data_t up = {float_to_{short}(value)}; up.bits += 4; return up; }"),
], ids=["term left out", "all of dx", "all of the parameters", "rounding"])
def test_the_self_test_finds_in_16_bits(right: str, wrong: str, dtype: str, param_dtype: str, store: Store) -> None:
    cu = one(SINGLE, typed(dtype, param_dtype)).cu
    right, wrong = (text.replace("{short}", {"bfloat16": "bf16", "float16": "f16"}[dtype]) for text in (right, wrong))
    assert right in cu
    done = self_test(cu.replace(right, wrong), store)
    assert done.returncode == 1 and done.stdout.endswith("FAILED\n"), done.stdout



@pytest.mark.parametrize(("config", "right", "wrong"), [
    (ATOMIC, "g[h] - mean_g -", "g[h] -"),
    (ATOMIC, "if (row >= p.rows) return;", "if (row >= p.rows - (p.rows == 17)) return;"),
    (SINGLE, "*to = from_float<param_t>(value);", "*to += value;"),
    (SINGLE, "if (want_dw) emit(", "if (want_dw && i == HIDDEN * OUT - 1) p.dw[i + 1] = 0.0f; if (want_dw) emit("),
    # Far too small for the norm of dw, and too much for one element.
    (SINGLE, "emit(dw_share(p) + i, ", "emit(dw_share(p) + i, (i == 100 ? 1.000005f : 1.0f) * "),
    # Within the bound of every element of a long sum, and too much for their norm.
    (ATOMIC, "dn * xhat", "(p.rows > 100 ? 1.000005f : 1.0f) * dn * xhat"),
], ids=["term left out", "row skipped", "added to", "written past the end", "one element", "all elements"])
def test_the_self_test_finds(config: str, right: str, wrong: str, store: Store) -> None:
    cu = one(config, info=replace(INFO, shape=Shape(3, 100, HIDDEN, OUT))).cu
    assert right in cu
    done = self_test(cu.replace(right, wrong), store)
    assert done.returncode == 1 and done.stdout.endswith("FAILED\n"), done.stdout


def test_the_self_test_finds_sums_that_go_on_in_the_next_call(store: Store) -> None:
    made = source("row_thread:reduction=atomic")
    plan = replace(made.plan, steps=made.plan.launches)
    done = self_test(artifact([ArtifactKernel(replace(made, plan=plan))], INFO).cu, store)
    assert done.returncode == 1
