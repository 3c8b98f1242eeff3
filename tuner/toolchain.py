"""nvcc on this machine: where it is, which GPUs it knows, and what it makes of a source."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from codegen.plan import Plan
from tuner.compilers import run_compiler
from tuner.errors import CompileError, ToolchainError
from tuner.executors import Resources
from tuner.store import BuildKey, Store

CUBIN = "kernel.cubin"
REPORT = "nvcc.txt"

_SOURCE = "kernel.cu"
_FLAGS = ("-std=c++17", "-O3", "-cubin", "-lineinfo", "-Xptxas", "-v")  # the first two as best.cu tells its users
_HIDDEN_FLAGS = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
_TOOLKITS = Path("/usr/local")
_WHEELS = "nvidia/cu*"  # nvidia/cu13, or nvidia/cuda_nvcc before that

_HINT = "install a CUDA toolkit, or `pip install nvidia-cuda-nvcc nvidia-cuda-cccl`, or set CUDACXX to the nvcc to use"


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What ptxas says about one kernel.

    Attributes:
        registers: registers a thread.
        static_shared_bytes: shared memory declared in the source, bytes a block.
        spill_bytes: bytes a thread spills to local memory, stores plus loads.
        stack_bytes: stack frame of a thread.
    """

    registers: int
    static_shared_bytes: int
    spill_bytes: int
    stack_bytes: int


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled source.

    Attributes:
        cubin: the file to load; `kernel.cu` and the compiler's report lie beside it.
        reports: by kernel name.
    """

    cubin: Path
    reports: Mapping[str, KernelReport]

    def resources(self, plan: Plan) -> dict[str, Resources]:
        """What each kernel of the plan uses, its dynamic shared memory included."""
        used: dict[str, Resources] = {}
        for launch in plan.launches:
            report = self.reports[launch.kernel]
            used[launch.kernel] = Resources(
                report.registers, report.static_shared_bytes + launch.shared_bytes, report.spill_bytes, report.stack_bytes)
        return used


@dataclass(frozen=True, slots=True)
class Nvcc:
    """An nvcc that runs.

    Attributes:
        path: the program.
        version: "13.0.88".
    """

    path: Path
    version: str

    @property
    def label(self) -> str:
        """Name and version for people and for store keys: "nvcc 13.0.88"."""
        return f"nvcc {self.version}"

    def refusal(self, arch: str) -> str | None:
        """Why it cannot compile for "sm_90a"-like `arch`, in its own words; None where it can."""
        return _refusal(self.path, arch)

    def compile(self, text: str, arch: str, store: Store) -> Binary:
        """The text compiled for "sm_90a"-like `arch`, out of the store where it is there. Thread-safe.

        Raises:
            CompileError: nvcc refused the text; the message holds its first error, a note all it said.
            ToolchainError: nvcc cannot be started, finds no host compiler or does not know the architecture, or the store
                cannot be written.
        """
        flags = (*_FLAGS, _gencode(arch))

        def build(folder: Path) -> None:
            report = self._run([*flags, "-o", CUBIN, _SOURCE], folder, arch)
            (folder / REPORT).write_text(report, encoding="utf-8")

        folder = store.get_or_build(BuildKey(f"cubin {arch}", ((_SOURCE, text),), flags, self.label), build)
        return Binary(folder / CUBIN, parse_report((folder / REPORT).read_text(encoding="utf-8")))

    def _run(self, arguments: Sequence[str], folder: Path, arch: str) -> str:
        try:
            done = run_compiler([str(self.path), *arguments], folder, _environment())
        except OSError as error:
            raise ToolchainError(f"{self.path} cannot be started ({error.strerror}); {_HINT}") from error
        except subprocess.TimeoutExpired as error:
            raise CompileError(f"{self.label} did not finish a kernel within {error.timeout:.0f} s") from error
        said = done.stdout + done.stderr
        if done.returncode == 0:
            return said
        if (refusal := self.refusal(arch)) is not None:
            raise ToolchainError(f"{self.path} ({self.version}) cannot compile for {arch}: {refusal}; {_HINT}")
        compile_error = CompileError(f"{self.label} refused the kernel: {first_error(said)}")
        compile_error.add_note(said.strip())
        raise compile_error


def find_nvcc(arch: str | None = None, *, environ: Mapping[str, str] | None = None, toolkits: Path = _TOOLKITS,
              packages: Iterable[str] | None = None) -> Nvcc:
    """The first nvcc that runs and can compile for `arch` (None: for anything).

    They are tried in this order: $CUDACXX, $CUDA_HOME/bin, those on $PATH, /usr/local/cuda and /usr/local/cuda-*, newest
    first, and the one that the Python package nvidia-cuda-nvcc brings.

    Args:
        environ: None: this process's environment.
        toolkits: where cuda and cuda-* lie.
        packages: folders of Python packages; None: sys.path.

    Raises:
        ToolchainError: there is none; the message says what was tried.
    """
    tried: dict[Path, str] = {}
    for path in _candidates(os.environ if environ is None else environ, toolkits, sys.path if packages is None else packages):
        if path in tried:
            continue
        version = _version(path)
        if version is None:
            tried[path] = f"{path} does not run"
            continue
        nvcc = Nvcc(path, version)
        refusal = None if arch is None else nvcc.refusal(arch)
        if refusal is None:
            return nvcc
        tried[path] = f"{path} ({version}) says: {refusal}"
    target = "" if arch is None else f" that compiles for {arch}"
    found = "; ".join(tried.values()) or (
        f"tried CUDACXX, CUDA_HOME, PATH, {toolkits}/cuda* and the Python package nvidia-cuda-nvcc")
    raise ToolchainError(f"no nvcc{target} was found ({found}); {_HINT}")


def _candidates(environ: Mapping[str, str], toolkits: Path, packages: Iterable[str]) -> Iterator[Path]:
    """Paths to try, in order. Of those no environment variable names, only the ones that are there."""
    if named := environ.get("CUDACXX"):
        yield Path(named)
    if home := environ.get("CUDA_HOME"):
        yield Path(home) / "bin" / "nvcc"
    found = [Path(folder) / "nvcc" for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    found.append(toolkits / "cuda" / "bin" / "nvcc")
    found += _newest_first(toolkits.glob("cuda-*/bin/nvcc"))
    for folder in packages:
        found += _newest_first(Path(folder or ".").glob(f"{_WHEELS}/bin/nvcc"))
    yield from (path for path in found if path.is_file())


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    """In falling order of the version that stands in the name of the toolkit's folder."""
    return sorted(paths, key=lambda path: [int(number) for number in re.findall(r"\d+", path.parts[-3])], reverse=True)


