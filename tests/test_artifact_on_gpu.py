"""The artifact on a GPU: built by nvcc as a shared library, and called through ctypes on memory of the bare driver."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from codegen.arithmetic import OWN_ARITHMETIC
from codegen.artifact import ArtifactKernel, ArtifactText, artifact
from codegen.limits import TARGETS, target
from codegen.problem import GRADIENTS, Problem, Shape
from codegen.render import render
from codegen.tensors import INPUTS
from codegen.variants import VARIANTS
from tests.artifact_cases import INFO
from tests.cases import DATA_TYPES
from tests.configs import OF_FLOAT32
from tests.variant_cases import SMALL_SHAPE, config_of, fitted
from tuner.artifact import serve_all_rows
from tuner.compare import bound_fault
from tuner.executors.arrays import output_specs
from tuner.guess import best_predicted
from tuner.inputs import Gradients, Inputs, random_inputs
from tuner.toolchain import find_nvcc
from tuner.validate import Validator

pytestmark = pytest.mark.cuda

PROBLEMS = (("4,4,8,16", "float32", "float32"), ("32,16,64,64", "float32", "float32"), ("32,16,64,64", "bfloat16", "bfloat16"),
            ("32,16,64,64", "float16", "float32"))
ALL = frozenset(GRADIENTS)
COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76


class Gpu:
    """Device 0 through the driver's C interface: its primary context, which the runtime in the artifact shares, and memory."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)
        self("cuCtxPushCurrent_v2", self._context)

    def close(self) -> None:
        self("cuCtxPopCurrent_v2", ctypes.byref(self._context))
        self("cuDevicePrimaryCtxRelease_v2", 0)

    def __call__(self, function: str, *arguments: object) -> None:
        code = self._driver[function](*arguments)
        assert code == 0, f"{function} failed with {code}"

    @property
    def arch(self) -> str:
        """As nvcc spells it, with all instructions of the architecture: sm_90a, not sm_90."""
        digits = []
        for attribute in (COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR):
            value = ctypes.c_int()
            self("cuDeviceGetAttribute", ctypes.byref(value), attribute, 0)
            digits.append(value.value)
        name = "sm_{}{}".format(*digits)
        return target(name).arch if name in TARGETS else name

    @contextmanager
    def memory(self, arrays: dict[str, np.ndarray], shifted: frozenset[str] = frozenset()) -> Iterator[dict[str, int]]:
        """Copies of the arrays on the device, by name; those `shifted` begin one element after an aligned address."""
        allocated: list[int] = []
        addresses: dict[str, int] = {}
        try:
            for name, array in arrays.items():
                address, before = ctypes.c_uint64(), array.itemsize * (name in shifted)
                self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(before + array.nbytes, 4)))
                allocated.append(address.value)
                addresses[name] = address.value + before
                self("cuMemcpyHtoD_v2", ctypes.c_uint64(addresses[name]), ctypes.c_void_p(array.ctypes.data),
                     ctypes.c_size_t(array.nbytes))
            yield addresses
        finally:
            for at in allocated:
                self("cuMemFree_v2", ctypes.c_uint64(at))

    def read(self, address: int, array: np.ndarray) -> None:
        """Waits for the device and fills the array from there."""
        self("cuCtxSynchronize")
        self("cuMemcpyDtoH_v2", ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(address), ctypes.c_size_t(array.nbytes))


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    opened = Gpu()
    yield opened
    opened.close()


def best(shape: str, dtype: str, param_dtype: str) -> tuple[Problem, ArtifactText]:
    """The artifact of the config that the cost model takes, within limits that every GPU keeps."""
    parsed, limits = Shape.parse(shape), target("sm_80")
    problem = Problem.of(parsed, dtype=dtype, param_dtype=param_dtype)
    tuned = render(problem, best_predicted(problem, limits))
    kernels = serve_all_rows(tuned, limits, lambda at: best_predicted(at, limits))
    return problem, artifact(kernels, replace(INFO, shape=parsed))


