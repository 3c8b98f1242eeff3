"""tuner.backward on arrays that say where on a GPU they lie: here host memory, and kernels of the host executor."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import tuner
from codegen.problem import GRADIENTS
from codegen.space import make_config
from tests.fake_driver import FakeDriver
from tuner.compare import bound_fault
from tuner.executors import Executor
from tuner.executors.host import HostExecutor
from tuner.inputs import Gradients, Inputs, random_inputs
from tuner.launcher import arrays as arrays_module
from tuner.launcher import engine as engines
from tuner.launcher.driver import Device, Driver
from tuner.launcher.engine import Engine
from tuner.launcher.program import Launcher
from tuner.store import Store

ROWS, HIDDEN, OUT, STREAM = 12, 40, 24, 9


class ByInterface:
    """Host memory behind __cuda_array_interface__."""

    def __init__(self, array: np.ndarray, stream: int | None = None, read_only: bool = False) -> None:
        self.array = array
        self.stream, self.read_only = stream, read_only

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        array = self.array
        said = {"shape": array.shape, "typestr": array.dtype.str, "data": (array.ctypes.data, self.read_only), "version": 3,
                "strides": None if array.flags.c_contiguous else array.strides}
        return said if self.stream is None else {**said, "stream": self.stream}


class ByDlpack:
    """Host memory behind DLPack, on a device that is called a GPU."""

    managed = False

    def __init__(self, array: np.ndarray, stream: int | None = None, device: int = 0) -> None:
        self.array, self.device, self.streams = array, device, list[int]()

    def __dlpack_device__(self) -> tuple[int, int]:
        return arrays_module.ON_CUDA[self.managed], self.device

    def __dlpack__(self, *, stream: int) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, host_executor: Executor, store: Store) -> Iterator[FakeDriver]:
    assert isinstance(host_executor, HostExecutor)
    found = FakeDriver(host_executor)
    driver = Driver(found)
    engine = Engine(Device(driver, 0), Launcher(driver, store), found.compiled)
    monkeypatch.setattr(engines, "_engines", {0: engine})
    monkeypatch.setattr(engines, "choose", lambda problem, place: make_config("row_thread", {"reduction": "two_pass"}))
    monkeypatch.setattr(arrays_module, "open_driver", lambda: driver)
    yield found


@pytest.fixture(params=[ByInterface, ByDlpack])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def data() -> Inputs:
    return random_inputs(ROWS, HIDDEN, OUT)


def room(kind: Any, dtype: Any = np.float32) -> dict[str, Any]:
    shapes = {"dx": (ROWS, HIDDEN), "dgamma": (HIDDEN,), "dbeta": (HIDDEN,), "dw": (OUT, HIDDEN), "db": (OUT,)}
    return {name: kind(np.full(shape, np.nan, dtype)) for name, shape in shapes.items()}


def scratch(kind: Any, size: int = 1 << 20) -> Any:
    """It begins anywhere."""
    return kind(np.full(size + 1, 0xFF, np.uint8)[1:])


def call(data: Inputs, kind: Any, **options: Any) -> Gradients:
    given = {name: kind(getattr(data, name)) for name in ("dy", "x", "gamma", "beta", "w")}
    defaults = {"out": room(kind), "workspace": scratch(kind), "stream": STREAM}
    return tuner.backward(**{**given, **defaults, **options})


def fetched(results: Gradients) -> Gradients:
    return Gradients(**{name: array.array for name, array in results.present().items()})


def test_nothing_is_copied_and_all_goes_to_the_stream(fake: FakeDriver, kind: Any, data: Inputs) -> None:
    out = room(kind)
    results = call(data, kind, out=out)
    assert all(getattr(results, name) is out[name] for name in GRADIENTS)
    assert bound_fault(data, fetched(results)) is None
    assert set(fake.streams) == {STREAM} and fake.current == []


def test_managed_memory_is_on_the_gpu(fake: FakeDriver, data: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByDlpack, "managed", True)
    assert ByDlpack(data.x).__dlpack_device__()[0] == 13  # kDLCUDAManaged
    assert bound_fault(data, fetched(call(data, ByDlpack))) is None


def test_dlpack_is_told_the_stream(fake: FakeDriver, data: Inputs) -> None:
    for stream, said in ((STREAM, STREAM), (0, arrays_module.LEGACY_STREAM)):
        x = ByDlpack(data.x)
        call(data, ByDlpack, x=x, stream=stream)
        assert x.streams == [said]


def test_the_stream_waits_for_producers(fake: FakeDriver, data: Inputs) -> None:
    call(data, ByInterface, x=ByInterface(data.x, stream=5), dy=ByInterface(data.dy, stream=STREAM))
    assert fake.log[:2] == ["record 5", f"wait {STREAM}"] and "record 9" not in fake.log


class Stream:
    def __init__(self, **handles: int) -> None:
        self.__dict__ |= handles


@pytest.mark.parametrize("stream", [Stream(cuda_stream=3), Stream(ptr=3), Stream(handle=3), 3])
def test_streams_of_any_library(fake: FakeDriver, data: Inputs, stream: object) -> None:
    call(data, ByInterface, stream=stream)
    assert set(fake.streams) == {3}


def test_some_gradients_and_no_scale(fake: FakeDriver, kind: Any, data: Inputs) -> None:
    out = {name: array for name, array in room(kind).items() if name in ("dx", "db")}
    results = call(data, kind, wants="dx,db", out=out)
    assert set(results.present()) == {"dx", "db"}
    assert bound_fault(data, fetched(results), frozenset(out)) is None
    bare = Inputs(data.dy, data.x, None, None, data.w, data.eps)
    out = {name: array for name, array in room(kind).items() if name in ("dx", "dw", "db")}
    assert bound_fault(bare, fetched(call(data, kind, gamma=None, beta=None, out=out)), frozenset(out)) is None


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1)], ids=str)
def test_saved_statistics_are_used(fake: FakeDriver, kind: Any, data: Inputs, shape: tuple[int, ...]) -> None:
    x = data.x.astype(np.float64)
    mean, rstd = x.mean(1).astype(np.float32), (1.0 / np.sqrt(x.var(1) + data.eps)).astype(np.float32)
    right = call(data, kind, mean=kind(mean.reshape(shape)), rstd=kind(rstd.reshape(shape)))
    assert bound_fault(data, fetched(right)) is None
    other = call(data, kind, mean=kind(mean.reshape(shape)), rstd=kind(2 * rstd.reshape(shape)))
    assert bound_fault(data, fetched(other)) is not None


def test_no_rows(fake: FakeDriver, kind: Any) -> None:
    data = random_inputs(0, HIDDEN, OUT)
    out = room(kind) | {"dx": kind(np.empty((0, HIDDEN), np.float32))}
    results = fetched(call(data, kind, out=out))
    assert all(not array.any() for array in results.present().values())


@pytest.mark.parametrize(("change", "said"), [
    ({"x": "strided"}, "x must be C-contiguous"), ({"dy": "short"}, "dy has the shape"), ({"w": "double"}, "w must be float32"),
    ({"gamma": "double"}, "gamma is .* but must be float32"), ({"dy": "host"}, "dy must lie on the GPU"),
    ({"workspace": "short"}, "workspace must have .* bytes"), ({"out": "short"}, r"out\['dx'\] is float32"),
    ({"out": "locked"}, "writable"), ({"out": "extra"}, "not among the gradients wanted"), ({"out": 3}, "out must be a mapping"),
    ({"stream": "s"}, "stream must be the handle"), ({"executor": "abacus"}, "cannot go through the executor"),
    ({"mean": "same"}, "belong together"), ({"out": None}, "no way known to make new arrays of tests")], ids=str)
def test_what_makes_no_sense(fake: FakeDriver, data: Inputs, change: dict[str, Any], said: str) -> None:
    name, how = next(iter(change.items()))
    odd: Any = {
        "strided": lambda: ByInterface(np.asfortranarray(data.x)), "short": lambda: ByInterface(data.dy[:-1]),
        "double": lambda: ByInterface(getattr(data, name).astype(np.float64)), "host": lambda: data.dy,
        "extra": lambda: {"dz": 1}, "same": lambda: ByInterface(data.x[:, 0].copy()),
        "locked": lambda: room(ByInterface) | {"dx": ByInterface(np.empty((ROWS, HIDDEN), np.float32), read_only=True)}}
    if (name, how) == ("workspace", "short"):
        value = scratch(ByInterface, 256)
    elif (name, how) == ("out", "short"):
        value = room(ByInterface) | {"dx": ByInterface(np.empty((1, HIDDEN), np.float32))}
    else:
        value = odd[how]() if isinstance(how, str) and how in odd else how
    with pytest.raises(tuner.TunerError, match=said):
        call(data, ByInterface, **{name: value})


def test_other_devices(fake: FakeDriver, data: Inputs) -> None:
    with pytest.raises(tuner.InputError, match="dy lies on GPU 1, but x on GPU 0"):
        call(data, ByDlpack, dy=ByDlpack(data.dy, device=1))


def test_gradients_are_added_to_what_is_there(fake: FakeDriver, data: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    atomic = make_config("row_thread", {"reduction": "atomic"})
    out = {name: ByInterface(np.zeros_like(array.array)) for name, array in room(ByInterface).items()}
    for _ in range(2):
        results = fetched(call(data, ByInterface, out=out, accumulate=True, config=atomic))
    halved = {name: array if name == "dx" else array / 2 for name, array in results.present().items()}
    assert bound_fault(data, Gradients(**halved)) is None
    assert not any(entry.startswith("fill") for entry in fake.log)


def test_results_lie_over_nothing_else(fake: FakeDriver, kind: Any) -> None:
    data = random_inputs(ROWS, HIDDEN, HIDDEN)
    shapes = {"dw": (HIDDEN, HIDDEN), "db": (HIDDEN,)}
    out = room(kind) | {name: kind(np.empty(shape, np.float32)) for name, shape in shapes.items()}
    both = np.empty(HIDDEN + 1, np.float32)
    x, gamma, held = data.x.copy(), np.ones(HIDDEN, np.float32), np.zeros((1 << 10, HIDDEN), np.float32)
    for options, said in (
            ({"x": kind(x), "out": out | {"dx": kind(x)}}, "dx shares memory with x"),
            ({"gamma": kind(gamma), "out": out | {"db": kind(gamma)}}, "db shares memory with gamma"),
            ({"out": out | {"dgamma": kind(both[1:]), "db": kind(both[:-1])}}, "db shares memory with dgamma"),
            ({"dy": kind(held[:ROWS]), "workspace": kind(held.reshape(-1)), "out": out}, "workspace shares memory with dy")):
        with pytest.raises(tuner.InputError, match=said):
            call(data, kind, **options)
    assert fake.log == []
    halves = np.empty((2, HIDDEN), np.float32)  # next to each other is apart
    results = call(data, kind, out=out | {"dgamma": kind(halves[0]), "dbeta": kind(halves[1])})
    assert bound_fault(data, fetched(results)) is None


class CupyDevice:
    """A GPU of the CuPy below."""

    current: ClassVar = [0]

    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None:
        self.current.append(self.index)

    def __exit__(self, *failure: object) -> None:
        self.current.pop()


class CupyArray(ByDlpack):
    """An array of the CuPy below: added to, it says on which GPU."""

    def __iadd__(self, found: object) -> CupyArray:
        CUPY.log.append(CupyDevice.current[-1])
        return self


CupyArray.__module__ = "cupy"


class Cupy(ModuleType):
    """CuPy, as far as it is used: a stream leaves the current GPU as it is."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.log: list[int] = []
        self.cuda = SimpleNamespace(ExternalStream=lambda stream: nullcontext(),
                                    get_current_stream=lambda: SimpleNamespace(ptr=40 + CupyDevice.current[-1]))

    def empty(self, shape: tuple[int, ...], dtype: str) -> str:
        return f"on GPU {CupyDevice.current[-1]}"


