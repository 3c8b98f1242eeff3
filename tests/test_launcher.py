"""Plans replayed by the compiled launcher, on a driver whose kernels run on the host executor."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest

from codegen.config import Config
from codegen.limits import target
from codegen.problem import ALL_GRADIENTS, Problem
from codegen.render import render
from codegen.space import parse_config
from codegen.tensors import INPUTS
from tests.fake_driver import CONTEXT, FakeDriver
from tests.variant_cases import EACH, label
from tuner.compare import bound_fault
from tuner.errors import LaunchError
from tuner.executors import Executor
from tuner.executors.arrays import output_specs
from tuner.executors.host import HostExecutor
from tuner.inputs import Gradients, Inputs, random_inputs
from tuner.launcher.driver import Device, Driver
from tuner.launcher.program import TENSOR_FIELDS, Kernel, Launcher, adds
from tuner.reference import reference
from tuner.store import Store

ROWS, HIDDEN, OUT = 33, 40, 24


@pytest.fixture
def fake(host_executor: Executor) -> FakeDriver:
    assert isinstance(host_executor, HostExecutor)
    return FakeDriver(host_executor)


def loaded(fake: FakeDriver, store: Store, config: Config, problem: Problem) -> Kernel:
    driver = Driver(fake)
    source = render(problem, config)
    return Kernel(Launcher(driver, store), Device(driver, 0), source, fake.compiled(source))


def run(fake: FakeDriver, host: Executor, kernel: Kernel, inputs: Inputs, wants: frozenset[str],
        kept: frozenset[str] = frozenset(), before: float = math.nan, stream: int = 7) -> Gradients:
    """One call on fenced memory full of NaN, or of what was there before."""
    assert isinstance(host, HostExecutor)
    replay = kernel.at(inputs.rows, inputs.eps, kept)
    with host.load("struct Params { int i; };\nextern \"C\" __global__ void none(const Params) {}", ("none",)).memory() as memory:
        fake.memory = memory
        addresses = {name: memory.add_input(name, array) for name in (*INPUTS, "mean", "rstd")
                     if (array := getattr(inputs, name)) is not None}
        for name, spec in output_specs(inputs, wants).items():
            addresses[name] = memory.add_output(name, spec.shape, spec.dtype)
            memory.fill(name, before)
        workspace = memory.add_output("workspace", (replay.workspace_bytes // 4,))
        replay([addresses.get(name, 0) for name in TENSOR_FIELDS], workspace, stream)
        return Gradients(**{name: memory.read(name) for name in wants})


@pytest.mark.parametrize("config", EACH, ids=label)
def test_every_variant_is_replayed_right(fake: FakeDriver, host_executor: Executor, store: Store, config: Config) -> None:
    inputs = random_inputs(ROWS, HIDDEN, OUT)
    kernel = loaded(fake, store, config, Problem(1, HIDDEN, OUT))
    for rows in (ROWS, 1):
        given = inputs.first(rows)
        assert bound_fault(given, run(fake, host_executor, kernel, given, ALL_GRADIENTS)) is None
    assert set(fake.streams) == {7} and fake.current == []


@pytest.mark.parametrize("config", [config for config in EACH if adds(render(Problem(1, HIDDEN, OUT), config).plan)], ids=label)
def test_kept_outputs_are_added_to(fake: FakeDriver, host_executor: Executor, store: Store, config: Config) -> None:
    inputs = random_inputs(ROWS, HIDDEN, OUT)
    kernel = loaded(fake, store, config, Problem(1, HIDDEN, OUT))
    parameters = ALL_GRADIENTS - {"dx"}
    assert adds(kernel.source.plan) == parameters
    got = run(fake, host_executor, kernel, inputs, ALL_GRADIENTS, kept=parameters, before=1.0)
    less = {name: array if name == "dx" else array - 1.0 for name, array in got.present().items()}
    right = reference(inputs).present()
    for name, array in less.items():  # next to 1.0 a float32 cannot hold more
        assert np.allclose(array, right[name], rtol=1e-5, atol=1e-5)


PLAIN = next(config for config in EACH if config.variant == "row_warp" and config["reduction"] == "atomic")


def test_what_is_not_wanted_is_neither_filled_nor_computed(fake: FakeDriver, host_executor: Executor, store: Store) -> None:
    inputs = random_inputs(ROWS, HIDDEN, OUT)
    kernel = loaded(fake, store, PLAIN, Problem(1, HIDDEN, OUT))
    got = run(fake, host_executor, kernel, inputs, frozenset(("dx", "db")))
    assert bound_fault(inputs, got, frozenset(("dx", "db"))) is None
    assert [entry for entry in fake.log if entry.startswith("fill")] == [f"fill {4 * OUT}"]


SEVERAL = next(config for config in EACH if config.variant == "gemm_mma")
"""A plan of several launches and no fill."""


OVERLAPPED = [parse_config("weight_ahead:threads=128,rows=2,outs=8,launches=overlapped"),
              parse_config("weight_mma:rows=16,outs=32,columns=32,warp_outs=16,launches=overlapped")]
"""Plans whose launches overlap."""


def judged(fake: FakeDriver, host: Executor, kernel: Kernel, rows: int = ROWS, seed: int = 0, stream: int = 7) -> list[str]:
    """What one call, which has to be right, enqueues."""
    fake.log.clear()
    inputs = random_inputs(rows, HIDDEN, OUT, seed=seed)
    assert bound_fault(inputs, run(fake, host, kernel, inputs, ALL_GRADIENTS, stream=stream)) is None
    return list(fake.log)


def test_launches_are_one_graph_for_all_data_and_row_counts(fake: FakeDriver, host_executor: Executor, store: Store) -> None:
    kernel = loaded(fake, store, SEVERAL, Problem(1, HIDDEN, OUT))
    launches = [launch.kernel for launch in kernel.source.plan.launches]
    for seed, rows in enumerate((ROWS, ROWS, 1, 70)):
        assert judged(fake, host_executor, kernel, rows, seed) == ["graph 1", *launches]
    assert len(launches) > 1 and set(fake.streams) == {7}


def test_streams_share_no_graph(fake: FakeDriver, host_executor: Executor, store: Store) -> None:
    kernel = loaded(fake, store, SEVERAL, Problem(1, HIDDEN, OUT))
    first = [judged(fake, host_executor, kernel, stream=stream)[0] for stream in (0, 1, 2, 3, 4, 3, 0)]
    assert first[:4] == ["graph 1", "graph 2", "graph 3", "graph 4"] and first[5:] == ["graph 4", "graph 1"]
    assert not first[4].startswith("graph")  # there are no more
    assert len(fake.graphs) == 4


def test_the_graph_of_a_stream_that_is_gone_goes_to_another(fake: FakeDriver, host_executor: Executor, store: Store,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the stream not used for longest. While all four are in use, none is taken away."""
    kernel = loaded(fake, store, SEVERAL, Problem(1, HIDDEN, OUT))
    replay = kernel.at(ROWS, 1e-5)

    def graph_of(stream: int) -> str:
        fake.log.clear()
        replay([0] * len(TENSOR_FIELDS), 0, stream)
        return fake.log[0] if fake.log else ""

    with monkeypatch.context() as patch:
        patch.setattr(fake, "_run", lambda *arguments: None)
        assert [graph_of(stream) for stream in (0, 1, 2, 3, 4)] == ["graph 1", "graph 2", "graph 3", "graph 4", ""]
        for _ in range(100):
            assert [graph_of(stream) for stream in (0, 1, 2, 3, 4)] == ["graph 1", "graph 2", "graph 3", "graph 4", ""]
        for place in range(260):
            assert graph_of((0, 2, 3)[place % 3]) != ""
    assert judged(fake, host_executor, kernel, stream=4)[0] == "graph 2" and len(fake.graphs) == 4
    assert judged(fake, host_executor, kernel, stream=0)[0] == "graph 1"
    assert not judged(fake, host_executor, kernel, stream=1)[0].startswith("graph")


