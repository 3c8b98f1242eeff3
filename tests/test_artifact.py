"""The artifact as text: what it says, what compilers make of it, which configs it holds, and how it is written."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from codegen.artifact import ArtifactInfo, ArtifactKernel, ErrorFigures, artifact
from codegen.config import Config
from codegen.dtypes import ACCURACIES, CLASS_ERRORS, OPERAND_ROUNDOFF
from codegen.errors import CodegenError, InvalidConfig
from codegen.limits import TARGETS, most_memory, target
from codegen.problem import GRADIENTS, Problem
from codegen.reduction import MAX_SINGLE_BLOCK_ROWS
from codegen.render import render
from codegen.space import make_config, nearest_runnable, parse_config, why_not, why_refused, why_unfit, why_wasteful
from codegen.variants import VARIANTS
from tests.artifact_cases import INFO, PROBLEM, SHAPE, SINGLE_BLOCK, THREE, make, one, source, suited, typed
from tests.cases import DATA_TYPES
from tests.configs import first_dtype
from tests.host_artifact import HostArtifact
from tuner.artifact import ABSURDLY_SLOW, LAST_STEP, MAX_CONFIGS, serve_all_rows, write_artifact
from tuner.bounds import accuracy_class
from tuner.costmodel import predict
from tuner.executors.host_toolchain import find_compiler
from tuner.guess import best_predicted
from tuner.outcome import TuneResult
from tuner.records import Record, RunInfo, Status
from tuner.store import Store
from tuner.toolchain import find_nvcc
from tuner.validate import GradientError

ARCHITECTURES = tuple(target(name).arch for name in TARGETS)
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


# --- Which configs it holds -----------------------------------------------------------------------------------

H200 = target("sm_90")


@pytest.fixture
def by_rules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No config is too slow."""
    monkeypatch.setattr("tuner.artifact.ABSURDLY_SLOW", float("inf"))


def served(problem: Problem, config: str, choose: dict[int, str]) -> list[tuple[str, int | None]]:
    """Configs and last row counts, where `choose` has what is taken for a row count."""
    kernels = serve_all_rows(render(problem, parse_config(config)), H200, lambda at: parse_config(choose[at.rows]))
    return [(str(kernel.source.config), kernel.last_rows) for kernel in kernels]


@pytest.mark.usefixtures("by_rules_alone")
def test_a_config_that_is_fit_everywhere_stands_alone() -> None:
    assert served(replace(PROBLEM, rows=300), "row_warp", {}) == [(str(make_config("row_warp")), None)]


@pytest.mark.usefixtures("by_rules_alone")
def test_a_single_block_gives_way_to_the_choice_for_the_first_row_count_it_is_not_fit_for() -> None:
    assert MAX_SINGLE_BLOCK_ROWS == 4096
    assert served(PROBLEM, SINGLE_BLOCK, {8192: "row_warp"}) == [
        (str(parse_config(SINGLE_BLOCK)), 4096), (str(make_config("row_warp")), None)]


@pytest.mark.usefixtures("by_rules_alone")
def test_a_tuned_row_count_that_is_no_power_of_two_is_served() -> None:
    problem = replace(PROBLEM, rows=4000)
    assert served(problem, SINGLE_BLOCK, {8192: "row_warp"})[0] == (str(parse_config(SINGLE_BLOCK)), 4096)
    shared = "row_shared:splits=16,reduction=two_pass"  # one chain of 4096 rows a split
    assert served(replace(PROBLEM, rows=65000), shared, {131072: "row_warp"})[0][1] == 65536
    assert served(replace(PROBLEM, rows=65537), SINGLE_BLOCK, {131072: "row_warp"})[0][1] == 65537


@pytest.mark.usefixtures("by_rules_alone")
def test_the_last_of_three_is_chosen_for_the_largest_row_count_if_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.artifact.MAX_CONFIGS", 3)
    shared = "row_shared:splits={},reduction=two_pass"
    most = 2**29  # 2 * 24 + 7 values of four bytes a row; twice as many rows would take more than the 144 GB of a GH200
    chosen = {8192: shared.format(16), 131072: shared.format(32), most: "row_warp"}
    assert served(PROBLEM, SINGLE_BLOCK, chosen) == [
        (str(parse_config(SINGLE_BLOCK)), 4096), (str(parse_config(chosen[8192])), 65536), (str(make_config("row_warp")), None)]


