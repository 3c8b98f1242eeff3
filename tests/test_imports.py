"""Who may import whom: the direction of data flow, held by the import statements of every module."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted([*ROOT.glob("codegen/**/*.py"), *ROOT.glob("reports/*.py"), *ROOT.glob("tuner/**/*.py")])
SOLE_IMPORTERS = {
    "jinja2": ("codegen/render.py", "reports/page.py"),
    "optuna": ("tuner/search.py", "tuner/replay/rivals.py", "tuner/study/storage.py", "tuner/study/shared.py",
               "tuner/study/journal.py", "reports/importance.py"),
    "matplotlib": ("reports/",),
    "pygments": ("reports/page.py",),
    "reports": ("reports/", "tuner/pages.py"),
    "sqlalchemy": ("tuner/study/storage.py",),
    "kernel_tuner": ("tuner/replay/kernel_tuner.py",),
    "pycuda": ("tuner/executors/cuda",),
    "cuda": ("tuner/executors/cuda",),
    "pynvml": ("tuner/timing/nvml.py",),
    "torch": ("tuner/torch/",),
}
FORBIDDEN_IN_CODEGEN = {"numpy", "pycuda", "cuda", "optuna", "rich", "reports", "tuner"}


def imported(path: Path) -> set[str]:
    """Top-level names of everything a module imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_there_are_modules_to_look_at() -> None:
    assert len(MODULES) > 15


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_import_directions(path: Path) -> None:
    name, names = str(path.relative_to(ROOT)), imported(path)
    if name.startswith("codegen/"):
        assert not names & FORBIDDEN_IN_CODEGEN
    for library, allowed in SOLE_IMPORTERS.items():
        if library in names:
            assert name.startswith(allowed), f"{name} imports {library}"


@pytest.mark.parametrize("module", ["codegen.render", "tuner", "tuner.cli"])
def test_importing_creates_no_context_and_loads_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; print(' '.join(sorted({{'matplotlib', 'optuna', 'pycuda', 'torch'}} & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_without_pytorch_its_package_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; import tuner.torch"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.strip().splitlines()[-1].endswith("needs PyTorch, which is not installed; install the extra `torch`")