def test_graphs_are_made_while_another_stream_is_captured(fake: FakeDriver, host_executor: Executor, store: Store) -> None:
    fake.capturing = {9}
    kernel = loaded(fake, store, SEVERAL, Problem(1, HIDDEN, OUT))
    assert judged(fake, host_executor, kernel)[0] == "graph 1" and not fake.spoilt
    fake.current.append(CONTEXT)
    fake.functions["cuModuleLoadData"](ctypes.byref(ctypes.c_void_p()), b"0")
    assert fake.spoilt  # the mode is as it was before


def test_a_captured_stream_gets_launches(fake: FakeDriver, host_executor: Executor, store: Store) -> None:
    kernel = loaded(fake, store, SEVERAL, Problem(1, HIDDEN, OUT))
    for captured in (False, True, False):
        fake.capturing = {7} if captured else set()
        assert ("graph 1" in judged(fake, host_executor, kernel)) is not captured


def test_what_is_filled_first_is_launched_by_itself(fake: FakeDriver, host_executor: Executor, store: Store) -> None:
    log = judged(fake, host_executor, loaded(fake, store, PLAIN, Problem(1, HIDDEN, OUT)))
    assert log[0].startswith("fill") and not fake.graphs


@pytest.mark.parametrize("function", ["cuStreamIsCapturing", "cuGraphCreate", "cuGraphAddKernelNode_v2",
                                      "cuGraphInstantiateWithFlags", "cuGraphExecKernelNodeSetParams_v2", "cuGraphLaunch"])
@pytest.mark.parametrize("lacks", [True, False], ids=["lacks", "fails"])
def test_where_there_are_no_graphs_kernels_are_launched(fake: FakeDriver, host_executor: Executor, store: Store, function: str,
                                                        lacks: bool) -> None:
    if lacks:
        del fake.functions[function]
    else:
        fake.fail = function
    kernel = loaded(fake, store, SEVERAL, Problem(1, HIDDEN, OUT))
    for _ in range(2):
        assert judged(fake, host_executor, kernel) == [launch.kernel for launch in kernel.source.plan.launches]


