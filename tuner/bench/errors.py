"""How far results are from float64: the same backward pass in PyTorch's float64 on the GPU, on the very data that is timed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.bench.peers import Tensors, forward
from tuner.bench.torch_gpu import Torch, failures

CHUNK_ELEMENTS = 1 << 25
"""Elements of one float64 temporary, about ten of which are alive at a time: 2.7 GB beyond the results, whatever the rows."""


def float64_gradients(torch: Torch, tensors: Tensors, chunk_elements: int = CHUNK_ELEMENTS) -> dict[str, Any]:
    """The five gradients in float64, by name; the rows are taken in chunks and the parameter gradients summed over them."""
    module, run = torch.module, forward(torch)
    gamma, beta, w, bias = (
        tensor.detach().double().requires_grad_() for tensor in (tensors.gamma, tensors.beta, tensors.w, tensors.bias))
    dx = module.empty_like(tensors.x, dtype=module.float64)
    step = max(1, chunk_elements // max(w.shape))
    for start in range(0, len(tensors.x), step):
        rows = slice(start, start + step)
        x = tensors.x[rows].double().requires_grad_()
        run(x, gamma, beta, w, bias, tensors.eps).backward(tensors.dy[rows].double())
        dx[rows] = x.grad
    return {"dx": dx, "dgamma": gamma.grad, "dbeta": beta.grad, "dw": w.grad, "db": bias.grad}


class Judge:
    """Holds the float64 gradients of one case and compares others with them.

    Raises:
        PeerFailed: the GPU has not enough memory for them.
    """

    def __init__(self, torch: Torch, tensors: Tensors) -> None:
        self._torch = torch
        with failures("the gradients in float64 cannot be computed"):
            self._right = float64_gradients(torch, tensors)

    def errors(self, gradients: Mapping[str, Any]) -> dict[str, float]:
        """The relative Frobenius error of each gradient, ||got - right|| / ||right||.

        Args:
            gradients: by name, tensors or NumPy arrays.

        Raises:
            PeerFailed: the GPU has not enough memory.
        """
        with failures("the errors cannot be computed"):
            return {name: self._error(name, got) for name, got in gradients.items()}

    def _error(self, name: str, got: Any) -> float:
        right = self._right[name]
        tensor = got if isinstance(got, self._torch.module.Tensor) else self._torch.tensor(got)
        return float(((tensor.double() - right).norm() / right.norm()).item())