CUPY = Cupy()


def test_cupy_makes_and_adds_on_the_gpu_of_the_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", CUPY)
    array = CupyArray(np.zeros(4, np.float32))
    array.device = CupyDevice(1)  # type: ignore[assignment]
    assert arrays_module.stream_handle(None, array) == 41
    assert arrays_module.empty_like(array, (4,), "float32", STREAM) == "on GPU 1"
    arrays_module.add_into(array, array, STREAM)
    assert CUPY.log == [1] and CupyDevice.current == [0]


class TorchTensor:
    """A tensor on GPU 1 of the PyTorch below."""

    is_cuda, device = True, 1

    def new_empty(self, shape: tuple[int, ...], dtype: str) -> tuple[int, int]:
        return TORCH.current[-1]

    def detach(self) -> TorchTensor:
        return self

    def add_(self, found: object) -> None:
        TORCH.added.append(TORCH.current[-1])


TorchTensor.__module__ = "torch"


class Torch(ModuleType):
    """PyTorch as far as streams are used, each a GPU and a handle. It takes the handle 0 for none, and gives another stream."""

    float32 = "float32"

    def __init__(self) -> None:
        super().__init__("torch")
        self.current, self.added = [(0, 0)], list[tuple[int, int]]()
        self.cuda = SimpleNamespace(stream=self._stream, default_stream=lambda device: (device, 0),
                                    ExternalStream=lambda handle, device: (device, handle or 0xBAD))

    @contextmanager
    def _stream(self, stream: tuple[int, int]) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()


