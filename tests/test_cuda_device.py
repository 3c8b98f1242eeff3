"""The CUDA executor on a GPU: what it promises about hand-written kernels that break its rules, and about whole processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from codegen.expr import ROWS, Expr, const
from codegen.params import declaration
from codegen.plan import Buffer, Fill, Launch, Plan
from codegen.problem import ALL_GRADIENTS, GRADIENTS, Problem
from codegen.render import Source, render
from codegen.space import make_config
from tests.cases import DATA_TYPES
from tests.configs import config_with
from tuner.bounds import bounds
from tuner.compare import bound_fault
from tuner.dtypes import NUMPY
from tuner.errors import LaunchError
from tuner.executors.cuda import CudaExecutor, CudaProgram
from tuner.inputs import Inputs, random_inputs
from tuner.reference import reference

pytestmark = pytest.mark.cuda

ROOT = Path(__file__).resolve().parent.parent
HIDDEN, OUT = 8, 16
DX, DB = frozenset(("dx",)), frozenset(("db",))


@pytest.fixture
def gpu(cuda_executor: CudaExecutor) -> CudaExecutor:
    return cuda_executor


def program(gpu: CudaExecutor, body: str, *, grid: Expr | int = 1, block: int = 32, shared: int = 0,
            before: tuple[Fill, ...] = (), workspace: tuple[Buffer, ...] = (), dtype: str = "float32") -> CudaProgram:
    """One kernel with that body, which sees `p`, its thread `t` and its dynamic shared memory `s`.

    16-bit elements are unsigned short to it.
    """
    plan = Plan((*before, Launch("k", const(grid) if isinstance(grid, int) else grid, block, shared)), workspace)
    element = {4: "float", 2: "unsigned short"}[NUMPY[dtype].itemsize]
    text = f"""using bfloat16_t = unsigned short;
