"""Who competes in one case: what a contestant is, and PyTorch's side of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tuner.bench.errors import Judge
from tuner.bench.peers import Tensors, make_peer
from tuner.bench.results import Case
from tuner.bench.torch_gpu import PeerFailed, Torch
from tuner.executors import Timing
from tuner.inputs import Inputs
from tuner.timing.measure import FLUSH_L2S


class Contestant(Protocol):
    """Something that computes a case, or a part of it, on the GPU. What its methods raise is a TunerError."""

    name: str

    def warm(self, samples: int) -> Timing:
        """Times of one call, replayed from a graph."""

    def cold(self, samples: int) -> Timing:
        """Times of single calls that find nothing in the L2 cache."""

    def gradients(self) -> Mapping[str, Any]:
        """What it computes, by name; empty for those that compute only a part."""


class Judging(Protocol):
    """What tells how exact gradients are."""

    def errors(self, gradients: Mapping[str, Any]) -> dict[str, float]:
        """The relative Frobenius error of each against float64."""


@dataclass(frozen=True, slots=True)
class Opponents:
    """The other side of one case.

    Attributes:
        ready: the peers that can be timed.
        failed: why the others cannot, by name.
        judge: None where the gradients in float64 cannot be had.
    """

    ready: tuple[Contestant, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    judge: Judging | None = None


class Arena(Protocol):
    """Where opponents come from."""

    def prepare(self, case: Case, inputs: Inputs, names: Sequence[str]) -> Opponents:
        """The peers of these names on these inputs; those that cannot be made are among the failed."""

    def release(self) -> None:
        """Gives back the GPU memory of opponents that nobody holds any more."""


class TorchArena:
    """The peers of tuner.bench.peers.

    Args:
        torch: PyTorch.
        l2_bytes: size of the GPU's L2 cache.
    """

    def __init__(self, torch: Torch, l2_bytes: int) -> None:
        self._torch = torch
        self._flush_bytes = FLUSH_L2S * l2_bytes

    def prepare(self, case: Case, inputs: Inputs, names: Sequence[str]) -> Opponents:
        """As Arena.prepare. The first of them runs with the case's accuracy class set, and all others until the next case."""
        self._torch.set_accuracy(case.problem.accuracy)
        failed: dict[str, str] = {}
        try:
            tensors = Tensors.upload(self._torch, inputs)
            stream = self._torch.open_stream(self._flush_bytes)
        except PeerFailed as error:
            return Opponents(failed=dict.fromkeys(names, str(error)))
        ready = []
        for name in names:
            try:
                ready.append(make_peer(name, self._torch, tensors, stream))
            except PeerFailed as error:
                failed[name] = str(error)
        return Opponents(tuple(ready), failed, self._judge(tensors))

    def release(self) -> None:
        """As Arena.release."""
        self._torch.release()

    def _judge(self, tensors: Tensors) -> Judge | None:
        try:
            return Judge(self._torch, tensors)
        except PeerFailed:
            return None
