"""What a user would run instead of the tuned kernel, in PyTorch: backward only, the forward pass being done before.

eager    autograd through `layer_norm` and `linear`
compile  the same under `torch.compile`
gemms    the two matrix products alone, dy @ w and dy^T @ n with n the output of the LayerNorm: what no chain of separate kernels
         round the library's products can beat
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from codegen.problem import GRADIENTS
from tuner.bench.measure import effort
from tuner.bench.torch_gpu import Torch, failures
from tuner.executors import Timing
from tuner.inputs import Inputs
from tuner.timing.clocks import Clocks
from tuner.timing.measure import Stream, cold, warm

Forward = Callable[..., Any]

COMPLETE = ("eager", "compile")
"""The peers that compute what the kernel computes; `gemms` leaves out the sums and the LayerNorm."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """The inputs of one call on the GPU, and a bias of zeros for the Linear, whose gradient is db."""

    dy: Any
    x: Any
    gamma: Any
    beta: Any
    w: Any
    bias: Any
    eps: float

    @classmethod
    def upload(cls, torch: Torch, inputs: Inputs) -> Tensors:
        """Copies of the arrays, all there.

        Raises:
            PeerFailed: the GPU has not enough memory.
        """
        assert inputs.gamma is not None and inputs.beta is not None
        with failures("PyTorch cannot hold the inputs"):
            dy, x, gamma, beta, w = (torch.tensor(array) for array in (
                inputs.dy, inputs.x, inputs.gamma, inputs.beta, inputs.w))
            bias = torch.module.zeros(inputs.out, dtype=w.dtype, device=w.device)
        return cls(dy, x, gamma, beta, w, bias, inputs.eps)


def forward(torch: Torch) -> Forward:
    """y [M, O] of (x, gamma, beta, w, bias, eps)."""
    functional = torch.module.nn.functional

    def layer_norm_linear(x: Any, gamma: Any, beta: Any, w: Any, bias: Any, eps: float) -> Any:
        return functional.linear(functional.layer_norm(x, (x.shape[-1],), gamma, beta, eps), w, bias)

    return layer_norm_linear


class Peer:
    """One of them, ready to be timed. What it raises is a PeerFailed.

    Attributes:
        name: what tables call it.
    """

    def __init__(self, name: str, compute: Callable[[], Any], stream: Stream) -> None:
        self.name = name
        self._compute = compute
        self._stream = stream

    def warm(self, samples: int) -> Timing:
        """Times of one call, replayed from a graph."""
        with failures(self.name):
            return warm(self._stream, self._enqueue, effort(samples), Clocks())

    def cold(self, samples: int) -> Timing:
        """Times of single calls that find nothing in the L2 cache."""
        with failures(self.name):
            return cold(self._stream, self._enqueue, effort(samples), Clocks())

    def gradients(self) -> Mapping[str, Any]:
        """What it computes, tensors by name; empty for those that compute only a part."""
        if self.name not in COMPLETE:
            return {}
        with failures(self.name):
            return dict(zip(GRADIENTS, self._compute(), strict=True))

    def _enqueue(self) -> None:
        self._compute()


def _backward(torch: Torch, run: Forward, tensors: Tensors) -> Callable[[], Any]:
    """The forward pass is done here; what is returned gives the gradients in the order of GRADIENTS, as often as it is called."""
    x, gamma, beta, w, bias = (
        tensor.detach().requires_grad_() for tensor in (tensors.x, tensors.gamma, tensors.beta, tensors.w, tensors.bias))
    y = run(x, gamma, beta, w, bias, tensors.eps)
    return lambda: torch.module.autograd.grad(y, (x, gamma, beta, w, bias), tensors.dy, retain_graph=True)


def eager(torch: Torch, tensors: Tensors) -> Callable[[], Any]:
    """Autograd, operation by operation."""
    return _backward(torch, forward(torch), tensors)


def compiled(torch: Torch, tensors: Tensors) -> Callable[[], Any]:
    """The same as torch.compile makes it."""
    config: Any = importlib.import_module("torch._functorch.config")
    if hasattr(config, "donated_buffer"):  # from PyTorch 2.5 on, a backward pass may otherwise run once only
        config.donated_buffer = False
    torch.module.compiler.reset()  # after eight shapes of one function it would give up and run it eagerly
    return _backward(torch, torch.module.compile(forward(torch), dynamic=False), tensors)


def products(torch: Torch, tensors: Tensors) -> Callable[[], Any]:
    """The two matrix products."""
    module, t = torch.module, tensors
    normalised = module.nn.functional.layer_norm(t.x, (t.x.shape[-1],), t.gamma, t.beta, t.eps)
    dn, dw = module.empty_like(t.x), module.empty_like(t.w)

    def compute() -> None:
        module.mm(t.dy, t.w, out=dn)
        module.mm(t.dy.t(), normalised, out=dw)

    return compute


PEERS: Mapping[str, Callable[[Torch, Tensors], Callable[[], Any]]] = {"eager": eager, "compile": compiled, "gemms": products}


def make_peer(name: str, torch: Torch, tensors: Tensors, stream: Stream) -> Peer:
    """The peer of that name, its forward pass done.

    Raises:
        PeerFailed: it cannot be made.
    """
    with failures(name):
        return Peer(name, PEERS[name](torch, tensors), stream)
