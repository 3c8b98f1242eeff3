"""The host executor: what it makes of rendered sources, of a missing compiler, of several threads."""

from __future__ import annotations

import ctypes
import json
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from codegen.limits import target
from codegen.problem import ALL_GRADIENTS, GRADIENTS, Problem
from codegen.render import Source, render
from codegen.space import make_config
from tests.configs import OF_FLOAT32
from tuner.compare import bound_fault
from tuner.errors import CompileError, LaunchError, ToolchainError
from tuner.executors.host import HostExecutor
from tuner.executors.host_runtime import Kernels, Layout
from tuner.executors.host_toolchain import find_compiler
from tuner.inputs import Inputs, random_inputs
from tuner.store import Store

ROWS, HIDDEN, OUT = 21, 24, 5


def source(variant: str = "row_thread") -> Source:
    return render(Problem(ROWS, HIDDEN, OUT), make_config(variant))


# --- Rendered sources -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["end", "begin"])
@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled:7"])
@pytest.mark.parametrize("variant", OF_FLOAT32)
def test_rendered_source_gives_the_gradients(variant: str, order: str, layout: Layout, host_executor: HostExecutor) -> None:
    inputs = random_inputs(ROWS, HIDDEN, OUT)
    got = host_executor.compile(source(variant)).run(inputs, ALL_GRADIENTS, order=order, layout=layout)
    assert bound_fault(inputs, got) is None


@pytest.mark.parametrize("wants", [frozenset({name}) for name in GRADIENTS])
def test_only_wanted_gradients_are_there(wants: frozenset[str], host_executor: HostExecutor) -> None:
    inputs = random_inputs(ROWS, HIDDEN, OUT)
    got = host_executor.compile(source()).run(inputs, wants)
    assert set(got.present()) == wants and bound_fault(inputs, got, wants) is None


@pytest.mark.parametrize("absent", [{"gamma"}, {"beta"}, {"gamma", "beta"}])
def test_absent_gamma_and_beta(absent: set[str], host_executor: HostExecutor) -> None:
    full = random_inputs(ROWS, HIDDEN, OUT)
    inputs = Inputs(full.dy, full.x, None if "gamma" in absent else full.gamma, None if "beta" in absent else full.beta,
                    full.w, full.eps)
    assert bound_fault(inputs, host_executor.compile(source()).run(inputs, ALL_GRADIENTS)) is None


def test_no_rows(host_executor: HostExecutor) -> None:
    got = host_executor.compile(source()).run(random_inputs(0, HIDDEN, OUT), ALL_GRADIENTS)
    assert got.dx is not None and got.dx.shape == (0, HIDDEN)
    assert all(not array.any() for array in got.present().values())


def test_inputs_may_hold_nan(host_executor: HostExecutor) -> None:
    inputs = random_inputs(ROWS, HIDDEN, OUT)
    inputs.x[3, 4] = np.nan
    got = host_executor.compile(source()).run(inputs, ALL_GRADIENTS)
    assert got.dx is not None and np.isnan(got.dx[3]).all() and np.isfinite(np.delete(got.dx, 3, axis=0)).all()


def test_device_names_the_compiler(host_executor: HostExecutor) -> None:
    assert host_executor.name == "host" and host_executor.device == f"host ({find_compiler().label})"


# --- Compilers --------------------------------------------------------------------------------------------------


def test_refused_source(host_executor: HostExecutor) -> None:
    with pytest.raises(CompileError) as caught:
        host_executor.load("struct Params {};\nextern \"C\" __global__ void k(Params p) { undeclared(); }\n", ("k",))
    sentence = str(caught.value)
    assert "\n" not in sentence and "kernel.cu:2:" in sentence and "undeclared" in sentence


def test_shared_memory_of_another_kind_is_refused(host_executor: HostExecutor) -> None:
    with pytest.raises(CompileError, match="__shared__"):
        host_executor.load("struct Params {};\nextern \"C\" __global__ void k(Params p) { __shared__ float s[3]; }\n", ("k",))


def test_missing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    says = "no C++ compiler found (tried g++, clang++, c++); install g++, or set CXX to a C++17 compiler"
    with pytest.raises(ToolchainError) as caught:
        HostExecutor(target("sm_90"), Store(tmp_path))
    assert str(caught.value) == says


@pytest.mark.parametrize("command", ["no-such-compiler -O1", "false"])
def test_compiler_that_does_not_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", command)
    with pytest.raises(ToolchainError) as caught:
        find_compiler()
    says = f"no C++ compiler found (CXX is '{command}', which does not run); install g++, or set CXX to a C++17 compiler"
    assert str(caught.value) == says


