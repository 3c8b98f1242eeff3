"""The whole benchmark, on a GPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from codegen.problem import GRADIENTS
from tuner import cli


@pytest.mark.cuda
def test_the_benchmark_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LNL_REPORTS", str(tmp_path / "none"))
    (tmp_path / "shapes").write_text("small 3,5,16,8\n")
    assert cli.main(["bench", "--shapes", str(tmp_path / "shapes"), "--dtypes", "float32,bfloat16,float16", "--accuracy",
                     "fp32,tf32", "--trials", "4", "--out", str(tmp_path / "out")]) == 0
    values = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert len(values["rows"]) == 4
    for row in values["rows"]:
        assert row["reason"] is None and row["ours"]["warm"]["median"] > 0 and row["ours"]["cold"]["median"] > 0
        assert set(row["ours"]["errors"]) == set(GRADIENTS)
    if importlib.util.find_spec("torch") is None:
        assert "PyTorch cannot be used" in values["parts"][0]["absent"]
        return
    assert values["parts"][0]["rates"]["matrix_tflops"] > 1
    for row in values["rows"]:
        assert row["judge"] == "timed" and set(row["peers"]) == {"eager", "compile", "gemms"}
        for name, entry in row["peers"].items():
            assert entry["note"] is None, (name, entry["note"])
            assert entry["warm"]["median"] > 0 and entry["cold"]["median"] > 0
    float32 = values["rows"][0]["peers"]
    assert max(float32["eager"]["errors"].values()) < 2e-6
