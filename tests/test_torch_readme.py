"""The program in README that calls best.cu from PyTorch."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from codegen.problem import Problem
from tests.artifact_cases import SINGLE_BLOCK, one
from tests.host_artifact import HostArtifact
from tuner.store import Store
from tuner.toolchain import find_nvcc

PROBLEM = Problem(27, 24, 7)
NO_WORKSPACE = "row_thread:reduction=atomic"
"""PyTorch's allocator of GPU memory aligns as best.h asks for; that of the CPU does not."""

README = Path(__file__).resolve().parent.parent / "README.md"
ON_THIS_MACHINE = {'ctypes.CDLL("./libbest.so")': "built", "torch.cuda.current_stream().cuda_stream": "None"}


def program() -> str:
    (text,) = re.findall(r"```python\n(import ctypes.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    return str(text)


@pytest.mark.usefixtures("seeded_torch")
def test_its_gradients_are_those_of_autograd(store: Store, tmp_path: Path) -> None:
    text = program()
    for theirs, ours in ON_THIS_MACHINE.items():
        assert text.count(theirs) == 1
        text = text.replace(theirs, ours)
    names: dict[str, Any] = {"built": HostArtifact(one(NO_WORKSPACE, PROBLEM).cu, store, tmp_path).library}
    exec(text, names)
    check(names["LayerNormLinear"], "cpu")


@pytest.mark.cuda
@pytest.mark.usefixtures("seeded_torch")
def test_its_gradients_are_those_of_autograd_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    (tmp_path / "best.cu").write_text(one(SINGLE_BLOCK, PROBLEM).cu)
    code = f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}"
    subprocess.run([str(find_nvcc(arch).path), "-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", code, "best.cu", "-o",
                    "libbest.so"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(program(), names)
    check(names["LayerNormLinear"], "cuda")


def check(function: Any, device: str) -> None:
    """Compares the function with PyTorch's own."""
    sizes = ((3, 9, 24), (24,), (24,), (7, 24), (7,))
    ours = [torch.randn(*size, device=device, requires_grad=True) for size in sizes]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    y = function.apply(*ours)
    x, gamma, beta, w, bias = theirs
    expected = torch.nn.functional.linear(torch.nn.functional.layer_norm(x, (24,), gamma, beta, 1e-5), w, bias)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(y, expected)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)
