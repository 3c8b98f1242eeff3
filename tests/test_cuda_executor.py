"""What the CUDA executor promises, on a stand-in for the driver (tests/fake_cuda.py). On a GPU: tests/test_cuda_device.py."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from codegen.expr import ROWS, Expr, const
from codegen.plan import Buffer, Fill, Launch, Plan
from codegen.problem import ALL_GRADIENTS, Problem
from codegen.render import Source
from codegen.space import make_config
from tests.fake_cuda import Arguments, FakeCuda, FakeKernel, open_executor, solve_in
from tuner.errors import DeviceLost, LaunchError
from tuner.executors.cuda import CudaExecutor, CudaProgram
from tuner.executors.cuda_memory import ALIGNMENT, GUARD_BYTES
from tuner.inputs import Inputs, random_inputs, read_only
from tuner.reference import reference
from tuner.store import Store

ROWS_RUN, HIDDEN, OUT = 5, 3, 7
PARAMS = {"dx": (ROWS_RUN, HIDDEN), "dgamma": (HIDDEN,), "dbeta": (HIDDEN,), "dw": (OUT, HIDDEN), "db": (OUT,)}

Make = Callable[..., tuple[CudaProgram, FakeCuda]]


solve = solve_in("float32", "float32", HIDDEN, OUT)


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch, store: Store) -> tuple[CudaExecutor, FakeCuda]:
    fake = FakeCuda()
    return open_executor(monkeypatch, store, fake), fake


@pytest.fixture
def make(executor: tuple[CudaExecutor, FakeCuda]) -> Make:
    """A program of one launch of `kernel`, which the fake runs as the given function."""

    def program(kernel: FakeKernel = solve, *, plan: Plan | None = None,
                wants: frozenset[str] = ALL_GRADIENTS) -> tuple[CudaProgram, FakeCuda]:
        cuda, fake = executor
        fake.plan = plan or Plan((Launch("kernel", const(1), 32),), (Buffer("partial", ROWS * 2),))
        fake.kernels = {"kernel": kernel}
        text = 'extern "C" __global__ void kernel(float*) {}\n'
        return cuda.compile(Source(Problem(ROWS_RUN, HIDDEN, OUT, wants=wants), make_config("row_thread"), text, fake.plan)), fake

    return program


def data(rows: int = ROWS_RUN) -> Inputs:
    return random_inputs(rows, HIDDEN, OUT)


# --- what a run hands over and brings back --------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, ROWS_RUN])
def test_a_right_kernel_gives_the_reference(make: Make, rows: int) -> None:
    program, fake = make()
    inputs = data(rows)
    got, right = program.run(inputs, ALL_GRADIENTS).present(), reference(inputs, ALL_GRADIENTS).present()
    for name, values in right.items():
        assert got[name].dtype == np.float32 and got[name].flags.c_contiguous
        np.testing.assert_array_equal(got[name], values.astype(np.float32), name)
    assert fake.depth == 0


def test_what_is_not_wanted_or_not_given_is_null(make: Make) -> None:
    program, fake = make()
    inputs = data()
    got = program.run(Inputs(inputs.dy, inputs.x, None, None, inputs.w, inputs.eps), frozenset(("dw", "db")))
    assert got.present().keys() == {"dw", "db"}
    _, given = fake.launches[0]
    assert {name for name, pointer in given.pointers.items() if pointer} == {"dy", "x", "w", "dw", "db", "partial"}


def test_params_hold_rows_eps_and_splits(make: Make) -> None:
    program, fake = make(plan=Plan((Launch("kernel", ROWS, 32),), splits=ROWS * 3))
    program.run(data(), ALL_GRADIENTS)
    _, given = fake.launches[0]
    assert (given.rows, given.eps, given.splits, given.grid, given.block) == (5, float(np.float32(1e-5)), 15, 5, 32)


def test_every_tensor_is_aligned(make: Make) -> None:
    program, fake = make()
    program.run(data(), ALL_GRADIENTS)
    _, given = fake.launches[0]
    assert all(pointer % ALIGNMENT == 0 for pointer in given.pointers.values())


@pytest.mark.parametrize("prefill", [math.nan, 7.0])
def test_outputs_and_workspace_are_filled_before_every_run(make: Make, prefill: float) -> None:
    seen: list[float] = []

    def look(given: Arguments) -> None:
        for name, shape in {**PARAMS, "partial": (ROWS_RUN * 2,)}.items():
            memory = given.array(name, *shape)
            seen.extend(memory.reshape(-1).tolist())
            memory[...] = 1.0

    program, _ = make(look)
    for _ in range(2):
        got = program.run(data(), ALL_GRADIENTS, prefill=prefill)
        assert got.dx is not None and (got.dx == 1.0).all()
    np.testing.assert_array_equal(seen, np.full(len(seen), prefill))
    assert len(seen) == 2 * (15 + 3 + 3 + 21 + 7 + 10)


def test_a_launch_overlaps_with_the_launch_before_it_alone(make: Make) -> None:
    """Not with what the stream had before the call, where the launch before it has no blocks."""
    steps = (Launch("kernel", ROWS, 32), Launch("kernel", const(2), 64, 49 << 10, overlaps=True))
    program, fake = make(plan=Plan(steps, (Buffer("partial", ROWS * 2),)))
    program.run(data(), ALL_GRADIENTS)
    assert [(given.grid, given.block, given.shared_bytes) for _, given in fake.launches] == [(5, 32, 0), (2, 64, 49 << 10)]
    assert fake.overlapping == ["kernel"]
    program.run(data(0), ALL_GRADIENTS)
    assert len(fake.launches) == 3 and fake.overlapping == ["kernel"]
    assert len(fake.modules) == 1
    del program
    gc.collect()
    other, _ = make()
    other.run(data(), ALL_GRADIENTS)
    assert not fake.modules  # unloaded as soon as the context was current


def test_steps_are_replayed_in_order_and_an_empty_grid_is_passed_over(make: Make) -> None:
    def add(given: Arguments) -> None:
        given.array("db", OUT)[...] += 1.0
        given.array("partial", 2)[...] += 1.0
        given.array("dbeta", 3)[:2] = given.array("partial", 2)

    steps = (Fill(("db", "partial", "dx")), Launch("kernel", const(1), 32), Launch("kernel", const(0), 32),
             Launch("kernel", const(2), 64))
    program, fake = make(add, plan=Plan(steps, (Buffer("partial", const(2)),)))
    got = program.run(data(), frozenset(("db", "dbeta")))
    assert got.db is not None and got.dbeta is not None
    assert got.db.tolist() == [2.0] * OUT and got.dbeta[:2].tolist() == [2.0, 2.0]
    assert [(given.grid, given.block) for _, given in fake.launches] == [(1, 32), (2, 64)]


# --- what a kernel must not do --------------------------------------------------------------------------------------


def writes(name: str, at: int) -> FakeKernel:
    def kernel(given: Arguments) -> None:
        solve(given)
        given.array(name, 1, at=at)[0] = 1.0

    return kernel


@pytest.mark.parametrize(("name", "at", "sentence"), [
    ("dx", 15, "the kernel wrote 0 bytes past the end of dx"),
    ("dx", -1, "the kernel wrote 4 bytes before the start of dx"),
    ("dgamma", 5, "the kernel wrote 8 bytes past the end of dgamma"),
    ("db", -2, "the kernel wrote 8 bytes before the start of db"),
    ("db", 7 + GUARD_BYTES // 4 - 1, f"the kernel wrote {GUARD_BYTES - 4} bytes past the end of db"),
    ("partial", 10, "the kernel wrote 0 bytes past the end of partial"),
    ("w", 21, "the kernel wrote 0 bytes past the end of w"),
    ("dy", -1, "the kernel wrote 4 bytes before the start of dy"),
    ("x", 14, "the kernel wrote into the input x"),
    ("beta", 0, "the kernel wrote into the input beta"),
])
def test_writing_elsewhere_is_an_error_that_names_the_tensor(make: Make, name: str, at: int, sentence: str) -> None:
    program, fake = make(writes(name, at))
    inputs = data()
    with pytest.raises(LaunchError) as caught:
        program.run(inputs, ALL_GRADIENTS)
    assert str(caught.value) == sentence
    fake.kernels["kernel"] = solve
    assert program.run(inputs, ALL_GRADIENTS).dx is not None
    assert fake.depth == 0


@pytest.mark.parametrize(("grid", "block", "shared", "sentence"), [
    (const(2**31), 32, 0, "kernel asks for a grid of 2147483648 blocks; H200 allows 2147483647"),
    (const(1), 1056, 0, "kernel asks for blocks of 1056 threads; H200 allows 1024"),
    (const(1), 32, 232449, "kernel asks for 232449 bytes of shared memory a block; H200 allows 232448"),
])
def test_p5_launches_beyond_the_device_are_refused(make: Make, grid: Expr, block: int, shared: int, sentence: str) -> None:
    program, fake = make(plan=Plan((Launch("kernel", const(1), 32), Launch("kernel", grid, block, shared))))
    with pytest.raises(LaunchError) as caught:
        program.run(data(), ALL_GRADIENTS)
    assert str(caught.value) == sentence
    assert not fake.launches


@pytest.mark.parametrize("shared", [48 << 10, 232448])
def test_p5_large_shared_memory_is_opted_into(make: Make, shared: int) -> None:
    program, fake = make(plan=Plan((Launch("kernel", const(1), 32, shared), Launch("kernel", const(1), 32, 16))))
    program.run(data(), ALL_GRADIENTS)
    assert [given.shared_bytes for _, given in fake.launches] == [shared, 16]


def test_inputs_and_wants_of_another_kernel_are_refused(make: Make) -> None:
    program, fake = make(wants=frozenset(("dx", "db")))
    with pytest.raises(LaunchError, match="for hidden=3 and out=7, not for 4 and 7"):
        program.run(random_inputs(ROWS_RUN, 4, OUT), frozenset(("dx",)))
    with pytest.raises(LaunchError, match="computes dx,db only, not dw"):
        program.run(data(), frozenset(("dx", "dw")))
    assert not fake.launches


# --- errors of the driver -------------------------------------------------------------------------------------------


def test_an_error_that_passes_leaves_the_executor_usable(make: Make) -> None:
    program, fake = make()

    def refuse(given: Arguments) -> None:
        raise fake.driver.Error("cuLaunchKernel failed: too many resources requested for launch")

    fake.kernels["kernel"] = refuse
    with pytest.raises(LaunchError) as caught:
        program.run(data(), ALL_GRADIENTS)
    assert str(caught.value) == "the GPU refused the work: too many resources requested for launch (cuLaunchKernel)"
    fake.kernels["kernel"] = solve
    assert program.run(data(), ALL_GRADIENTS).dx is not None
    assert fake.depth == 0


def test_after_a_sticky_error_all_further_work_is_refused(executor: tuple[CudaExecutor, FakeCuda], make: Make) -> None:
    program, fake = make()
    other, _ = make()

    def crash(given: Arguments) -> None:
        fake.sticky = "an illegal memory access was encountered"

    fake.kernels["kernel"] = crash
    with pytest.raises(DeviceLost, match="took the process's GPU context with it: an illegal memory access was encountered"):
        program.run(data(), ALL_GRADIENTS)
    for work in (program.run, program.time, other.run):
        with pytest.raises(DeviceLost) as caught:
            work(data(), ALL_GRADIENTS)
        assert str(caught.value) == (
            "the GPU cannot be used by this process any more, since an earlier kernel failed (an illegal memory access was "
            "encountered); start a new process")
    executor[0].close()
    assert fake.depth == 0


def test_without_enough_memory_the_sentence_says_how_much(make: Make) -> None:
    program, fake = make()
    fake.free_bytes = 1000
    with pytest.raises(LaunchError, match=r"needs \d+ more bytes of GPU memory where 1000 are free"):
        program.run(data(), ALL_GRADIENTS)
    fake.free_bytes = 1 << 30
    assert program.run(data(), ALL_GRADIENTS).dx is not None


def test_ctrl_c_leaves_no_context_behind(make: Make) -> None:
    def interrupt(given: Arguments) -> None:
        raise KeyboardInterrupt

    program, fake = make(interrupt)
    with pytest.raises(KeyboardInterrupt):
        program.run(data(), ALL_GRADIENTS)
    assert fake.depth == 0


# --- memory is kept -------------------------------------------------------------------------------------------------


def test_inputs_that_can_change_are_freed_after_the_call(make: Make) -> None:
    program, fake = make()
    inputs = data()
    for call in (program.run, program.time):
        call(inputs, ALL_GRADIENTS)
        assert len(fake.allocated) == 2
    inputs.x[0, 0] += 1.0
    got, right = program.run(inputs, ALL_GRADIENTS), reference(inputs, ALL_GRADIENTS)
    assert got.dx is not None and right.dx is not None
    np.testing.assert_array_equal(got.dx, right.dx.astype(np.float32))


def test_inputs_are_freed_after_a_call_that_failed(make: Make) -> None:
    program, fake = make(writes("x", 0))
    with pytest.raises(LaunchError):
        program.run(data(), ALL_GRADIENTS)
    assert len(fake.allocated) == 2


def test_read_only_inputs_are_uploaded_once_and_memory_is_reused(make: Make) -> None:
    program, fake = make()
    inputs = read_only(data())
    for _ in range(3):
        program.run(inputs, ALL_GRADIENTS)
        program.run(inputs, frozenset(("db",)))
    assert fake.uploads == 5
    assert len(fake.allocated) == 3


def test_changed_inputs_are_uploaded_again(make: Make) -> None:
    program, fake = make(writes("x", 0))
    inputs = read_only(data())
    with pytest.raises(LaunchError):
        program.run(inputs, ALL_GRADIENTS)
    fake.kernels["kernel"] = solve
    got, right = program.run(inputs, ALL_GRADIENTS), reference(inputs, ALL_GRADIENTS)
    assert got.dx is not None and right.dx is not None
    np.testing.assert_array_equal(got.dx, right.dx.astype(np.float32))


def test_kept_inputs_are_bounded_and_close_frees_all(executor: tuple[CudaExecutor, FakeCuda], make: Make) -> None:
    program, fake = make()
    for _ in range(40):
        program.run(read_only(data()), ALL_GRADIENTS)
    assert len(fake.allocated) == 16 + 2
    executor[0].close()
    assert not fake.allocated
    assert program.run(data(), ALL_GRADIENTS).dx is not None


def test_kept_inputs_give_way_when_memory_is_short(make: Make) -> None:
    program, fake = make()
    for _ in range(4):
        program.run(read_only(data()), ALL_GRADIENTS)
    fake.free_bytes = 0
    got = program.run(read_only(data()), ALL_GRADIENTS)
    assert got.dx is not None
    assert len(fake.allocated) == 3


def test_many_threads_take_turns(make: Make) -> None:
    program, fake = make()
    cases = [data(rows) for rows in range(1, 9)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda inputs: program.run(inputs, ALL_GRADIENTS), cases * 4))
    for inputs, got in zip(cases * 4, results, strict=True):
        right = reference(inputs, ALL_GRADIENTS)
        assert got.dx is not None and right.dx is not None
        np.testing.assert_array_equal(got.dx, right.dx.astype(np.float32))
    assert fake.depth == 0


# --- times ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step_us", "repeats", "samples"), [
    (20.0, 3, 20), (0.1, 200, 20), (200.0, 1, 20), (20_000.0, 1, 5), (600_000.0, 1, 1)])
def test_calls_are_put_together_and_samples_kept_in_the_budget(make: Make, step_us: float, repeats: int, samples: int) -> None:
    program, fake = make(plan=Plan((Fill(("db",)), Launch("kernel", const(1), 32))))
    fake.call_ms = step_us / 1e3
    timing = program.time(data(), ALL_GRADIENTS, samples=20, budget_s=0.2)
    assert (timing.repeats, len(timing.samples)) == (repeats, samples)
    assert timing.median == pytest.approx(2 * step_us)  # the fill is timed too
    assert not fake.graphs and fake.depth == 0
    if samples == 1:
        assert len(fake.launches) == 2, "a call beyond the budget runs once to warm up and once to be timed"


def test_ctrl_c_during_a_capture_leaves_nothing_behind(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    program, fake = make(plan=Plan((Launch("kernel", const(1), 32), Fill(("db",)))))

    def interrupt(*arguments: object) -> None:
        if fake.capturing:
            raise KeyboardInterrupt

    monkeypatch.setattr(fake.driver, "memset_d32_async", interrupt)
    with pytest.raises(KeyboardInterrupt):
        program.time(data(), ALL_GRADIENTS)
    assert not fake.capturing and not fake.graphs and fake.depth == 0


def test_a_call_that_cannot_be_captured_leaves_nothing_behind(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    program, fake = make()
    monkeypatch.setattr(fake.bindings, "cuGraphInstantiate", lambda graph, flags: (1, None))
    with pytest.raises(LaunchError, match=r"the GPU refused the work: .* \(cuGraphInstantiate\)"):
        program.time(data(), ALL_GRADIENTS)
    assert not fake.graphs and fake.depth == 0
