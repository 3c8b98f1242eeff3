"""The measurement of what promotion is worth: which configs it runs and what it writes; that it runs, on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.limits import target
from codegen.problem import Problem
from codegen.space import why_refused
from tuner.bench import promotion

PROBLEM = Problem(300, 64, 300, wants=frozenset(promotion.SHOWN))


def test_every_depth_of_each_float32_arithmetic_has_a_config_that_runs() -> None:
    found = promotion.configs(PROBLEM, target("sm_90"))
    for variant in promotion.MEASURED:
        assert {((variant, "fp16x3"), 64), ((variant, "bf16x6"), 64), ((variant, "bf16x6"), 128)} <= set(found)
    assert {(("gemm_mma", "fp16x3"), 128), (("gemm_mma", "fp16x3"), 256), (("gemm_mma", "bf16x6"), 0)} <= set(found)
    for ((variant, arithmetic), promote), config in found.items():
        assert (config.variant, config["arithmetic"], config["promote"]) == (variant, arithmetic, promote)
        assert why_refused(PROBLEM, config, target("sm_90")) is None


def test_the_table_has_a_cell_for_what_was_measured_and_none_for_what_was_not() -> None:
    lines = promotion.table({(("gemm_mma", "fp16x3"), 64): {"dx": 1e-7, "dw": 2e-7},
                             (("gemm_wgmma", "bf16x6"), 0): {"dx": 3e-6, "dw": 4e-6}}, {"dx": 5e-7, "dw": 6e-7})
    assert lines[0] == "| promote every | 64 | never |"
    assert lines[2:] == ["| gemm_mma fp16x3 | 1.0e-07 / 2.0e-07 |  |", "| gemm_wgmma bf16x6 |  | 3.0e-06 / 4.0e-06 |",
                         "| PyTorch float32 | 5.0e-07 / 6.0e-07 |  |"]


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert promotion.main(["--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("promotion: PyTorch cannot be used")
    assert not list(tmp_path.iterdir())


@pytest.mark.cuda
def test_errors_grow_with_the_depth_of_promotion(tmp_path: Path) -> None:
    assert promotion.main(["--depth", "4096", "--hidden", "128", "--out", str(tmp_path)]) == 0
    row = next(line for line in (tmp_path / "promotion.md").read_text().splitlines() if line.startswith("| gemm_mma fp16x3"))
    after_64, after_256 = (float(cell.split("/")[1]) for cell in (row.split("|")[2], row.split("|")[4]))
    assert after_64 < after_256 < 2e-6