def _environment() -> dict[str, str]:
    """This process's, without the variables by which nvcc takes flags that no store key and no banner would show."""
    return {name: value for name, value in os.environ.items() if name not in _HIDDEN_FLAGS}


def _answer(path: Path, *arguments: str) -> str | None:
    """What the program says; None where it does not run or fails."""
    try:
        done = subprocess.run([str(path), *arguments], capture_output=True, text=True, errors="replace", timeout=60.0,
                              env=_environment())
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _version(path: Path) -> str | None:
    found = re.search(r"\bV(\d+\.\d+\.\d+)", _answer(path, "--version") or "")
    return found.group(1) if found else None


def _gencode(arch: str) -> str:
    return f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}"


@functools.cache
def _refusal(path: Path, arch: str) -> str | None:
    """A dry run says whether nvcc knows the architecture, accelerated ones ("sm_90a") too, and finds its host compiler."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / _SOURCE
        source.touch()
        try:
            done = subprocess.run([str(path), "--dryrun", "-cubin", _gencode(arch), str(source)], cwd=folder,
                                  capture_output=True, text=True, errors="replace", timeout=60.0, env=_environment())
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    said = done.stdout + done.stderr
    if done.returncode == 0:
        return None
    return "there is no host compiler, install g++" if "host compiler" in said else first_error(said)


def first_error(said: str) -> str:
    """The first line that states an error, of what nvcc, its host compiler or ptxas said."""
    lines = said.strip().splitlines() or ["it said nothing"]
    return next((line.strip() for line in lines if re.search(r"\berror\b|\bfatal\b", line)), lines[-1].strip())


def parse_report(said: str) -> dict[str, KernelReport]:
    """The figures of `ptxas -v`, by kernel.

    The stack and the spills of functions that were not inlined stand under the kernel that they were compiled with, and count
    as its own.
    """
    reports: dict[str, KernelReport] = {}
    for part in re.split(r"Compiling entry function '", said)[1:]:
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used = re.search(r"Used (\d+) registers([^\n]*)", part)
        shared = re.search(r"(\d+) bytes smem", used.group(2)) if used else None
        reports[part.partition("'")[0]] = KernelReport(
            registers=int(used.group(1)) if used else 0,
            static_shared_bytes=int(shared.group(1)) if shared else 0,
            spill_bytes=sum(int(stores) + int(loads) for _, stores, loads in frames),
            stack_bytes=max((int(stack) for stack, _, _ in frames), default=0))
    return reports
