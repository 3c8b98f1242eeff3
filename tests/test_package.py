"""The wheel: what is in it, and that it does the main job from an empty folder, without the sources beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("codegen", "reports", "templates", "tuner")
FILES = ("LICENSE", "README.md", "pyproject.toml")
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


def _ignored(folder: str, names: list[str]) -> list[str]:
    """What running leaves behind, and published results, which are no part of the package."""
    results = [name for name in names if Path(folder, name).is_dir()] if Path(folder) == ROOT / "reports" else []
    return [*results, *(name for name in names if name == "__pycache__")]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a wheel is made of: building leaves files beside its sources."""
    folder = tmp_path_factory.mktemp("sources")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=_ignored)
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by the build backend without a network."""
    built = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-c", BUILD, str(built)], cwd=sources, check=True, capture_output=True, text=True)
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder it is installed into."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile",
                    "--disable-pip-version-check", "--target", str(folder), str(wheel)], check=True)
    return folder


def run(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in that folder, with the installed package in front of everything else."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "LNL_HTML": "on", "LNL_WISDOM": str(folder / "wisdom"),
                   "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_everything_in_the_packages_is_in_the_wheel(sources: Path, wheel: Path) -> None:
    """Templates, headers, wisdom, styles and the marks of typed packages among them; and nothing else but its description."""
    there = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*")
              if path.is_file() and (sources / path.relative_to(ROOT)).exists()}
    assert there == wanted
    assert {f"{name}/py.typed" for name in PACKAGES if name != "templates"} < there


def test_the_wheel_has_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        (text,) = (files.read(name).decode() for name in files.namelist() if name.endswith("/LICENSE"))
        (metadata,) = (files.read(name).decode() for name in files.namelist() if name.endswith("/METADATA"))
    assert text == (ROOT / "LICENSE").read_text(encoding="utf-8") and "License-Expression: MIT\n" in metadata


def test_the_installed_wheel_does_the_main_job_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "-m", "tuner", "--shape", "4,4,8,16", "--executor", "host", "--variants", "row_warp",
               "--trials", "2")
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("reports/*/4x4x8x16-float32")
    names = {"best.cu", "best.h", "best.json", "report.html", "report.md", "trials.jsonl"}
    assert {path.name for path in folder.iterdir()} == names
    (folder / "report.html").unlink()
    built = run(installed, tmp_path, "-m", "reports", str(folder.relative_to(tmp_path)))
    assert built.returncode == 0 and (folder / "report.html").exists(), built.stderr
    paths = "import codegen, reports, tuner; print(*codegen.__path__, *reports.__path__, *tuner.__path__)"
    where = run(installed, tmp_path, "-c", paths)
    assert len(where.stdout.split()) == 3 and where.stdout.count(f"{installed}/") == 3, where.stdout


def test_the_installed_wheel_knows_what_shipped_with_it(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "-m", "tuner", "wisdom", "list", "--gpu", "H200", "--size", "8,16")
    assert done.returncode == 0 and "row_" in done.stdout, done.stderr
