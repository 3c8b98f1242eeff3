"""A new variant takes two steps, as README has them: a template, and a module with its entry in variants.py. This adds one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from codegen import variants

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "tests/new_variant"
ENTRY = ("    gemm_mma,\n", "    gemm_mma,\n    one_warp,\n"), ("row_thread.VARIANT,", "row_thread.VARIANT, one_warp.VARIANT,")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with the example in it."""
    folder = tmp_path_factory.mktemp("sources")
    for package in ("codegen", "templates", "tuner"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(EXAMPLE / "one_warp.cu.j2", folder / "templates")  # the first step
    shutil.copy(EXAMPLE / "one_warp.py", folder / "codegen")  # the second, with the entry
    entries = folder / "codegen/variants.py"
    text = entries.read_text(encoding="utf-8")
    for before, after in ENTRY:
        assert text.count(before) == 1
        text = text.replace(before, after)
    entries.write_text(text, encoding="utf-8")
    return folder


def run(sources: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(sources), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, "-m", *arguments], cwd=sources, env=environment, capture_output=True, text=True,
                          timeout=300)


def test_it_is_no_part_of_this_project() -> None:
    assert "one_warp" not in variants.VARIANTS


def test_it_is_listed_rendered_validated_and_tuned(sources: Path, tmp_path: Path) -> None:
    listed = run(sources, "codegen", "--list")
    assert listed.returncode == 0 and "one_warp" in listed.stdout, listed.stderr
    rendered = run(sources, "codegen", "--variant", "one_warp", "--shape", "4,4,8,16")
    assert "void __launch_bounds__(32) one_warp(" in rendered.stdout, rendered.stderr
    assert "constexpr int STRIDE = 32;  // columns from one of a lane to its next\n" in rendered.stdout
    tuned = run(sources, "tuner", "--shape", "4,4,8,16", "--executor", "host", "--variants", "one_warp,row_thread", "--trials",
                "2", "--out", str(tmp_path))
    assert tuned.returncode == 0, tuned.stderr
    records = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text(encoding="utf-8").splitlines()[1:]]
    assert "ok" in {record["status"] for record in records if record["config"].startswith("one_warp:")}


def test_it_runs_other_sizes_and_16_bit_data(sources: Path, tmp_path: Path) -> None:
    """What it cannot run is refused with a reason, not run."""
    tuned = run(sources, "tuner", "--shape", "2,3,37,5", "--dtype", "bfloat16", "--param-dtype", "float32", "--executor", "host",
                "--variants", "one_warp", "--out", str(tmp_path / "mixed"))
    assert tuned.returncode == 0, tuned.stderr
    refused = run(sources, "tuner", "--shape", "2,3,37,5", "--deterministic", "--executor", "host", "--variants", "one_warp",
                  "--out", str(tmp_path / "deterministic"))
    assert refused.returncode == 1 and "atomic additions come in another order" in refused.stderr + refused.stdout
