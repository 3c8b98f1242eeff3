"""What a time depends on beside the GPU: the driver and the programs' versions."""

from __future__ import annotations

import functools
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata

from tuner.errors import ToolchainError
from tuner.toolchain import find_nvcc


def versions(arch: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Versions by name, for people; `more` comes last. What is not there is left out.

    Args:
        arch: the nvcc architecture of the GPU.
    """
    return dict(_found(arch)) | dict(more or {})


@functools.cache  # they take several processes
def _found(arch: str) -> tuple[tuple[str, str], ...]:
    found = {"driver": _driver(), "nvcc": _nvcc(arch), "Python": platform.python_version()}
    found |= {name: _package(name) for name in ("pycuda", "cuda-bindings", "numpy", "triton")}
    return tuple((name, text) for name, text in found.items() if text)


def _driver() -> str:
    """The driver's version; CUDA's interface tells only the version of CUDA."""
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True,
                              text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next(iter(done.stdout.split()), "") if done.returncode == 0 else ""


def _nvcc(arch: str) -> str:
    try:
        return find_nvcc(arch).version
    except ToolchainError:
        return ""


def _package(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
