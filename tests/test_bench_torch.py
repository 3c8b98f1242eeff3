"""What the benchmark asks of PyTorch, on a stand-in for the module; what PyTorch answers shows on a GPU (test_bench_cuda.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.bench.peers import PEERS, Peer, make_peer
from tuner.bench.torch_gpu import WARM_UPS, PeerFailed, Torch, failures, open_torch
from tuner.errors import ToolchainError
from tuner.timing.clocks import Clocks
from tuner.timing.measure import Effort, cold, warm


class FakeTorch:
    """As much of the module as timing needs; `now` is the GPU's clock in milliseconds.

    Attributes:
        current: the stream that is current.
        captured: how many calls each graph holds.
        alive: graphs not reset.
    """

    def __init__(self, gpu: bool = True, call_ms: float = 0.25) -> None:
        self.now, self.current, self.captured, self.alive = 0.0, "default", list[int](), 0
        self.precision = ""
        self.call_ms = call_ms
        self._capturing: FakeGraph | None = None
        self.float32 = "float32"
        self.__version__, self.version = "9.9", SimpleNamespace(cuda="99.0")
        self.cuda = SimpleNamespace(
            is_available=lambda: gpu, Stream=lambda: SimpleNamespace(synchronize=lambda: None), set_stream=self._set_stream,
            Event=lambda enable_timing: FakeEvent(self), CUDAGraph=lambda: FakeGraph(self), graph=self._graph,
            empty_cache=lambda: None)

    def _set_stream(self, stream: Any) -> None:
        self.current = stream

    def set_float32_matmul_precision(self, precision: str) -> None:
        self.precision = precision

    def empty(self, size: int, dtype: str, device: str) -> Any:
        return SimpleNamespace(fill_=lambda value: self.spend(0.08))

    @contextmanager
    def _graph(self, graph: FakeGraph, stream: Any) -> Iterator[None]:
        assert stream is self.current, "autograd's backward pass would run outside the capture"
        self._capturing = graph
        yield
        self._capturing = None
        self.captured.append(graph.calls)

    def work(self) -> None:
        if self._capturing is not None:
            self._capturing.calls += 1
        else:
            self.spend(self.call_ms)

    def spend(self, ms: float) -> None:
        assert self._capturing is None
        self.now += ms


class FakeGraph:
    def __init__(self, torch: FakeTorch) -> None:
        self._torch, self.calls = torch, 0
        torch.alive += 1

    def replay(self) -> None:
        self._torch.spend(self.calls * self._torch.call_ms)

    def reset(self) -> None:
        self._torch.alive -= 1


class FakeEvent:
    def __init__(self, torch: FakeTorch) -> None:
        self._torch = torch

    def record(self, stream: Any) -> None:
        assert stream is self._torch.current
        self.at = self._torch.now

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


def test_warm_and_cold_times_through_pytorch() -> None:
    fake = FakeTorch(call_ms=0.02)
    stream = Torch(fake).open_stream(1 << 20)
    assert fake.current != "default"
    assert warm(stream, fake.work, Effort(6, 1.0), Clocks()).samples == pytest.approx((20.0,) * 6)
    assert cold(stream, fake.work, Effort(6, 1.0), Clocks()).samples == pytest.approx((20.0,) * 6)
    assert fake.captured == [1, 6, 1] and fake.alive == 0


def test_libraries_warm_up_outside_the_capture() -> None:
    fake = FakeTorch(call_ms=1.0)
    with Torch(fake).open_stream(1 << 20).graph(fake.work, 3) as replay:
        assert fake.now == WARM_UPS * 1.0
        replay()
    assert fake.now == WARM_UPS * 1.0 + 3.0


def test_a_failed_capture_is_a_note_on_the_peer() -> None:
    def refuse() -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with ...")

    peer = Peer("eager", refuse, Torch(FakeTorch()).open_stream(1 << 20))
    for measure in (peer.warm, peer.cold):
        with pytest.raises(PeerFailed, match=r"^eager: CUDA error: operation not permitted when stream is capturing$"):
            measure(5)


def test_a_peer_that_cannot_be_made_is_a_peer_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(torch: Any, tensors: Any) -> Any:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB.")

    monkeypatch.setitem(PEERS, "eager", no_memory)  # type: ignore[misc]
    with pytest.raises(PeerFailed, match="eager: CUDA out of memory"):
        make_peer("eager", Torch(FakeTorch()), None, None)  # type: ignore[arg-type]


def test_an_error_without_a_text_is_named_by_its_kind() -> None:
    with pytest.raises(PeerFailed, match="compiling: NotImplementedError"), failures("compiling"):
        raise NotImplementedError


@pytest.mark.parametrize(("accuracy", "precision"), [("fp32", "highest"), ("tf32", "high"), ("bf16", "high")])
def test_tf32_is_off_in_class_fp32_alone(accuracy: str, precision: str) -> None:
    fake = FakeTorch()
    Torch(fake).set_accuracy(accuracy)
    assert fake.precision == precision


def test_without_pytorch_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ToolchainError, match="PyTorch cannot be used"):
        open_torch()


def test_a_pytorch_without_a_gpu_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", FakeTorch(gpu=False))
    with pytest.raises(ToolchainError, match="this PyTorch finds no GPU"):
        open_torch()


def test_versions_are_those_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", FakeTorch())
    assert open_torch().versions == {"PyTorch": "9.9", "PyTorch's CUDA": "99.0"}
