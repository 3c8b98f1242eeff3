"""The C++ compiler of this machine, and what it makes: the runtime of cuda_on_host, and kernels as libraries linked to it."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.compilers import run_compiler
from tuner.errors import CompileError, ToolchainError
from tuner.store import BuildKey, Store

_HERE = Path(__file__).resolve().parent
_CANDIDATES = ("g++", "clang++", "c++")

_RUNTIME = "libcuda_on_host.so"
_KERNEL = "kernel.so"

# Fortified jumps would refuse to leave a fiber's stack. Functions need not be replaceable from outside.
_RUNTIME_FLAGS = (
    "-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-U_FORTIFY_SOURCE", "-fno-semantic-interposition",
    "-Wl,-Bsymbolic-functions",
)

# Most kernels run once or a few times, and compiling them takes longer. With -Og those for tensor cores compile in two thirds of
# the time of -O1 and run as fast; others compile hardly sooner and run a third slower (g++ 12.2). Caller-saves keeps float values
# in registers although the sanitizers' checks call functions. Those functions are the runtime's; -nodefaultlibs keeps gcc from
# linking its own. Stack-clash protection makes a large frame touch the fence below each stack.
_KERNEL_FLAGS = (
    "-std=c++17", "-Og", "-fcaller-saves", "-fPIC", "-shared", "-pipe", "-w", "-fno-exceptions", "-fno-rtti",
    "-fno-asynchronous-unwind-tables", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fstack-clash-protection",
    "-fsanitize=alignment,bounds,signed-integer-overflow,integer-divide-by-zero,shift-exponent",
    "-nodefaultlibs", "-Wl,-z,defs",
)


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler that answers.

    Attributes:
        command: the program and the arguments that $CXX gives it.
        version: the first line of `--version`, part of every store key.
    """

    command: tuple[str, ...]
    version: str

    @property
    def label(self) -> str:
        """Name and version for people: "g++ 12.2"."""
        number = re.search(r"\d+\.\d+", self.version)
        return f"{Path(self.command[0]).name} {number.group() if number else self.version}"

    def run(self, arguments: Sequence[str], folder: Path, what: str, patience: int = 1) -> None:
        """Compiles in `folder`.

        Args:
            what: what is compiled, for messages.
            patience: as of run_compiler.

        Raises:
            CompileError: the compiler refused, or did not end; the message holds its first error, a note all it said.
            ToolchainError: the compiler cannot be started.
        """
        try:
            done = run_compiler([*self.command, *arguments], folder, patience=patience)
        except OSError as error:
            sentence = f"{self.command[0]} cannot be started ({error.strerror}); set CXX to a C++17 compiler"
            raise ToolchainError(sentence) from error
        except subprocess.TimeoutExpired as error:
            raise CompileError(f"{self.label} did not finish {what} within {error.timeout:.0f} s") from error
        if done.returncode != 0:
            said = (done.stderr + done.stdout).strip()
            lines = said.splitlines() or [f"exit status {done.returncode}"]
            first = next((line for line in lines if "error:" in line), lines[-1])
            refusal = CompileError(f"{self.label} refused {what}: {first}")
            refusal.add_note(said)
            raise refusal


def find_compiler() -> Compiler:
    """The compiler $CXX names, else the first of g++, clang++ and c++ on the path.

    Raises:
        ToolchainError: none of them is there, or this is no Linux machine.
    """
    if not sys.platform.startswith("linux"):
        raise ToolchainError(f"the host executor runs on Linux only, not on {sys.platform}")
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise ToolchainError(f"CXX is no command ({error}); set it to a C++17 compiler") from error
    commands = [chosen] if chosen else [[name] for name in _CANDIDATES]
    for command in commands:
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace")
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.strip():
            return Compiler(tuple(command), done.stdout.strip().splitlines()[0])
    tried = f"CXX is {shlex.join(chosen)!r}, which does not run" if chosen else f"tried {', '.join(_CANDIDATES)}"
    raise ToolchainError(f"no C++ compiler found ({tried}); install g++, or set CXX to a C++17 compiler")