TORCH = Torch()


@pytest.mark.parametrize(("stream", "handle"), [(STREAM, STREAM), (0, 0), (arrays_module.LEGACY_STREAM, 0)])
def test_pytorch_makes_and_adds_on_the_stream_of_the_call(monkeypatch: pytest.MonkeyPatch, stream: int, handle: int) -> None:
    monkeypatch.setitem(sys.modules, "torch", TORCH)
    monkeypatch.setattr(TORCH, "added", [])
    tensor = TorchTensor()
    assert arrays_module.empty_like(tensor, (4,), "float32", stream) == (1, handle)
    arrays_module.add_into(tensor, tensor, stream)
    assert TORCH.added == [(1, handle)] and TORCH.current == [(0, 0)]


def test_what_cannot_add_says_so(fake: FakeDriver, data: Inputs) -> None:
    dw = room(ByInterface)["dw"]
    with pytest.raises(tuner.InputError, match="no way known to add to arrays of tests"):
        arrays_module.add_into(dw, dw, STREAM)
    with pytest.raises(tuner.InputError, match="give db in out"):
        call(data, ByInterface, out={"dx": 1, "dgamma": 1, "dbeta": 1, "dw": 1}, accumulate=True)


# --- the same arguments beside NumPy's arrays ----------------------------------------------------------------------------------


