"""The program in README that calls best.cu from PyTorch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from codegen.problem import Problem
from tests.artifact_cases import one
from tests.host_artifact import HostArtifact
from tuner.store import Store

NO_WORKSPACE = "row_thread:reduction=atomic"
"""PyTorch's allocator of GPU memory aligns as best.h asks for; that of the CPU does not."""

README = Path(__file__).resolve().parent.parent / "README.md"
ON_THIS_MACHINE = {'ctypes.CDLL("./libbest.so")': "built", "torch.cuda.current_stream().cuda_stream": "None"}


@pytest.mark.usefixtures("seeded_torch")
def test_its_gradients_are_those_of_autograd(store: Store, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(import ctypes.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    for theirs, ours in ON_THIS_MACHINE.items():
        assert program.count(theirs) == 1
        program = program.replace(theirs, ours)
    names: dict[str, Any] = {"built": HostArtifact(one(NO_WORKSPACE, Problem(27, 24, 7)).cu, store, tmp_path).library}
    exec(program, names)

    sizes = ((3, 9, 24), (24,), (24,), (7, 24), (7,))
    ours = [torch.randn(*size, requires_grad=True) for size in sizes]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    y = names["LayerNormLinear"].apply(*ours)
    x, gamma, beta, w, bias = theirs
    expected = torch.nn.functional.linear(torch.nn.functional.layer_norm(x, (24,), gamma, beta, 1e-5), w, bias)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(y, expected)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)
