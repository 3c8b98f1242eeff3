"""nvcc: where it is looked for, what is said when it is not there, and what its reports mean."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from codegen.expr import const
from codegen.plan import Launch, Plan
from tests.artifact_cases import SINGLE_BLOCK, one
from tuner.errors import CompileError, ToolchainError
from tuner.executors import Resources
from tuner.store import Store
from tuner.toolchain import REPORT, Binary, KernelReport, Nvcc, find_nvcc, first_error, parse_report

# Of ptxas 13: two kernels, then a function of the second that was not inlined.
PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'sum_partials' for 'sm_90a'
ptxas info    : Function properties for sum_partials
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 26 registers, used 1 barriers
ptxas info    : Compile time = 12.581 ms
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    592 bytes stack frame, 612 bytes spill stores, 620 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 592 bytes cumulative stack size, 256 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 54.900 ms
ptxas info    : Function properties for _Z1fPfi
    16 bytes stack frame, 72 bytes spill stores, 72 bytes spill loads
"""


def fake_nvcc(folder: Path, version: str, *archs: str, says: str = "") -> Path:
    """A program that answers as an nvcc of that version, which compiles for these architectures."""
    path = folder / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    codes = "|".join(f"*code={arch}" for arch in archs) or "never"
    path.write_text(f"""#!/bin/sh
case "$1" in --version) echo "Cuda compilation tools, release 13.0, V{version}"; exit 0;; esac
for argument; do
  case "$argument" in
    {codes}) echo '{says}' >&2; test -z '{says}'; exit;;
    *code=*) echo "nvcc fatal   : Unsupported gpu architecture '${{argument##*=}}'" >&2; exit 1;;
  esac
done
""")
    path.chmod(0o755)
    return path


def test_the_order_in_which_nvcc_is_looked_for(tmp_path: Path) -> None:
    named = fake_nvcc(tmp_path / "named", "1.0.0", "sm_90a")
    home = fake_nvcc(tmp_path / "home", "2.0.0", "sm_90a")
    on_path = fake_nvcc(tmp_path / "path", "3.0.0", "sm_90a")
    toolkits = tmp_path / "toolkits"
    fake_nvcc(toolkits / "cuda-12.9", "12.9.0", "sm_90a")
    newest = fake_nvcc(toolkits / "cuda-13.10", "13.10.0", "sm_90a")
    fake_nvcc(toolkits / "cuda-13.2", "13.2.0", "sm_90a")
    packages = tmp_path / "packages"
    wheel = fake_nvcc(packages / "nvidia" / "cu13", "13.5.0", "sm_90a")
    environ = {"CUDACXX": str(named), "CUDA_HOME": str(tmp_path / "home"),
               "PATH": os.pathsep.join(("/nowhere", str(on_path.parent)))}
    found = []
    for drop in (None, "CUDACXX", "CUDA_HOME", "PATH"):
        environ.pop(drop or "", None)
        found.append(find_nvcc("sm_90a", environ=environ, toolkits=toolkits, packages=[str(packages)]).path)
    found.append(find_nvcc("sm_90a", environ={}, toolkits=tmp_path / "none", packages=[str(packages)]).path)
    assert found == [named, home, on_path, newest, wheel]


def test_the_older_layout_of_the_package_is_known(tmp_path: Path) -> None:
    wheel = fake_nvcc(tmp_path / "nvidia" / "cuda_nvcc", "12.8.0", "sm_90a")
    assert find_nvcc(environ={}, toolkits=tmp_path, packages=[str(tmp_path)]) == Nvcc(wheel, "12.8.0")


def test_an_nvcc_that_does_not_know_the_gpu_makes_room_for_one_that_does(tmp_path: Path) -> None:
    old = fake_nvcc(tmp_path / "old", "11.8.0", "sm_80")
    new = fake_nvcc(tmp_path / "toolkits" / "cuda", "13.0.0", "sm_80", "sm_90a")
    environ = {"PATH": str(old.parent)}
    assert find_nvcc("sm_80", environ=environ, toolkits=tmp_path / "toolkits", packages=()).path == old
    assert find_nvcc("sm_90a", environ=environ, toolkits=tmp_path / "toolkits", packages=()).path == new


def test_p1_no_nvcc(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError) as caught:
        find_nvcc("sm_90a", environ={"PATH": str(tmp_path)}, toolkits=tmp_path, packages=[str(tmp_path)])
    assert str(caught.value) == (
        "no nvcc that compiles for sm_90a was found (tried CUDACXX, CUDA_HOME, PATH, "
        f"{tmp_path}/cuda* and the Python package nvidia-cuda-nvcc); install a CUDA toolkit, or `pip install nvidia-cuda-nvcc "
        "nvidia-cuda-cccl`, or set CUDACXX to the nvcc to use")


def test_p1_an_nvcc_that_is_named_but_not_there(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError) as caught:
        find_nvcc(environ={"CUDACXX": "/nowhere/nvcc"}, toolkits=tmp_path, packages=())
    assert "/nowhere/nvcc does not run" in str(caught.value) and "\n" not in str(caught.value)