def test_numpy_results_go_where_they_are_told(data: Inputs, host_executor: Executor) -> None:
    dw = np.full((OUT, HIDDEN), np.nan, np.float32)
    results = tuner.backward(data.dy, data.x, data.gamma, data.beta, data.w, executor=host_executor, config="row_thread",
                             out={"dw": dw})
    assert results.dw is dw and bound_fault(data, results) is None
    with pytest.raises(tuner.InputError, match=r"out\['dw'\] is float32"):
        tuner.backward(data.dy, data.x, data.gamma, data.beta, data.w, executor=host_executor, config="row_thread",
                       out={"dw": dw.T})


def test_numpy_results_are_added(data: Inputs, host_executor: Executor) -> None:
    out = {name: np.zeros_like(array.array) for name, array in room(ByInterface).items() if name in ("dx", "dw", "db")}
    for _ in range(2):
        results = tuner.backward(data.dy, data.x, data.gamma, data.beta, data.w, wants="dx,dw,db", executor=host_executor,
                                 config="row_thread", out=out, accumulate=True)
    assert results.dw is out["dw"] and results.db is out["db"]
    halved = Gradients(dx=out["dx"], dw=out["dw"] / 2, db=out["db"] / 2)
    assert bound_fault(data, halved, frozenset(("dx", "dw", "db"))) is None


def test_numpy_statistics_are_used(data: Inputs, host_executor: Executor) -> None:
    x = data.x.astype(np.float64)
    mean, rstd = x.mean(1).astype(np.float32), (1.0 / np.sqrt(x.var(1) + data.eps)).astype(np.float32)
    given = (data.dy, data.x, data.gamma, data.beta, data.w)
    right = tuner.backward(*given, executor=host_executor, config="row_thread", mean=mean, rstd=rstd[:, None])
    assert bound_fault(data, right) is None
    wrong = tuner.backward(*given, executor=host_executor, config="row_thread", mean=mean, rstd=2 * rstd)
    assert bound_fault(data, wrong) is not None
    with pytest.raises(tuner.InputError, match="belong together"):
        tuner.backward(*given, executor=host_executor, mean=mean)


@pytest.mark.parametrize("name", ["stream", "workspace"])
def test_numpy_arrays_have_no_stream(data: Inputs, name: str) -> None:
    with pytest.raises(tuner.InputError, match="are for arrays on a GPU"):
        tuner.backward(data.dy, data.x, data.gamma, data.beta, data.w, **{name: 1})  # type: ignore[arg-type]