using data_t = {element};
using param_t = {element};
{declaration(plan)}
extern __shared__ float s[];
extern "C" __global__ void k(const __grid_constant__ Params p) {{
  const long long t = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  {body}
}}
"""
    return gpu.compile(Source(Problem(4, HIDDEN, OUT, dtype), make_config("row_thread"), text, plan))


def data(rows: int = 4) -> Inputs:
    return random_inputs(rows, HIDDEN, OUT)


@pytest.mark.parametrize("rows", [0, 1, 16, 17, 4096])
@pytest.mark.parametrize("variant", ["row_thread", "row_warp", "row_shared"])
def test_rendered_kernels_give_the_reference(gpu: CudaExecutor, variant: str, rows: int) -> None:
    inputs = data(rows)
    got = gpu.compile(render(Problem(rows, HIDDEN, OUT), make_config(variant))).run(inputs, ALL_GRADIENTS).present()
    right, allowed = reference(inputs, ALL_GRADIENTS).present(), bounds(inputs, ALL_GRADIENTS).present()
    for name in GRADIENTS:
        assert got[name].shape == right[name].shape
        assert (np.abs(got[name] - right[name]) <= allowed[name]).all(), name


@pytest.mark.parametrize("rows", [1, 17, 300])
@pytest.mark.parametrize(("dtype", "param_dtype"), DATA_TYPES)
@pytest.mark.parametrize("variant", ["row_thread", "row_warp", "row_shared"])
def test_n9_every_data_type_gives_the_reference(gpu: CudaExecutor, variant: str, dtype: str, param_dtype: str, rows: int) -> None:
    inputs = random_inputs(rows, HIDDEN, OUT, dtype=dtype, param_dtype=param_dtype)
    problem = Problem(rows, HIDDEN, OUT, dtype, param_dtype=param_dtype)
    config = config_with(problem, gpu.limits, variant, "two_pass")
    assert config is not None
    got = gpu.compile(render(problem, config)).run(inputs, ALL_GRADIENTS)
    assert {array.dtype for array in (got.dx, got.dw)} == {NUMPY[dtype], NUMPY[param_dtype]}
    assert bound_fault(inputs, got) is None


@pytest.mark.parametrize(("body", "sentence"), [
    ("if (t == 0) p.db[16] = 1;", "wrote 0 bytes past the end of db"),
    ("if (t == 0) p.db[-1] = 1;", "wrote 2 bytes before the start of db"),
    ("if (t == 0) p.scratch[7] = 1;", "wrote 0 bytes past the end of scratch"),
    ("if (t == 0) p.bytes[5] = 1;", "wrote 0 bytes past the end of bytes"),
    ("if (t == 0) const_cast<unsigned short*>(p.x)[5] = 0;", "wrote into the input x"),
])
def test_one_short_element_written_elsewhere_is_found(gpu: CudaExecutor, body: str, sentence: str) -> None:
    kernel = program(gpu, body, dtype="float16", workspace=(
        Buffer("scratch", const(7), "bfloat16"), Buffer("bytes", const(5), "uint8")))
    with pytest.raises(LaunchError) as caught:
        kernel.run(random_inputs(4, HIDDEN, OUT, dtype="float16"), DB)
    assert str(caught.value) == f"the kernel {sentence}"


@pytest.mark.parametrize(("prefill", "found"), [(float("nan"), 0x7FED), (7.0, 0x4700)])
def test_r3_short_elements_are_filled_and_zeroed(gpu: CudaExecutor, prefill: float, found: int) -> None:
    zeroed = program(gpu, "if (t < 7) p.db[t] = p.scratch[t]; else if (t < 14) p.db[t] = p.old[t - 7];", dtype="float16",
                     before=(Fill(("scratch",)),), workspace=(Buffer("scratch", const(7), "bfloat16"),
                                                              Buffer("old", const(7), "bfloat16")))
    got = zeroed.run(random_inputs(4, HIDDEN, OUT, dtype="float16"), DB, prefill=prefill).db
    assert got is not None
    short = 0x40E0 if prefill == 7.0 else found  # 7 in bfloat16
    assert got.view(np.uint16).tolist() == [0] * 7 + [short] * 7 + [found] * 2


def test_params_arrive_as_they_were_packed(gpu: CudaExecutor) -> None:
    kernel = program(gpu, "if (t == 0) { p.db[0] = p.rows; p.db[1] = p.eps; p.db[2] = p.splits; p.db[3] = p.mean == nullptr; "
                          "p.db[4] = p.dx == nullptr; p.db[5] = p.dy[3]; p.db[6] = p.w[OUT_LAST]; }"
                          .replace("OUT_LAST", str(HIDDEN * OUT - 1)))
    inputs = data()
    got = kernel.run(inputs, DB).db
    assert got is not None
    assert got[:7].tolist() == [4.0, np.float32(1e-5), 1.0, 1.0, 1.0, inputs.dy[0, 3], inputs.w[-1, -1]]
    assert np.isnan(got[7:]).all()


@pytest.mark.parametrize(("body", "sentence"), [
    ("if (t == 0) p.dx[4 * 8] = 1.0f;", "wrote 0 bytes past the end of dx"),
    ("if (t == 0) p.dx[-1] = 1.0f;", "wrote 4 bytes before the start of dx"),
    ("if (t == 0) p.scratch[7] = 1.0f;", "wrote 0 bytes past the end of scratch"),
    ("if (t == 0) p.scratch[-3] = 1.0f;", "wrote 12 bytes before the start of scratch"),
    ("if (t == 0) const_cast<float*>(p.x)[5] = 0.0f;", "wrote into the input x"),
    ("if (t == 0) const_cast<float*>(p.w)[128] = 0.0f;", "wrote 0 bytes past the end of w"),
    ("const_cast<float*>(p.dy)[t] = p.dy[t] == p.dy[t] ? -p.dy[t] : 0.0f;", "wrote into the input dy"),
])
def test_writing_elsewhere_is_found(gpu: CudaExecutor, body: str, sentence: str) -> None:
    inputs = data()
    with pytest.raises(LaunchError) as caught:
        program(gpu, body, workspace=(Buffer("scratch", const(7)),)).run(inputs, DX)
    assert str(caught.value) == f"the kernel {sentence}"
    assert program(gpu, "if (t < 32) p.dx[t] = p.x[t];").run(inputs, DX).dx is not None


def test_reading_past_an_input_gives_nan(gpu: CudaExecutor) -> None:
    got = program(gpu, "if (t == 0) p.db[0] = p.x[4 * 8] + p.gamma[-1] * 0.0f;").run(data(), DB).db
    assert got is not None and np.isnan(got[0])


@pytest.mark.parametrize("prefill", [float("nan"), 7.0])
def test_r3_a_run_begins_with_filled_outputs_and_fills_are_steps(gpu: CudaExecutor, prefill: float) -> None:
    kernel = program(gpu, "if (t < 4) p.db[t] += 1.0f; else if (t < 8) p.db[t] = p.scratch[t - 4] + 1.0f;",
                     workspace=(Buffer("scratch", const(4)),))
    for _ in range(2):
        got = kernel.run(data(), DB, prefill=prefill).db
        assert got is not None
        np.testing.assert_array_equal(got, [prefill + 1.0] * 8 + [prefill] * 8)
    filled = program(gpu, "if (t < 16) p.db[t] += 1.0f;", before=(Fill(("db", "dw")),)).run(data(), DB, prefill=prefill).db
    assert filled is not None and (filled == 1.0).all()


def test_p5_shared_memory_beyond_48_kb(gpu: CudaExecutor) -> None:
    most = gpu.limits.shared_per_block
    assert most > 48 << 10
    body = f"const int last = {most} / 4 - 1; if (t == 0) s[last] = 3.0f; __syncthreads(); if (t == 1) p.db[0] = s[last];"
    got = program(gpu, body, shared=most).run(data(), DB).db
    assert got is not None and got[0] == 3.0
    with pytest.raises(LaunchError, match=f"k asks for {most + 4} bytes of shared memory a block; .* allows {most}"):
        program(gpu, body, shared=most + 4).run(data(), DB)


def test_grids_of_zero_and_too_many_blocks(gpu: CudaExecutor) -> None:
    kernel = program(gpu, "if (t == 0) p.db[0] = 1.0f;", grid=ROWS * (1 << 29))
    got = kernel.run(data(0), DB).db
    assert got is not None and np.isnan(got).all()
    with pytest.raises(LaunchError, match="k asks for a grid of 2147483648 blocks"):
        kernel.run(data(4), DB)


def test_a_refused_launch_is_no_end(gpu: CudaExecutor) -> None:
    # 255 registers a thread do not go together with 1024 threads.
    sums = " ".join(f"a[{i}] = fmaf(a[{i}], a[{(i + 7) % 200}], c);" for i in range(200))
    body = (f"float a[200], b = 0.0f; const float c = p.x[0]; for (int i = 0; i < 200; ++i) a[i] = p.w[i % 128] * i; "
            f"for (int n = 0; n < p.rows; ++n) {{ {sums} }} for (int i = 0; i < 200; ++i) b += a[i]; p.dx[t % 32] = b;")
    kernel = program(gpu, body, block=1024)
    assert kernel.resources["k"].registers > 64
    with pytest.raises(LaunchError, match="the GPU refused the work: too many resources requested for launch"):
        kernel.run(data(), DX)
    assert program(gpu, "if (t < 32) p.dx[t] = 0.0f;").run(data(), DX).dx is not None


def test_threads_that_are_not_the_first_can_run_and_time(gpu: CudaExecutor) -> None:
    kernel = program(gpu, "if (t < 4) p.db[t] = p.dy[t];")
    cases = [random_inputs(4, HIDDEN, OUT, seed) for seed in range(16)]

    def work(inputs: Inputs) -> bool:
        got = kernel.run(inputs, DB).db
        return got is not None and np.array_equal(got[:4], inputs.dy[0, :4]) and kernel.time(inputs, DB, samples=3).median > 0.0

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, cases))


def test_compiling_beside_a_capture_does_not_disturb_it(gpu: CudaExecutor) -> None:
    kernel, inputs, done = program(gpu, "if (t < 4) p.db[t] = 0.0f;"), data(), threading.Event()

    def load() -> int:
        count = 0
        while not done.is_set():
            program(gpu, f"if (t < 4) p.db[t] = {count % 3}.0f;").run(inputs, DB)
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(load)
        for _ in range(20):
            kernel.time(inputs, DB)
        done.set()
        assert loaded.result() > 0


# --- times ------------------------------------------------------------------------------------------------------------


def spin(gpu: CudaExecutor, microseconds: float, **more: object) -> CudaProgram:
    """A kernel that waits; %globaltimer counts nanoseconds."""
    return program(gpu, f"""
      long long start, now;
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
      do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < {round(1e3 * microseconds)});
      if (t == 0) p.db[0] = 1.0f;""", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("microseconds", [20.0, 500.0, 20_000.0])
def test_a_kernel_of_known_length(gpu: CudaExecutor, microseconds: float) -> None:
    timing = spin(gpu, microseconds).time(data(), DB)
    assert microseconds <= timing.median <= 1.1 * microseconds + 3.0
    assert timing.repeats == (pytest.approx(5, abs=2) if microseconds < 100.0 else 1)
    assert len(timing.samples) == 20 if microseconds < 1000.0 else 5 <= len(timing.samples) < 20


def test_fills_and_every_launch_are_timed(gpu: CudaExecutor) -> None:
    body, inputs = "if (t < 16) p.db[t] += 1.0f;", data()
    plain = program(gpu, body).time(inputs, DB).median
    filled = program(gpu, body, before=(Fill(("db",)),)).time(inputs, DB).median
    assert gpu.limits.launch_us * 0.5 < plain < 5.0
    assert plain + 0.3 < filled < plain + 5.0


def test_measured_rates_agree_with_the_limits(gpu: CudaExecutor) -> None:
    assert gpu.measure_launch_us() == pytest.approx(gpu.limits.launch_us, rel=0.5)
    assert gpu.measure_copy_tbps() == pytest.approx(gpu.limits.copy_tbps, rel=0.15)


# --- whole processes --------------------------------------------------------------------------------------------------

PRELUDE = """
import sys
from tests.test_cuda_device import DB, DX, data, program
from tuner.errors import LaunchError
from tuner.executors.cuda import CudaExecutor
from codegen.expr import const
gpu = CudaExecutor()
fine = program(gpu, "if (t < 16) p.db[t] = 1.0f;")
fine.run(data(), DB)
"""


def run_process(code: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-c", PRELUDE + code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "PyCUDA" not in done.stderr and "could not be cleaned up" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize(("code", "status"), [
    ("", 0),
    ("gpu.close()", 0),
    ("sys.exit(3)", 3),
    ("raise ValueError", 1),
    ("gpu._gpu.active().__enter__(); sys.exit(3)", 3),
    ("import threading; thread = threading.Thread(target=lambda: fine.run(data(), DB)); thread.start(); thread.join()", 0),
])
def test_p2_processes_end_without_an_abort(code: str, status: int) -> None:
    assert run_process(code).returncode == status


@pytest.mark.parametrize(("body", "reason"), [
    ("p.dx[1ll << 40] = 1.0f;", "an illegal memory access was encountered"),
    ("*(float*)((char*)p.dx + 2) = 1.0f;", "misaligned address"),
    ("asm volatile(\"trap;\");", "unspecified launch failure"),
])
def test_after_a_fault_the_process_ends_in_order(body: str, reason: str) -> None:
    done = run_process(f"""
bad = program(gpu, {body!r})
for work in (bad.run, fine.run, fine.time, bad.time):
    try:
        work(data(), DX if work == bad.run else DB)
    except LaunchError as error:
        print(error)
gpu.close()
sys.exit(4)
""")
    first, *others = done.stdout.splitlines()
    assert done.returncode == 4, done.stderr
    assert first == f"the kernel failed and took the process's GPU context with it: {reason}"
    assert len(others) == 3
    assert all(line.startswith("the GPU cannot be used by this process any more") for line in others)


def test_t7_a_runtime_context_of_another_library_is_left_as_it_was() -> None:
    done = run_process("""
driver = gpu._gpu.bindings
other = driver.cuCtxGetCurrent()[1]
assert int(other) == 0
_, primary = driver.cuDevicePrimaryCtxRetain(0)
driver.cuCtxSetCurrent(primary)
fine.run(data(), DB)
assert int(driver.cuCtxGetCurrent()[1]) == int(primary) != 0
_, address = driver.cuMemAlloc(64)
assert int(address) != 0
""")
    assert done.returncode == 0, done.stderr
