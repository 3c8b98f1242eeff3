"""Independent results in float64: PyTorch's autograd where it is installed, else NumPy; and the forward pass to check."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import numpy as np

from tuner.dtypes import NUMPY
from tuner.inputs import AnyFloats, Gradients, Inputs
from tuner.reference import reference
from tuner.verify.judge import Expected, forward


class Oracle(Protocol):
    """Knows what is right.

    Attributes:
        name: for people.
    """

    name: str

    def expected(self, inputs: Inputs, bias: AnyFloats) -> Expected:
        """Both passes in float64, of the inputs as they are."""

    def forward(self, inputs: Inputs, bias: AnyFloats, device: str) -> AnyFloats:
        """y [M, O] as a user's program computes it, on "cpu" or "cuda"."""

    def forward_name(self, device: str) -> str:
        """What computes that."""

    def gradients(self, inputs: Inputs, bias: AnyFloats) -> Gradients | None:
        """All five as a user's program has them from the GPU by tuner.torch; None where there is no such program."""


class NumPyOracle:
    """The formulas, written out."""

    name = "NumPy, float64"

    def expected(self, inputs: Inputs, bias: AnyFloats) -> Expected:
        """As Oracle.expected."""
        return Expected(self.name, forward(inputs, bias), reference(inputs))

    def forward(self, inputs: Inputs, bias: AnyFloats, device: str) -> AnyFloats:
        """On the CPU, whatever the device; in float32, rounded to the data type at the end."""
        x = inputs.x.astype(np.float32)
        gamma, beta = (np.float32(neutral) if array is None else array.astype(np.float32)
                       for array, neutral in ((inputs.gamma, 1.0), (inputs.beta, 0.0)))
        centred = x - x.mean(axis=1, keepdims=True)
        centred -= centred.mean(axis=1, keepdims=True)
        xhat = centred / np.sqrt(np.mean(centred * centred, axis=1, keepdims=True) + np.float32(inputs.eps))
        y = (xhat * gamma + beta) @ inputs.w.astype(np.float32).T + bias.astype(np.float32)
        return np.ascontiguousarray(y.astype(NUMPY[inputs.dtype]))

    def forward_name(self, device: str) -> str:
        """As Oracle.forward_name."""
        return "NumPy, on the CPU"

    def gradients(self, inputs: Inputs, bias: AnyFloats) -> Gradients | None:
        """As Oracle.gradients: None."""
        return None


class AutogradOracle:
    """PyTorch's layer_norm, linear and autograd."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.name = f"PyTorch {torch.__version__} autograd, float64"

    def expected(self, inputs: Inputs, bias: AnyFloats) -> Expected:
        """As Oracle.expected; on the CPU."""
        torch = self._torch
        x, w, lb, dy = (torch.tensor(array.astype(np.float64)) for array in (inputs.x, inputs.w, bias, inputs.dy))
        gamma, beta = (torch.full((inputs.hidden,), neutral, dtype=torch.float64) if array is None
                       else torch.tensor(array.astype(np.float64))
                       for array, neutral in ((inputs.gamma, 1.0), (inputs.beta, 0.0)))
        leaves = [tensor.requires_grad_() for tensor in (x, gamma, beta, w, lb)]
        functional = torch.nn.functional
        y = functional.linear(functional.layer_norm(x, (inputs.hidden,), gamma, beta, inputs.eps), w, lb)
        gradients = torch.autograd.grad(y, leaves, dy)
        return Expected(self.name, y.detach().numpy(), Gradients(*(gradient.numpy() for gradient in gradients)))

    def forward(self, inputs: Inputs, bias: AnyFloats, device: str) -> AnyFloats:
        """tuner.torch.layer_norm_linear; under autocast where data and parameters differ in type."""
        y, _ = self._call(inputs, bias, self._place(device))
        return self._array(y)

    def forward_name(self, device: str) -> str:
        """As Oracle.forward_name."""
        return f"tuner.torch, on the {'GPU' if self._place(device) == 'cuda' else 'CPU'}"

    def gradients(self, inputs: Inputs, bias: AnyFloats) -> Gradients | None:
        """As Oracle.gradients; None where PyTorch finds no GPU."""
        if self._place("cuda") == "cpu":
            return None
        y, leaves = self._call(inputs, bias, "cuda")
        found = self._torch.autograd.grad(y, leaves, self._tensor(inputs.dy, "cuda"))
        return Gradients(*(self._array(gradient) for gradient in found))

    def _place(self, device: str) -> str:
        return device if self._torch.cuda.is_available() else "cpu"

    def _call(self, inputs: Inputs, bias: AnyFloats, device: str) -> tuple[Any, list[Any]]:
        """y, and what it was made of: x, gamma, beta, w and the bias."""
        operation = importlib.import_module("tuner.torch")
        torch, mixed = self._torch, inputs.dtype != inputs.param_dtype
        gamma, beta = (np.full(inputs.hidden, neutral, inputs.w.dtype) if array is None else array
                       for array, neutral in ((inputs.gamma, 1.0), (inputs.beta, 0.0)))
        leaves = [self._tensor(array, device).requires_grad_() for array in (inputs.x, gamma, beta, inputs.w, bias)]
        with torch.autocast(device, getattr(torch, inputs.dtype if mixed else "bfloat16"), enabled=mixed):
            return operation.layer_norm_linear(*leaves, inputs.eps), leaves

    def _tensor(self, array: AnyFloats, device: str) -> Any:
        if array.dtype == NUMPY["bfloat16"]:  # which PyTorch does not take from NumPy
            return self._torch.tensor(array.view(np.int16), device=device).view(self._torch.bfloat16)
        return self._torch.tensor(array, device=device)

    def _array(self, tensor: Any) -> AnyFloats:
        tensor = tensor.detach().cpu().contiguous()
        if tensor.dtype == self._torch.bfloat16:
            found: AnyFloats = tensor.view(self._torch.int16).numpy().view(NUMPY["bfloat16"])
            return found
        same: AnyFloats = tensor.numpy()
        return same


def find_oracle() -> Oracle:
    """PyTorch where it can be imported, else NumPy."""
    try:
        return AutogradOracle(importlib.import_module("torch"))
    except (ImportError, OSError):  # OSError: one of its libraries is missing
        return NumPyOracle()
