"""The artifact as text: what it says, what compilers make of it, and how it is written."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from codegen.artifact import ArtifactInfo, ArtifactKernel, ErrorFigures, artifact
from codegen.dtypes import ACCURACIES, CLASS_ERRORS, OPERAND_ROUNDOFF
from codegen.errors import CodegenError, InvalidConfig
from codegen.limits import TARGETS, target
from codegen.problem import GRADIENTS, Problem
from codegen.space import nearest_runnable, parse_config
from codegen.variants import VARIANTS
from tests.artifact_cases import INFO, PROBLEM, SHAPE, SINGLE_BLOCK, THREE, make, one, source, suited, typed
from tests.cases import DATA_TYPES
from tests.configs import first_dtype
from tests.host_artifact import HostArtifact
from tuner.artifact import write_artifact
from tuner.bounds import accuracy_class
from tuner.executors.host_toolchain import find_compiler
from tuner.guess import best_predicted
from tuner.outcome import TuneResult
from tuner.records import Record, RunInfo, Status
from tuner.store import Store
from tuner.toolchain import find_nvcc
from tuner.validate import GradientError

ARCHITECTURES = tuple(target(name).arch for name in TARGETS)
H200 = target("sm_90")
EXPORTED = {"lnl_backward", "lnl_backward_workspace_bytes", "lnl_backward_info"}
STRICT = ("-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror")


def run(command: Sequence[str | Path], folder: Path) -> str:
    """What a program says; the test fails unless it succeeds."""
    done = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def nvcc(folder: Path, *arguments: str, arch: str = "sm_90a") -> None:
    code = f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}"
    run([find_nvcc(arch).path, "-std=c++17", code, *arguments], folder)


def strong_symbols(folder: Path, *arguments: str) -> set[str]:
    """Names of what a library or object defines for others; inline functions, which any program may repeat, are left out."""
    lines = [line.split() for line in run(["nm", "--defined-only", *arguments], folder).splitlines()]
    return {parts[-1] for parts in lines if len(parts) == 3 and parts[1].isupper() and parts[1] not in "VWA"}


# --- What compilers make of it --------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_nvcc_makes_a_library_that_exports_the_interface_alone(arch: str, tmp_path: Path) -> None:
    (tmp_path / "best.cu").write_text(make(*THREE).cu)
    nvcc(tmp_path, *STRICT, "-shared", "-Xcompiler", "-fPIC", "best.cu", "-o", "libbest.so", arch=arch)
    assert strong_symbols(tmp_path, "-D", "libbest.so") == EXPORTED


@pytest.mark.parametrize("variant", VARIANTS)
def test_nvcc_takes_each_variant_alone_without_a_warning(variant: str, tmp_path: Path) -> None:
    dtype = first_dtype(variant)
    (tmp_path / "best.cu").write_text(one(variant, typed(dtype, dtype)).cu)
    nvcc(tmp_path, *STRICT, "-c", "best.cu", "-o", "best.o")


@pytest.mark.parametrize("wants", [("dx",), ("dw", "db"), ("dgamma",)], ids="-".join)
@pytest.mark.parametrize("text", ["row_warp", "weight_ahead:launches=overlapped", "weight_mma:launches=overlapped", "gemm_mma"])
def test_nvcc_takes_few_gradients_without_a_warning(text: str, wants: tuple[str, ...], tmp_path: Path) -> None:
    """Also of what those that are not wanted leave behind, and of launches that overlap."""
    problem = Problem(64, 128, 128, "bfloat16", frozenset(wants), param_dtype="bfloat16")
    config = nearest_runnable(problem, parse_config(text), target("sm_90"), ("launches",))
    (tmp_path / "best.cu").write_text(one(str(config), problem=problem).cu)
    nvcc(tmp_path, *STRICT, "-ptx", "best.cu", "-o", "best.ptx")


def test_the_self_test_compiles_without_a_warning(tmp_path: Path) -> None:
    (tmp_path / "best.cu").write_text(make(*THREE).cu)
    nvcc(tmp_path, *STRICT, "-DLNL_SELF_TEST", "best.cu", "-o", "best_test")


@pytest.mark.parametrize(("dtype", "param_dtype"), DATA_TYPES[1:])
def test_the_self_test_compiles_in_every_data_type(dtype: str, param_dtype: str, tmp_path: Path) -> None:
    problem = typed(dtype, param_dtype)
    (tmp_path / "best.cu").write_text(make(*suited(problem), problem=problem).cu)
    nvcc(tmp_path, *STRICT, "-DLNL_SELF_TEST", "best.cu", "-o", "best_test")


def test_two_artifacts_link_into_one_program(tmp_path: Path) -> None:
    (tmp_path / "best.cu").write_text(make((SINGLE_BLOCK, 40), ("row_warp", None)).cu)
    for name in ("first", "second"):
        nvcc(tmp_path, f"-DLNL_NAME={name}", "-c", "best.cu", "-o", f"{name}.o")
    run(["ld", "-r", "first.o", "second.o", "-o", "both.o"], tmp_path)
    functions = {name for name in strong_symbols(tmp_path, "-g", "both.o") if not name.startswith("_Z")}
    assert functions == {symbol.replace("lnl_backward", name) for symbol in EXPORTED for name in ("first", "second")}


def test_it_includes_nothing_but_the_standard_library_and_the_runtime() -> None:
    included = re.findall(r"^#include (.*)$", make(*THREE).cu, re.MULTILINE)
    assert included == ["<atomic>", "<cstddef>", "<cstdint>", "<cuda_runtime.h>",
                        "<algorithm>", "<cmath>", "<cstdio>", "<cstdlib>", "<cstring>", "<vector>"]
    assert 'extern "C" __global__' not in make(*THREE).cu


@pytest.mark.parametrize(("language", "standard"), [("c", "c99"), ("c++", "c++11")])
def test_the_header_is_c_and_cxx_and_serves_several_names(language: str, standard: str, tmp_path: Path) -> None:
    (tmp_path / "best.h").write_text(one(SINGLE_BLOCK).header)
    (tmp_path / "use.c").write_text(
        '#include "best.h"\n#include "best.h"\n#define LNL_NAME other\n#include "best.h"\n#undef LNL_NAME\n'
        "int use(void *t, int64_t n);\n"
        "int use(void *t, int64_t n) {\n"
        "  return lnl_backward_workspace_bytes(n) == SIZE_MAX && other_info()[0] == '{' && other_workspace_bytes(n) &&\n"
        "         lnl_backward_info() && other(t, t, t, t, t, t, t, t, t, t, t, n, 1e-5f, 0) == 0 ?\n"
        "         lnl_backward(t, t, 0, 0, t, t, 0, 0, 0, 0, t, n, 1e-5f, (struct CUstream_st *)0) : 1;\n"
        "}\n")
    strict = ("-Wall", "-Wextra", "-Werror", "-pedantic")
    run([*find_compiler().command, "-x", language, f"-std={standard}", *strict, "-c", "use.c", "-o", "use.o"], tmp_path)
    undefined = set(run(["nm", "-u", "use.o"], tmp_path).replace("U", "").split())
    assert undefined == {symbol.replace("lnl_backward", name) for symbol in EXPORTED for name in ("lnl_backward", "other")}


def test_the_header_declares_what_the_file_defines(tmp_path: Path) -> None:
    text = one(SINGLE_BLOCK)
    (tmp_path / "best.h").write_text(text.header)
    (tmp_path / "best.cu").write_text('#include "best.h"\n' + text.cu)
    nvcc(tmp_path, "-c", "best.cu", "-o", "best.o")


# --- What it says ---------------------------------------------------------------------------------------------


def banner(cu: str) -> str:
    """The comment the file opens with."""
    return cu[:cu.index("\n\n")]


@pytest.mark.parametrize(("measured", "word", "other"), [(True, "measured", "predicted"), (False, "predicted", "measured:")])
def test_the_banner_says_what_the_file_is(measured: bool, word: str, other: str) -> None:
    said = banner(make(*THREE, info=replace(INFO, measured=measured)).cu)
    assert all(line.startswith("//") for line in said.splitlines())
    for text in (str(SHAPE), str(parse_config(SINGLE_BLOCK)), "for 0 to 40 rows", str(parse_config(THREE[2][0])),
                 "for 301 rows and more", "Some GPU, sm_90a", f"2.04 us a call, {word}", "the floor of 0.51 us is 25 % of that",
                 INFO.generator, "it is yours"):
        assert text in said, text
    assert other not in said
    for name in GRADIENTS:
        assert re.search(rf"\b{name} +1\.2e-07 of its norm; the worst element at 0\.31 of its bound", said)


def test_the_info_is_the_banner_as_json(store: Store, tmp_path: Path) -> None:
    info = json.loads(HostArtifact(make(*THREE).cu, store, tmp_path).info)
    assert info == {
        "schema": 1, "generator": INFO.generator, "shape": [3, 5, 24, 7], "dtype": "float32",
        "param_dtype": "float32", "accuracy": "fp32", "wants": list(GRADIENTS),
        "config": str(parse_config(SINGLE_BLOCK)),
        "configs": [{"last_rows": last, "config": str(parse_config(config))} for config, last in THREE],
        "max_rows": 2**40, "gpu": "Some GPU", "arch": "sm_90a", "time_us": 2.04, "time_is": "measured", "floor_us": 0.51,
        "errors": {name: {"normwise": 1.2e-7, "bound_ratio": 0.31} for name in GRADIENTS}}


def test_data_types_and_accuracy_are_stated(store: Store, tmp_path: Path) -> None:
    text = one(SINGLE_BLOCK, typed("bfloat16", "float32"))
    info = json.loads(HostArtifact(text.cu, store, tmp_path).info)
    assert (info["dtype"], info["param_dtype"], info["accuracy"]) == ("bfloat16", "float32", "bf16")
    assert "Types     bfloat16 with float32 parameters; accuracy class bf16" in banner(text.cu)
    for line in ("dy         bfloat16 [rows, 7]  gradient of y", "dx         bfloat16 [rows, 24]  overwritten",
                 "w          float32 [7, 24]  weight", "dgamma     float32 [24]  overwritten"):
        assert line in text.header, line
    tf32 = one(SINGLE_BLOCK, replace(PROBLEM, accuracy="tf32"))
    assert "Types     float32; accuracy class tf32" in banner(tf32.cu) and "NORMWISE_LIMIT = 0.001;" in tf32.cu


def test_names_from_outside_stay_words(store: Store, tmp_path: Path) -> None:
    gpu, generator = 'A "GPU"\nof two\u2028lines )json"; #error */ ??/ \\', 'made by \\ )json'
    info = replace(INFO, gpu=gpu, generator=generator, errors={"dx": ErrorFigures(float("nan"), float("inf"))})
    said = json.loads(HostArtifact(one(SINGLE_BLOCK, info=info).cu, store, tmp_path).info)
    assert said["gpu"] == gpu and said["generator"] == generator
    assert said["errors"] == {"dx": {"normwise": None, "bound_ratio": None}}


@pytest.mark.parametrize("ends", [(None, None), (40, 300), (300, 40, None), (-1, None)])
def test_configs_must_serve_rising_row_counts(ends: tuple[int | None, ...]) -> None:
    with pytest.raises(InvalidConfig, match="rising row counts"):
        make(*((SINGLE_BLOCK, last) for last in ends))


def test_configs_must_belong_together() -> None:
    others = (Problem(15, 24, 8), typed("bfloat16", "bfloat16"), replace(PROBLEM, accuracy="tf32"))
    kernels = [[ArtifactKernel(source(SINGLE_BLOCK), 40), ArtifactKernel(source(SINGLE_BLOCK, other))] for other in others]
    mixed = [ArtifactKernel(source(SINGLE_BLOCK, typed("bfloat16", param)), last)
             for param, last in (("float32", 40), ("bfloat16", None))]
    for wrong in (*kernels, mixed, []):
        with pytest.raises(CodegenError):
            artifact(wrong, INFO)


@pytest.mark.parametrize("name", ACCURACIES)
def test_the_self_test_grants_a_class_what_the_validator_does(name: str) -> None:
    kind = accuracy_class(name)
    assert (CLASS_ERRORS[name], OPERAND_ROUNDOFF[name]) == (kind.limit, kind.operand_roundoff)


def test_a_config_is_not_given_more_rows_than_its_grid_has_room_for() -> None:
    config = "row_thread:reduction=atomic,threads=32"
    make((config, 32 * (2**31 - 1)), (SINGLE_BLOCK, None))
    with pytest.raises(InvalidConfig, match="at most"):
        make((config, 32 * (2**31 - 1) + 1), (SINGLE_BLOCK, None))


def test_outputs_that_are_not_computed_are_named() -> None:
    header = one("row_warp", replace(PROBLEM, wants=frozenset({"dx"}))).header
    assert re.search(r"dw +float32 \[7, 24\]  not computed", header)
    assert re.search(r"dx +float32 \[rows, 24\]  overwritten", header)


def test_info_is_of_the_config_that_serves_the_tuned_rows() -> None:
    info: ArtifactInfo = replace(INFO, shape=replace(SHAPE, seq=50))
    assert f"Config    {parse_config(THREE[1][0])}" in banner(make(*THREE, info=info).cu)


# --- How it is written ---------------------------------------------------------------------------------------------


def result(winner: Record | None, executor: str) -> TuneResult:
    run = RunInfo(str(SHAPE), "float32", ",".join(GRADIENTS), False, 1e-5, "fp32", executor, "NVIDIA H200", "sm_90", 0, 24, None,
                  "2026-01-02T03:04:05+00:00", "a command", "0.1.0", 100, 10, {}, measures=executor == "cuda")
    return TuneResult(run, PROBLEM, H200, () if winner is None else (winner,), winner)


def winning(measured: bool) -> Record:
    errors = {name: GradientError(2e-7, 0.25) for name in GRADIENTS}
    final_us = 2.0 if measured else None
    return Record(parse_config(SINGLE_BLOCK), Status.OK, time_us=3.0, measured=measured, final_us=final_us, errors=errors)


@pytest.mark.parametrize(("executor", "measured", "gpu", "time"), [
    ("cuda", True, "NVIDIA H200, sm_90a", "2 us a call, measured"), ("host", False, "H200, sm_90a", "3 us a call, predicted")])
def test_a_winner_is_written_with_its_figures(executor: str, measured: bool, gpu: str, time: str, tmp_path: Path) -> None:
    winner, folder = winning(measured), tmp_path / "new"
    stale = tmp_path / "best.json"
    stale.touch()
    write_artifact(folder / "best.cu", folder / "best.h", source(SINGLE_BLOCK), result(winner, executor),
                   lambda at: best_predicted(at, H200), stale)
    assert not stale.exists()
    assert sorted(path.name for path in folder.iterdir()) == ["best.cu", "best.h"]
    said = banner((folder / "best.cu").read_text())
    for text in (str(winner.config), "for 0 to ", f" {gpu}\n", time,
                 "dx     2.0e-07 of its norm; the worst element at 0.25", "lnl-tuner 0.1.0, 2026-01-02T03:04:05+00:00"):
        assert text in said, text
    assert "int LNL_NAME(" in (folder / "best.h").read_text()


def test_without_a_winner_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="winner"):
        write_artifact(tmp_path / "best.cu", tmp_path / "best.h", source(SINGLE_BLOCK), result(None, "host"),
                       lambda at: best_predicted(at, H200), tmp_path / "best.json")
    assert not list(tmp_path.iterdir())