def test_arguments_in_cxx(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = find_compiler()
    monkeypatch.setenv("CXX", f"{plain.command[0]} -DCHOSEN=1")
    assert find_compiler().command == (plain.command[0], "-DCHOSEN=1")


def test_compiled_folder_explains_itself(host_executor: HostExecutor, store: Store) -> None:
    text = source().text
    host_executor.compile(source())
    folders = [path.parent for path in store.root.glob("*/*/shim.cpp") if path.with_name("kernel.cu").read_text() == text]
    assert folders
    for folder in folders:
        assert {path.name for path in folder.iterdir()} == {"kernel.cu", "shim.cpp", "kernel.so", "key.json"}
    keys = [json.loads((folder / "key.json").read_text())["key"] for folder in folders]
    assert all(key["kind"].startswith("host kernel") for key in keys)
    assert find_compiler().version in {key["compiler"] for key in keys}


def test_damaged_kernel_is_compiled_again(host_executor: HostExecutor, store: Store) -> None:
    text = f"// {time.time_ns()}\nstruct Params {{}};\nextern \"C\" __global__ void k(Params p) {{}}\n"
    host_executor.load(text, ("k",))
    [library] = [path.parent / "kernel.so" for path in store.root.glob("*/*/kernel.cu") if path.read_text() == text]
    sound = library.read_bytes()
    library.unlink()
    library.write_bytes(sound[: len(sound) // 2])
    host_executor.load(text, ("k",))
    assert library.stat().st_size == len(sound)


# --- Threads and signals ----------------------------------------------------------------------------------------

LOOPS = """
struct Params { const float* x; float* y; int64_t n; };
extern "C" __global__ void sum(const __grid_constant__ Params p) {
  float total = 0.0f;
  for (int64_t i = 0; i < p.n; ++i) total += __shfl_xor_sync(0xffffffffu, p.x[(i + threadIdx.x) % 32], 1);
  p.y[threadIdx.x] = total;
}
extern "C" __global__ void stray(const __grid_constant__ Params p) {
  for (int64_t i = 0; i < p.n; ++i) p.y[0] += p.x[i];
}
"""


@pytest.fixture(scope="module")
def loops(host_executor: HostExecutor) -> Kernels:
    return host_executor.load(LOOPS, ("sum", "stray"))


def run_loop(loops: Kernels, name: str, n: int, x: NDArray[np.float32]) -> NDArray[np.float32]:
    with loops.memory() as memory:
        params = struct.pack("<QQq", memory.add_input("x", x), memory.add_output("y", (32,)), n)
        loops.launch(name, grid=1, block=32, params=params, memory=memory)
        return memory.read("y")


def test_launches_in_several_threads(loops: Kernels) -> None:
    def sums(factor: int) -> bool:
        x = np.full(32, factor, np.float32)
        return all((run_loop(loops, "sum", 200, x) == 200 * factor).all() for _ in range(50))

    def strays(size: int) -> bool:
        for _ in range(200):
            with pytest.raises(LaunchError, match=f"reads element {size} of x, which has {size} elements"):
                run_loop(loops, "stray", 1000, np.ones(size, np.float32))
        return True

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(sums, 1), pool.submit(strays, 77), pool.submit(sums, 3), pool.submit(strays, 33)]
        assert all(job.result() for job in jobs)


def test_other_python_threads_go_on_during_a_launch(loops: Kernels) -> None:
    turns, done = 0, threading.Event()

    def launch() -> None:
        run_loop(loops, "sum", 200_000, np.ones(32, np.float32))
        done.set()

    thread = threading.Thread(target=launch)
    thread.start()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 10


def test_same_source_compiled_by_many_threads(host_executor: HostExecutor) -> None:
    text = f"// {time.time_ns()}\n{LOOPS}"
    with ThreadPoolExecutor(4) as pool:
        for kernels in pool.map(lambda _: host_executor.load(text, ("sum", "stray")), range(8)):
            assert (run_loop(kernels, "sum", 3, np.ones(32, np.float32)) == 3.0).all()


CRASH = """
import ctypes, faulthandler, struct, sys, threading, time
import numpy as np
from codegen.limits import target
from tuner.errors import LaunchError
from tuner.executors.host import HostExecutor
from tuner.store import Store
from pathlib import Path
if sys.argv[3] == "handled":
    faulthandler.enable()
LOOPS = sys.stdin.read()
kernels = HostExecutor(target("sm_90"), Store(Path(sys.argv[1]))).load(LOOPS, ("sum", "stray"))

def run(name, n):
    with kernels.memory() as memory:
        params = struct.pack("<QQq", memory.add_input("x", np.ones(32, np.float32)), memory.add_output("y", (32,)), n)
        kernels.launch(name, grid=1, block=32, params=params, memory=memory)

try:
    run("stray", 1000)
except LaunchError as error:
    print(error, flush=True)
if sys.argv[2] == "during":
    threading.Thread(target=run, args=("sum", 10**9), daemon=True).start()
    time.sleep(0.3)
ctypes.string_at(0)
"""


@pytest.mark.parametrize("handled", [True, False])
@pytest.mark.parametrize("when", ["after", "during"])
def test_faults_of_others_reach_the_handlers_that_were_there(when: str, handled: bool, store: Store, loops: Kernels) -> None:
    command = [sys.executable, "-c", CRASH, str(store.root), when, "handled" if handled else "default"]
    done = subprocess.run(command, input=LOOPS, text=True, capture_output=True, cwd=Path(__file__).parent.parent, timeout=60)
    assert "reads element 32 of x" in done.stdout
    assert done.returncode == -signal.SIGSEGV
    assert ("Fatal Python error: Segmentation fault" in done.stderr) == handled


def test_handlers_are_put_back(loops: Kernels) -> None:
    def handler() -> bytes:
        action = ctypes.create_string_buffer(256)  # room for a struct sigaction, which begins with the handler's address
        assert ctypes.CDLL(None).sigaction(int(signal.SIGSEGV), None, action) == 0
        return action.raw[:8]

    before = handler()
    run_loop(loops, "sum", 1, np.ones(32, np.float32))
    with pytest.raises(LaunchError):
        run_loop(loops, "stray", 1000, np.ones(32, np.float32))
    assert handler() == before


# --- Misuse -----------------------------------------------------------------------------------------------------


def test_params_of_the_wrong_size(loops: Kernels) -> None:
    with loops.memory() as memory, pytest.raises(ValueError, match="params has 8 bytes, but struct Params of the source has 24"):
        loops.launch("sum", grid=1, block=32, params=bytes(8), memory=memory)