def build(text: ArtifactText, folder: Path, arch: str, *flags: str) -> Path:
    (folder / "best.cu").write_text(text.cu)
    code = f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}"
    command = [str(find_nvcc(arch).path), "-std=c++17", "-O3", code, *flags, "best.cu", "-o", "built"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "built"


class Library:
    """An artifact as a shared library."""

    def __init__(self, path: Path, gpu: Gpu) -> None:
        self._gpu = gpu
        library = ctypes.CDLL(str(path))
        self.workspace_bytes = library.lnl_backward_workspace_bytes
        self.workspace_bytes.argtypes = [ctypes.c_int64]
        self.workspace_bytes.restype = ctypes.c_size_t
        self.backward = library.lnl_backward
        self.backward.argtypes = [ctypes.c_void_p] * 11 + [ctypes.c_int64, ctypes.c_float, ctypes.c_void_p]

    def run(self, inputs: Inputs, wants: frozenset[str], shifted: bool = False) -> Gradients:
        """Two calls, of which the second finds the results of the first; outputs and workspace are full of NaN before.

        Args:
            shifted: no tensor begins at a multiple of more than its elements' size.
        """
        outputs = {name: np.full(spec.shape, np.nan, spec.dtype) for name, spec in output_specs(inputs, wants).items()}
        arrays = {name: array for name in INPUTS if (array := getattr(inputs, name)) is not None}
        workspace = np.full(self.workspace_bytes(inputs.rows) // 4, np.nan, np.float32)
        moved = frozenset((*INPUTS, *GRADIENTS)) if shifted else frozenset()
        with self._gpu.memory({**arrays, **outputs, "workspace": workspace}, moved) as at:
            for _ in range(2):
                pointers = [at.get(name) for name in (*INPUTS, *GRADIENTS, "workspace")]
                code = self.backward(*pointers, inputs.rows, inputs.eps, None)
                assert code == 0, f"cudaError_t {code}"
            for name, array in outputs.items():
                self._gpu.read(at[name], array)
        return Gradients(**{name: outputs.get(name) for name in GRADIENTS})


@pytest.fixture(scope="module", params=PROBLEMS)
def loaded(request: pytest.FixtureRequest, gpu: Gpu, tmp_path_factory: pytest.TempPathFactory) -> tuple[Problem, Library]:
    problem, text = best(*request.param)
    return problem, Library(build(text, tmp_path_factory.mktemp("best"), gpu.arch, "-shared", "-Xcompiler", "-fPIC"), gpu)


def inputs_of(problem: Problem, rows: int) -> Inputs:
    return random_inputs(rows, problem.hidden, problem.out, dtype=problem.dtype, param_dtype=problem.param_dtype)


@pytest.mark.parametrize("rows", [1, 16, 17, 4096])
def test_gradients_pass_the_validator(rows: int, loaded: tuple[Problem, Library]) -> None:
    problem, library = loaded
    verdict = Validator(replace(problem, rows=rows)).validate(library.run)
    assert verdict.ok, verdict.reason


def test_no_rows(loaded: tuple[Problem, Library]) -> None:
    problem, library = loaded
    got = library.run(inputs_of(problem, 0), ALL)
    assert not any(np.any(getattr(got, name)) for name in GRADIENTS)


def test_every_set_of_wanted_gradients(loaded: tuple[Problem, Library]) -> None:
    problem, library = loaded
    inputs = inputs_of(problem, 17)
    for wants in (frozenset(names) for count in range(1, 6) for names in combinations(GRADIENTS, count)):
        assert bound_fault(inputs, library.run(inputs, wants), wants) is None


@pytest.mark.parametrize(("dtype", "param_dtype"), DATA_TYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_may_begin_at_any_element(variant: str, dtype: str, param_dtype: str, gpu: Gpu, tmp_path: Path) -> None:
    arithmetic = OWN_ARITHMETIC.get(dtype) if "arithmetic" in VARIANTS[variant].choices else None
    if dtype == "float32" and variant not in OF_FLOAT32:
        return
    config = fitted(config_of(variant, "two_pass", arithmetic, dtype), SMALL_SHAPE, dtype, param_dtype)
    assert config is not None
    problem = Problem.of(SMALL_SHAPE, dtype=dtype, param_dtype=param_dtype)
    text = artifact([ArtifactKernel(render(problem, config))], replace(INFO, shape=SMALL_SHAPE))
    library = Library(build(text, tmp_path, gpu.arch, "-shared", "-Xcompiler", "-fPIC"), gpu)
    inputs = inputs_of(problem, SMALL_SHAPE.rows)
    assert bound_fault(inputs, library.run(inputs, ALL, shifted=True), ALL, problem.accuracy) is None


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_self_test_passes(problem: tuple[str, str, str], gpu: Gpu, tmp_path: Path) -> None:
    program = build(best(*problem)[1], tmp_path, gpu.arch, "-DLNL_SELF_TEST")
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("PASSED\n"), done.stdout + done.stderr


def test_a_gpu_it_was_not_built_for_is_a_stated_error(gpu: Gpu, tmp_path: Path) -> None:
    other = "sm_90" if gpu.arch.startswith("sm_8") else "sm_80"  # one major version runs no binary of another
    library = Library(build(best(*PROBLEMS[0])[1], tmp_path, other, "-shared", "-Xcompiler", "-fPIC"), gpu)
    assert library.workspace_bytes(16) == 2**64 - 1
    with gpu.memory({"any": np.zeros(4096, np.float32)}) as at:
        assert library.backward(*[at["any"]] * 11, 16, 1e-5, None) != 0
        gpu("cuCtxSynchronize")
