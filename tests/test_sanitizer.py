"""compute-sanitizer finds nothing in any variant: no access out of bounds, no race in shared memory, no unset memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sanitized_run import CASES
from tuner.gate.sanitizer import TOOLS, find_sanitizer

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.cuda
@pytest.mark.parametrize("variant", sorted({case[0].variant for case in CASES}))
@pytest.mark.parametrize("tool, shapes", [("memcheck", ""), ("racecheck", ""), ("initcheck", ""), ("initcheck", "odd"),
                                          ("synccheck", "")])
def test_compute_sanitizer_finds_nothing(tool: str, shapes: str, variant: str) -> None:
    sanitizer = find_sanitizer()
    assert sanitizer is not None, "compute-sanitizer is not on the PATH; it comes with the CUDA toolkit"
    run = [sys.executable, "-m", "tests.sanitized_run", variant, *shapes.split()]
    subprocess.run(run, cwd=ROOT, check=True, capture_output=True, timeout=500)  # compiles: nvcc may crash below the tool
    done = subprocess.run([sanitizer, "--tool", tool, "--error-exitcode", "99", *TOOLS[tool], *run], cwd=ROOT,
                          capture_output=True, text=True, timeout=500)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    assert f"{sum(case[0].variant == variant for case in CASES)} runs" in output
    assert "ERROR SUMMARY: 0 errors" in output or "RACECHECK SUMMARY: 0 hazards" in output, output[-3000:]