def test_too_few_blocks_for_many_rows_give_way() -> None:
    """Four blocks are right for any number of rows, and leave nearly all of a GPU idle at a million."""
    problem, few = Problem(16, 8, 16), parse_config("row_warp:splits=4,reduction=two_pass")
    kernels = serve_all_rows(render(problem, few), H200, lambda at: best_predicted(at, H200))
    assert kernels[0].source.config == few

    def times(config: Config, rows: int) -> float:
        """The predicted time in multiples of the best there is."""
        at = replace(problem, rows=rows)
        return predict(at, config, H200).time_us / predict(at, best_predicted(at, H200), H200).time_us

    assert times(few, 1 << 20) > 10 * times(kernels[-1].source.config, 1 << 20)
    for kernel in kernels[:-1]:
        assert kernel.last_rows is not None
        assert times(kernel.source.config, kernel.last_rows) <= ABSURDLY_SLOW < times(kernel.source.config, 2 * kernel.last_rows)
    assert times(kernels[-1].source.config, 1 << 30) == pytest.approx(1.0)


@pytest.mark.usefixtures("by_rules_alone")
def test_the_last_config_is_fit_at_both_ends_of_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is best for the most rows may need more workspace than fewer rows are allowed."""
    monkeypatch.setattr("tuner.artifact.MAX_CONFIGS", 3)
    problem = Problem(16, 512, 512)
    asked: list[int] = []

    def choose(at: Problem) -> Config:
        asked.append(at.rows)
        if at.rows < 1 << 15:
            return parse_config(SINGLE_BLOCK)
        return parse_config(f"row_warp:splits={1024 if at.rows == max(asked) else 32},reduction=two_pass,grads=identity")

    kernels = serve_all_rows(render(problem, parse_config(SINGLE_BLOCK)), H200, choose)
    first, last = kernels[-2].last_rows, kernels[-1].source.config
    assert first == 8192 and last["splits"] == 32 and asked[-1] == max(asked) // LAST_STEP
    assert why_unfit(replace(problem, rows=first + 1), last, H200) is None


@pytest.mark.usefixtures("by_rules_alone")
def test_fewer_rows_than_a_bounded_workspace_allows_have_a_config_of_their_own() -> None:
    problem = Problem(1 << 20, 512, 512)
    two_pass = "row_warp:splits=128,reduction=two_pass,grads=identity"
    below = next(rows for rows in (2**n for n in range(19, -1, -1))
                 if why_refused(replace(problem, rows=rows), parse_config(two_pass), H200))
    other = "row_warp:splits=16,reduction=two_pass,grads=identity"
    assert served(problem, two_pass, {2 * below - 1: other}) == [
        (str(parse_config(other)), 2 * below - 1), (str(parse_config(two_pass)), None)]


@pytest.mark.parametrize("problem", [Problem(16, 8, 16), Problem(512, 64, 64), Problem(1 << 20, 64, 64), Problem(8192, 768, 2304),
                                     Problem(1, 4096, 4096), Problem(16, 8, 16, deterministic=True)],
                         ids=lambda problem: f"{problem.rows}-{problem.hidden}-{problem.out}-{problem.deterministic}")
def test_every_row_count_has_a_config_that_is_fit(problem: Problem) -> None:
    kernels = serve_all_rows(render(problem, best_predicted(problem, H200)), H200, lambda at: best_predicted(at, H200))
    assert 1 <= len(kernels) <= MAX_CONFIGS and kernels[-1].last_rows is None
    assert any(kernel.source.config == best_predicted(problem, H200) for kernel in kernels)
    held = most_memory(H200.arch) // (4 * (2 * problem.hidden + problem.out))
    for rows in (2**n for n in range(held.bit_length())):
        config = next(kernel.source.config for kernel in kernels if kernel.last_rows is None or rows <= kernel.last_rows)
        at = replace(problem, rows=rows)
        assert why_unfit(at, config, H200) is None
        assert "idle" not in (why_wasteful(at, config) or "")


@pytest.mark.usefixtures("by_rules_alone")
def test_row_counts_that_no_gpu_can_hold_have_no_config_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(1 << 20, 64, 64)
    tuned = best_predicted(problem, H200)
    first_refused = next(rows for rows in (2**n for n in range(20, 40)) if why_not(replace(problem, rows=rows), tuned, H200))
    needed = first_refused * 4 * (2 * 64 + 64)

    def last_rows() -> list[int | None]:
        kernels = serve_all_rows(render(problem, tuned), H200, lambda at: make_config("row_warp"))
        return [kernel.last_rows for kernel in kernels]

    monkeypatch.setattr("tuner.artifact.most_memory", lambda arch: needed - 1)
    assert last_rows() == [None]
    monkeypatch.setattr("tuner.artifact.most_memory", lambda arch: 10**15)
    assert last_rows() == [first_refused // 2, None]


def test_no_gpu_has_more_memory_than_the_most_of_its_architecture() -> None:
    assert most_memory("sm_90a") == most_memory("sm_90") == 144 * 10**9
    assert most_memory("sm_103a") == max(most_memory(name) for name in (*TARGETS, "sm_103"))


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