@pytest.mark.parametrize("config", OVERLAPPED, ids=lambda config: config.variant)
@pytest.mark.parametrize("captured", [False, True], ids=["graph", "captured"])
def test_launches_overlap(fake: FakeDriver, host_executor: Executor, store: Store, config: Config, captured: bool) -> None:
    fake.capturing = {7} if captured else set()
    kernel = loaded(fake, store, config, Problem(1, HIDDEN, OUT))
    steps = [f"overlapping {launch.kernel}" if launch.overlaps else launch.kernel for launch in kernel.source.plan.launches]
    for rows in (ROWS, 1):
        assert judged(fake, host_executor, kernel, rows) == ([] if captured else ["graph 1"]) + steps
    assert "overlapping" in steps[-1]


@pytest.mark.parametrize("captured", [False, True], ids=["graph", "captured"])
def test_nothing_overlaps_where_the_driver_is_older(fake: FakeDriver, host_executor: Executor, store: Store,
                                                    captured: bool) -> None:
    fake.capturing = {7} if captured else set()
    del fake.functions["cuGraphAddDependencies_v2"]
    kernel = loaded(fake, store, OVERLAPPED[0], Problem(1, HIDDEN, OUT))
    assert not any("overlapping" in entry for entry in judged(fake, host_executor, kernel))


def test_a_graph_that_cannot_be_connected_is_not_used(fake: FakeDriver, host_executor: Executor, store: Store) -> None:
    fake.fail = "cuGraphAddDependencies_v2"
    kernel = loaded(fake, store, OVERLAPPED[0], Problem(1, HIDDEN, OUT))
    assert judged(fake, host_executor, kernel)[-1].startswith("overlapping")


def test_saved_statistics_are_read(fake: FakeDriver, host_executor: Executor, store: Store) -> None:
    inputs = random_inputs(ROWS, HIDDEN, OUT)
    x = inputs.x.astype(np.float64)
    mean, rstd = x.mean(1), 1.0 / np.sqrt(x.var(1) + inputs.eps)
    kernel = loaded(fake, store, PLAIN, Problem(1, HIDDEN, OUT))
    right = Inputs(inputs.dy, inputs.x, inputs.gamma, inputs.beta, inputs.w, inputs.eps, mean.astype(np.float32),
                   rstd.astype(np.float32))
    assert bound_fault(inputs, run(fake, host_executor, kernel, right, ALL_GRADIENTS)) is None
    other = Inputs(inputs.dy, inputs.x, inputs.gamma, inputs.beta, inputs.w, inputs.eps, right.mean, 2 * right.rstd)
    assert bound_fault(inputs, run(fake, host_executor, kernel, other, ALL_GRADIENTS)) is not None


@pytest.mark.parametrize("before", [[], [0xBAD], [CONTEXT]], ids=str)
def test_the_current_context_is_left_as_it_was(fake: FakeDriver, host_executor: Executor, store: Store,
                                               before: list[int]) -> None:
    kernel = loaded(fake, store, PLAIN, Problem(1, HIDDEN, OUT))
    fake.current[:] = before
    inputs = random_inputs(ROWS, HIDDEN, OUT)
    assert bound_fault(inputs, run(fake, host_executor, kernel, inputs, ALL_GRADIENTS)) is None
    assert fake.current == before


@pytest.mark.parametrize("function", ["cuLaunchKernel", "cuMemsetD32Async", "cuCtxPushCurrent_v2"])
def test_what_the_driver_refuses_is_a_sentence(fake: FakeDriver, host_executor: Executor, store: Store, function: str) -> None:
    kernel = loaded(fake, store, PLAIN, Problem(1, HIDDEN, OUT))
    fake.fail = function
    with pytest.raises(LaunchError, match="an illegal memory access"):
        run(fake, host_executor, kernel, random_inputs(ROWS, HIDDEN, OUT), ALL_GRADIENTS)
    assert fake.current == []


def test_code_that_does_not_load_is_a_sentence(fake: FakeDriver, store: Store) -> None:
    fake.fail = "cuModuleLoadData"
    with pytest.raises(LaunchError, match="cuModuleLoadData failed: an illegal"):
        loaded(fake, store, PLAIN, Problem(1, HIDDEN, OUT))
    assert fake.current == []


def test_a_device_known_by_name_has_the_tables_limits(fake: FakeDriver) -> None:
    assert Device(Driver(fake), 0).limits.copy_tbps == target("sm_90").copy_tbps


def test_another_device_has_limits_from_its_attributes(fake: FakeDriver) -> None:
    fake.name = "NVIDIA Something"
    limits = Device(Driver(fake), 0).limits
    assert (limits.name, limits.arch, limits.sms) == ("Something", "sm_90a", 132)
    assert math.isclose(limits.copy_tbps, 0.9 * 4.608)
