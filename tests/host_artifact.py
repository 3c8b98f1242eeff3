"""Artifacts without a GPU: best.cu compiled by the host's C++ compiler against tests/host_cudart, and called through ctypes."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from codegen.problem import GRADIENTS
from codegen.tensors import INPUTS
from tuner.executors.arrays import output_specs
from tuner.executors.host_runtime import Layout, Memory, Runtime
from tuner.executors.host_toolchain import Compiler, RuntimeFiles, build_runtime, find_compiler
from tuner.inputs import Gradients, Inputs
from tuner.store import BuildKey, Store

CUDART = Path(__file__).parent / "host_cudart" / "cuda_runtime.h"
FLAGS = ("-std=c++17", "-O1", "-w", "-pthread", "-fno-gnu-unique", "-x", "c++", "-I.")
INVALID_VALUE, NO_KERNEL_IMAGE = 1, 209
TENSORS = (*INPUTS, *GRADIENTS)


def build(cu: str, store: Store, product: str, flags: Sequence[str]) -> tuple[Path, RuntimeFiles]:
    """best.cu compiled with these flags besides FLAGS: the path of `product`, and the runtime it needs."""
    compiler = find_compiler()
    runtime = build_runtime(compiler, store)
    all_flags = (*FLAGS, *flags)
    header = _header_key(compiler, runtime, tuple(flag for flag in all_flags if flag not in ("-shared", "-x", "c++")))
    key = BuildKey(f"host artifact {product}", (("best.cu", cu),), all_flags, compiler.version, (header.digest,))

    def compile_header(folder: Path) -> None:
        arguments = ["-x", "c++-header", "-I", str(runtime.folder), "cuda_runtime.h", "-o", "cuda_runtime.h.gch"]
        compiler.run([*header.flags, *arguments], folder, "the header of artifacts")

    def compile_artifact(folder: Path) -> None:
        read = store.get_or_build(header, compile_header)
        includes = ["-I", str(read), "-I", str(runtime.folder), "-include", "cuda_runtime.h"]
        inputs = ["best.cu", "-x", "none", str(runtime.library)]
        compiler.run([*all_flags, *includes, *inputs, "-o", product], folder, "the artifact")

    return store.get_or_build(key, compile_artifact) / product, runtime


def _header_key(compiler: Compiler, runtime: RuntimeFiles, flags: tuple[str, ...]) -> BuildKey:
    """Of cuda_runtime.h as the compiler has read it once for all, which takes two thirds of the time of an artifact."""
    return BuildKey("host artifact header", (("cuda_runtime.h", CUDART.read_text()),), flags, compiler.version, (runtime.digest,))


def self_test(cu: str, store: Store) -> subprocess.CompletedProcess[str]:
    """Runs the self-test program."""
    program, runtime = build(cu, store, "best_test", ("-DLNL_SELF_TEST",))
    return subprocess.run([str(program)], env={"LD_PRELOAD": str(runtime.library)}, capture_output=True, text=True, timeout=300)


class HostArtifact:
    """One loaded artifact with a runtime of its own, as fresh as in a new process.

    Args:
        folder: an empty folder; a copy of the library lies there, so that nothing is shared with another instance.
    """

    def __init__(self, cu: str, store: Store, folder: Path) -> None:
        built, runtime = build(cu, store, "libbest.so", ("-fPIC", "-shared"))
        self._runtime = Runtime(runtime.library)
        self.library = ctypes.CDLL(str(shutil.copy(built, folder)))
        self._backward = self.library.lnl_backward
        self._backward.argtypes = [ctypes.c_void_p] * 11 + [ctypes.c_int64, ctypes.c_float, ctypes.c_void_p]
        self._workspace_bytes = self.library.lnl_backward_workspace_bytes
        self._workspace_bytes.argtypes = [ctypes.c_int64]
        self._workspace_bytes.restype = ctypes.c_size_t
        for name in ("lnl_backward_info", "host_cudart_log", "host_cudart_message"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.library.host_cudart_memory.argtypes = [ctypes.c_void_p]
        self.info: str = self.library.lnl_backward_info().decode()

    def workspace_bytes(self, rows: int) -> int:
        """As the C function."""
        return int(self._workspace_bytes(rows))

    def call(self, addresses: dict[str, int], rows: int, eps: float = 1e-5, stream: int = 0) -> int:
        """As the C function; a tensor or workspace that `addresses` lacks is NULL."""
        pointers = [addresses.get(name) for name in (*TENSORS, "workspace")]
        return int(self._backward(*pointers, rows, eps, stream))

    def run(self, inputs: Inputs, wants: frozenset[str], layout: Layout = "end") -> Gradients:
        """One call on fenced memory, outputs and workspace full of NaN; fails the test unless the call succeeds."""
        with Memory(self._runtime, layout) as memory:
            self.library.host_cudart_memory(memory.handle)
            for name in INPUTS:
                if (array := getattr(inputs, name)) is not None:
                    memory.add_input(name, array)
            for name, spec in output_specs(inputs, wants).items():
                memory.add_output(name, spec.shape, spec.dtype)
            memory.add_output("workspace", (self.workspace_bytes(inputs.rows) // 4,))
            code = self.call(memory.addresses, inputs.rows, inputs.eps)
            self.library.host_cudart_memory(None)
            assert code == 0, f"{code}: {self.library.host_cudart_message().decode()}"
            return Gradients(**{name: memory.read(name) if name in wants else None for name in GRADIENTS})

    def fail(self, function: str, code: int) -> None:
        """From now on that function of the runtime fails."""
        self.library.host_cudart_fail(function.encode(), code)

    @property
    def last_error(self) -> int:
        """What cudaGetLastError would report."""
        return int(self.library.host_cudart_last_error())

    def log(self) -> list[str]:
        """What the artifact asked of the runtime since the last call of this function: "launch 1 128 1024"."""
        lines: list[str] = self.library.host_cudart_log().decode().splitlines()
        self.library.host_cudart_clear_log()
        return lines


def anywhere() -> dict[str, int]:
    """Addresses for calls that touch no memory: every tensor and the workspace, aligned and never NULL."""
    return {name: 4096 * (index + 1) for index, name in enumerate((*TENSORS, "workspace"))}