def test_p1_no_nvcc_knows_the_gpu(tmp_path: Path) -> None:
    old = fake_nvcc(tmp_path / "old", "11.8.0", "sm_80")
    with pytest.raises(ToolchainError) as caught:
        find_nvcc("sm_120a", environ={"CUDACXX": str(old)}, toolkits=tmp_path, packages=())
    assert f"{old} (11.8.0) says: nvcc fatal   : Unsupported gpu architecture 'sm_120a'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_p1_nvcc_without_a_host_compiler(tmp_path: Path) -> None:
    lame = fake_nvcc(tmp_path / "lame", "13.0.0", "sm_80", says="nvcc fatal   : Failed to preprocess host compiler properties.")
    with pytest.raises(ToolchainError, match="there is no host compiler, install g\\+\\+"):
        find_nvcc("sm_80", environ={"CUDACXX": str(lame)}, toolkits=tmp_path, packages=())


def test_p1_the_nvcc_that_was_found_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="/nowhere/nvcc cannot be started"):
        Nvcc(Path("/nowhere/nvcc"), "13.0.0").compile("", "sm_90a", Store(tmp_path))


def test_the_report_of_ptxas() -> None:
    assert parse_report(PTXAS) == {
        "sum_partials": KernelReport(registers=26, static_shared_bytes=0, spill_bytes=0, stack_bytes=0),
        "k": KernelReport(registers=32, static_shared_bytes=256, spill_bytes=612 + 620 + 72 + 72, stack_bytes=592)}


def test_resources_add_the_dynamic_shared_memory_of_the_launch(tmp_path: Path) -> None:
    plan = Plan((Launch("k", const(1), 32, 1000), Launch("sum_partials", const(1), 32)))
    assert Binary(tmp_path, parse_report(PTXAS)).resources(plan) == {
        "k": Resources(32, 1256, 1376, 592), "sum_partials": Resources(26, 0, 0, 0)}


@pytest.mark.parametrize(("said", "first"), [
    ("warning\nkernel.cu(12): error: q is undefined\n  q = 1;\nkernel.cu(13): error: x", "kernel.cu(12): error: q is undefined"),
    ("ptxas t.ptx, line 23; error   : No '.b'\nptxas fatal   : aborted", "ptxas t.ptx, line 23; error   : No '.b'"),
    ("Segmentation fault\n", "Segmentation fault"),
    ("", "it said nothing"),
])
def test_the_first_error(said: str, first: str) -> None:
    assert first_error(said) == first


def test_a_kernel_is_compiled_once_and_lies_beside_its_report(tmp_path: Path) -> None:
    nvcc, store = find_nvcc("sm_90a"), Store(tmp_path)
    text = 'extern "C" __global__ void k(float* p) { p[threadIdx.x] *= 2.0f; }\n'
    first, again = nvcc.compile(text, "sm_90a", store), nvcc.compile(text, "sm_90a", store)
    assert first == again
    assert first.cubin.read_bytes()[:4] == b"\x7fELF"
    assert (first.cubin.parent / "kernel.cu").read_text() == text
    assert "Compiling entry function 'k'" in (first.cubin.parent / REPORT).read_text()
    assert first.reports["k"].registers > 0 and first.reports["k"].spill_bytes == 0
    assert nvcc.compile(text, "sm_80", store).cubin != first.cubin


def test_flags_from_the_environment_do_not_reach_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a key of the store nor the banner of best.cu would tell of them."""
    text = 'extern "C" __global__ void k(float* p) { p[threadIdx.x] *= 2.0f; }\n'
    plain = find_nvcc("sm_90a").compile(text, "sm_90a", Store(tmp_path / "plain"))
    for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.setenv(name, "--no-such-flag")
    again = find_nvcc("sm_90a").compile(text, "sm_90a", Store(tmp_path / "again"))
    assert again.reports == plain.reports


def test_kernels_are_compiled_as_the_artifact_tells_its_users(tmp_path: Path) -> None:
    said = re.search(r"nvcc (-std\S+ -O\S+) -shared", one(SINGLE_BLOCK).cu)
    assert said is not None
    binary = find_nvcc("sm_90a").compile("", "sm_90a", Store(tmp_path))
    assert all(f'"{flag}"' in (binary.cubin.parent / "key.json").read_text() for flag in said.group(1).split())


def test_a_refused_kernel_leaves_nothing_behind(tmp_path: Path) -> None:
    nvcc = find_nvcc("sm_90a")
    with pytest.raises(CompileError) as caught:
        nvcc.compile('extern "C" __global__ void k(float* p) { p[0] = q; }', "sm_90a", Store(tmp_path))
    assert str(caught.value) == f'{nvcc.label} refused the kernel: kernel.cu(1): error: identifier "q" is undefined'
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_unknown_architecture_is_no_fault_of_the_kernel(tmp_path: Path) -> None:
    nvcc = find_nvcc()
    with pytest.raises(ToolchainError, match=r"cannot compile for sm_77: nvcc fatal *: Unsupported gpu architecture"):
        nvcc.compile("", "sm_77", Store(tmp_path))
