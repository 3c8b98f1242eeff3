"""Real kernels in the store: whatever becomes of its files, and whoever shares it, results are right all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tuner
from codegen.limits import target
from codegen.problem import Problem
from codegen.render import render
from codegen.space import parse_config
from tests.test_store import cut, empty, noise
from tuner.compare import bound_fault
from tuner.executors import Executor
from tuner.executors.host import HostExecutor
from tuner.inputs import random_inputs
from tuner.store import Store
from tuner.toolchain import find_nvcc

RUNTIME = "libcuda_on_host.so"

PROCESS = """
import sys
import tuner
from tuner.compare import bound_fault
from tuner.inputs import random_inputs

sys.stdin.read()
data = random_inputs(6, 8, 5)
result = tuner.backward(data.dy, data.x, data.gamma, data.beta, data.w, executor="host", config="row_thread")
assert bound_fault(data, result) is None
"""
"""A call in a process of its own: one that has a library loaded already would not look at the file again."""


def start(store: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PROCESS], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            cwd=Path(__file__).parent.parent, env={**os.environ, "LNL_STORE": str(store)})


def end(process: subprocess.Popen[str]) -> None:
    """Lets it go on and sees that it was right, and said nothing."""
    _, errors = process.communicate("")
    assert (errors, process.returncode) == ("", 0)


def files(store: Path) -> dict[str, bytes]:
    """All that lies in the entries."""
    return {str(path.relative_to(store)): path.read_bytes() for path in sorted(store.glob("*/*/**/*")) if path.is_file()}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that two processes filled at once: the runtime and one kernel."""
    store = tmp_path_factory.mktemp("store")
    both = [start(store), start(store)]
    for process in both:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    for process in both:
        end(process)
    return store


def test_processes_that_share_a_cold_store_leave_one_entry_each(filled: Path) -> None:
    assert len(list(filled.glob("*/*"))) == 2
    before = files(filled)
    end(start(filled))
    assert files(filled) == before


@pytest.mark.parametrize("damage", [cut, empty, noise])
@pytest.mark.parametrize("name", ["kernel.so", "kernel.cu", "shim.cpp", "key.json", RUNTIME])
def test_each_damaged_file_is_made_again(filled: Path, name: str, damage: Callable[[Path], None]) -> None:
    before = files(filled)
    kernel = next(Path(each).parent for each in before if each.endswith("/kernel.so"))
    chosen = [each for each in before if Path(each).name == name and (Path(each).parent == kernel) == (name != RUNTIME)]
    assert len(chosen) == 1
    damage(filled / chosen[0])
    end(start(filled))
    assert files(filled) == before


@pytest.mark.parametrize("damage", [cut, empty, noise])
def test_a_header_damaged_under_an_open_executor_spoils_no_kernel(filled: Path, damage: Callable[[Path], None]) -> None:
    before = files(filled)
    executor = HostExecutor(target("sm_90"), Store(filled))
    damage(filled / next(name for name in before if name.endswith("/cuda_on_host.h")))
    data = random_inputs(6, 8, 5)
    threads = {cut: 64, empty: 32, noise: 256}[damage]  # one that the store does not have yet
    result = tuner.backward(data.dy, data.x, data.gamma, data.beta, data.w, executor=executor,
                            config=f"row_thread:threads={threads}")
    assert bound_fault(data, result) is None
    assert {name: content for name, content in files(filled).items() if name in before} == before


def test_executors_on_two_stores_in_one_process(filled: Path, host_executor: Executor) -> None:
    data = random_inputs(6, 8, 5)
    for executor in (host_executor, HostExecutor(target("sm_90"), Store(filled)), host_executor):
        result = tuner.backward(data.dy, data.x, data.gamma, data.beta, data.w, executor=executor, config="row_thread:threads=32")
        assert bound_fault(data, result) is None


@pytest.mark.parametrize("damage", [cut, empty, noise])
def test_a_damaged_cubin_is_made_again(damage: Callable[[Path], None], tmp_path: Path) -> None:
    source = render(Problem(6, 8, 5), parse_config("row_thread"))
    nvcc, store = find_nvcc("sm_90a"), Store(tmp_path)
    binary = nvcc.compile(source.text, "sm_90a", store)
    size, folder = binary.cubin.stat().st_size, binary.cubin.parent
    for name in sorted(path.name for path in folder.iterdir()):
        damage(folder / name)
        assert nvcc.compile(source.text, "sm_90a", store) == binary
        assert binary.cubin.stat().st_size == size and binary.cubin.read_bytes().startswith(b"\x7fELF")
