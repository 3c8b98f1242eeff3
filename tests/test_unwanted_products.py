"""No tensor-core product is worked out for gradients that do not need it, as nvcc's own code shows."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from codegen.config import Config
from codegen.problem import Problem
from codegen.render import render
from tests.variant_cases import EACH, SMALL_SHAPE, is_emulated
from tuner.toolchain import find_nvcc

WITH_PRODUCTS = [
    config for config in EACH
    if is_emulated(config.variant) and config["reduction"] == "two_pass" and config.as_dict().get("finish") != "epilogue"]


def products(config: Config, wants: str, folder: Path) -> int:
    """Matrix instructions in what nvcc makes of all kernels of the config."""
    problem = Problem(SMALL_SHAPE.rows, SMALL_SHAPE.hidden, SMALL_SHAPE.out, wants=frozenset((wants,)))
    (folder / "kernel.cu").write_text(render(problem, config).text)
    command = [str(find_nvcc("sm_90a").path), "-std=c++17", "-arch=compute_90a", "-ptx", "kernel.cu", "-o", "kernel.ptx"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return len(re.findall(r"\bmma\.sync|\bwgmma\.mma_async", (folder / "kernel.ptx").read_text()))


@pytest.mark.parametrize("config", WITH_PRODUCTS, ids=str)
def test_sums_of_dy_and_dbeta_take_no_products(config: Config, tmp_path: Path) -> None:
    assert products(config, "db", tmp_path) == 0
    assert products(config, "dbeta", tmp_path) == 0
    assert products(config, "dgamma", tmp_path) > 0