@dataclass(frozen=True, slots=True)
class RuntimeFiles:
    """The compiled runtime in the store.

    Attributes:
        digest: of its store key; part of the key of every kernel.
        folder: holds cuda_on_host.h and what it includes.
        library: to be loaded before any kernel, so that the kernels find it by its name.
    """

    digest: str
    folder: Path
    library: Path


def build_runtime(compiler: Compiler, store: Store) -> RuntimeFiles:
    """Compiles cuda_on_host/*.cpp, once per compiler.

    Raises:
        CompileError, ToolchainError: as Compiler.run and Store.get_or_build.
    """
    paths = [_HERE / "cuda_on_host.h", *sorted((_HERE / "cuda_on_host").glob("*.h")),
             *sorted((_HERE / "cuda_on_host").glob("*.cpp"))]
    texts = {path.relative_to(_HERE).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    # One translation unit: the standard headers are read once, and calls between the files are inlined.
    texts["runtime.cpp"] = "".join(f'#include "{name}"\n' for name in texts if name.endswith(".cpp"))
    key = BuildKey(f"host runtime {platform.machine()}", tuple(texts.items()), _RUNTIME_FLAGS, compiler.version)

    def build(folder: Path) -> None:
        # The name that kernels record; unique, so that runtimes of two compilers can live in one process.
        name = f"-Wl,-soname,libcuda_on_host-{key.digest[:16]}.so"
        compiler.run([*_RUNTIME_FLAGS, "-I.", "runtime.cpp", name, "-o", _RUNTIME], folder, "the host runtime")

    folder = store.get_or_build(key, build)
    return RuntimeFiles(key.digest, folder, folder / _RUNTIME)


def build_kernels(compiler: Compiler, store: Store, runtime: RuntimeFiles, text: str, kernels: Sequence[str], *,
                  fma: bool) -> Path:
    """Compiles a CUDA source as it is; returns the path of a library with one entry `run_<kernel>` for each kernel, and for each
    that declares clusters their blocks as the int `cluster_of_<kernel>`.

    Args:
        text: the source. It declares `struct Params`, and each kernel takes one.
        kernels: names of the kernels.
        fma: let the compiler fuse multiplications and additions as a GPU does (x86-64 only).

    Raises:
        CompileError, ToolchainError: as Compiler.run and Store.get_or_build.
    """
    flags = (*_KERNEL_FLAGS, "-mfma") if fma else _KERNEL_FLAGS
    files = (("kernel.cu", text), ("shim.cpp", _shim(text, kernels)))
    key = BuildKey(f"host kernel {platform.machine()}", files, flags, compiler.version, (runtime.digest,))

    def build(folder: Path) -> None:
        build_runtime(compiler, store)  # what is included must still be what the key says
        inputs = ["-I", str(runtime.folder), "shim.cpp", str(runtime.library), "-lm", "-lc"]
        compiler.run([*flags, *inputs, "-o", _KERNEL], folder, "the kernel")

    return store.get_or_build(key, build) / _KERNEL


_CLUSTERED = re.compile(r"__cluster_dims__\((\w+), 1, 1\)[^;{]*?\b(\w+)\(const __grid_constant__ ")
"""A kernel that declares clusters: how many blocks, and its name."""


def _shim(text: str, kernels: Sequence[str]) -> str:
    clusters = "".join(f"extern const int cluster_of_{kernel};\nconst int cluster_of_{kernel} = {blocks};\n"
                       for blocks, kernel in _CLUSTERED.findall(text))
    entries = "".join(
        f"void run_{kernel}(const void* params) {{ {kernel}(*static_cast<const Params*>(params)); }}\n" for kernel in kernels)
    return (
        '#include "cuda_on_host.h"\n'
        '#include "kernel.cu"\n'
        'extern "C" {\n'
        "extern const size_t params_bytes;\n"
        "const size_t params_bytes = sizeof(Params);\n"
        f"{clusters}"
        f"{entries}"
        "}\n"
    )
