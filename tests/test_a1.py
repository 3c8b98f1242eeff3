"""A1: fast and wrong never wins. Faulty kernels are planted among the candidates, where they would be the fastest."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from codegen.config import Config
from codegen.limits import target
from codegen.problem import Problem, Shape
from codegen.render import Source, render
from codegen.space import valid_configs
from tests.fake_gpu import FakeGpu, failing_launch, rugged
from tests.numpy_kernels import FAULTY_KERNELS, PLAIN
from tests.variant_cases import EVERY, SMALL_SHAPE, TYPED, is_emulated
from tuner.costmodel import plausible_us, predict
from tuner.entry import tune
from tuner.errors import NoValidKernel
from tuner.evaluate import Evaluator
from tuner.executors import Executor, Program, Run
from tuner.inputs import Gradients, Inputs
from tuner.outcome import TuneResult
from tuner.records import Status
from tuner.validate import Validator

SHAPE = Shape(4, 4, 8, 16)
VARIANT = "row_warp"
TILE = 4


def ranked() -> list[Config]:
    """The candidates, fastest predicted first: the first of these are tried on every executor."""
    problem, limits = Problem.of(SHAPE), target("sm_90")
    return sorted(valid_configs(problem, limits, [VARIANT]), key=lambda config: predict(problem, config, limits).time_us)


# --- on kernels that run -----------------------------------------------------------------------------------------------------

Plant = Callable[[Source], Source]


def text_fault(pattern: str, replacement: str) -> Plant:
    """Changes the CUDA text; a pattern that is not there is a fault of this test."""
    def plant(source: Source) -> Source:
        text, count = re.subn(pattern, replacement, source.text)
        assert count, f"{pattern} does not occur"
        return replace(source, text=text)
    return plant


def too_much_shared_memory(source: Source) -> Source:
    first, *others = source.plan.launches
    steps = tuple(replace(first, shared_bytes=1 << 20) if step is first else step for step in source.plan.steps)
    assert steps != source.plan.steps and len(steps) == len(others) + 1
    return replace(source, plan=replace(source.plan, steps=steps))


PLANTS: Mapping[str, Plant] = {
    "returns at once": text_fault(r"(__global__ void [^{;]*Params p\) \{)", r"\1 return;"),
    "last tile skipped": text_fault(r"\bp\.rows\b", f"(p.rows > {TILE} ? p.rows - {TILE} : p.rows)"),
    "divides by H - 1": text_fault(r"sum_d2 / HIDDEN", "sum_d2 / (HIDDEN - 1)"),
    "mean term doubled": text_fault(r"- mean_g -", "- 2.0f * mean_g -"),
    "launch fails": too_much_shared_memory,
}


class Planting:
    """An executor that changes some sources before it compiles them."""

    def __init__(self, inner: Executor, plants: Mapping[Config, Plant]) -> None:
        self._inner = inner
        self._plants = plants
        self.name, self.device, self.slug, self.limits = inner.name, inner.device, inner.slug, inner.limits
        self.measures, self.rates, self.bus_id = inner.measures, inner.rates, inner.bus_id

    def compile(self, source: Source) -> Program:
        plant = self._plants.get(source.config)
        return self._inner.compile(source if plant is None else plant(source))

    def close(self) -> None:
        self._inner.close()


def check(result: TuneResult, planted: Mapping[Config, str]) -> None:
    """Each plant was tried and rejected with a reason; one of the others won."""
    records = {record.config: record for record in result.records}
    for config, name in planted.items():
        assert records[config].status not in (Status.OK, Status.NOT_RUN), name
        assert records[config].reason, name
    assert result.winner is not None and result.winner.config not in planted


def test_planted_kernels_never_win(executor: Executor) -> None:
    candidates = [config for config in ranked() if config["reduction"] != "atomic"]
    planted = dict(zip(candidates, PLANTS, strict=False))
    planting = Planting(executor, {config: PLANTS[name] for config, name in planted.items()})
    result = tune(SHAPE, executor=planting, variants=[VARIANT], trials=10, deterministic=True)
    check(result, planted)
    statuses = {name: record.status for record in result.records if (name := planted.get(record.config))}
    assert statuses["launch fails"] == Status.LAUNCH_ERROR
    assert statuses["divides by H - 1"] == statuses["mean term doubled"] == Status.WRONG
    if not executor.measures:
        clean = tune(SHAPE, executor=executor, variants=[VARIANT], trials=10, deterministic=True)
        expected = min((record for record in clean.valid() if record.config not in planted), key=lambda record: record.best_us)
        assert result.winner is not None and result.winner.config == expected.config


HOST_ONLY: Mapping[str, Plant] = {
    "reads before x": text_fault(
        r"(__global__ void [^{;]*Params p\) \{)", r"\1 if (blockIdx.x == 0 && threadIdx.x == 0 && p.x[-1] == 123.0f) return;"),
    "needs its first thread to be first": text_fault(
        r"(__global__ void [^{;]*Params p\) \{)",
        r"\1 if (blockIdx.x == 0 && threadIdx.x == 0) dynamic_shared()[0] = 1.0f;"
        r" if (blockIdx.x == 0 && threadIdx.x == THREADS - 1 && !(dynamic_shared()[0] == 1.0f)) p.db[-1] = 0.0f;"),
}


@pytest.mark.parametrize("name", HOST_ONLY)
def test_on_the_cpu_a_kernel_runs_in_more_than_one_way(host_executor: Executor, name: str) -> None:
    """In the usual layout and order each of these is right."""
    config = next(config for config in ranked() if config["reduction"] == "single_block")
    problem = Problem.of(SHAPE)
    planted = HOST_ONLY[name](render(problem, config))
    program = host_executor.compile(planted)
    assert Validator(problem).validate(program.run).ok
    record = Evaluator(Planting(host_executor, {config: HOST_ONLY[name]}), problem)
    judged = record.judge(record.compile(config))
    assert judged.status is Status.LAUNCH_ERROR
    assert judged.reason is not None and "order" in judged.reason


MATRIX_PLANTS: Mapping[str, Plant] = {
    **{name: PLANTS[name] for name in ("returns at once", "last tile skipped", "divides by H - 1")},
    "mean term doubled": text_fault(r"- ?mean_g\b", "- 2.0f * mean_g"),
    "low parts lost": text_fault(r"first -= low_\w+\(planes\[plane\]\);\s+second -= [^;]*;", "first = second = 0.0f;"),
}
"""For kernels that multiply on tensor cores."""

SPLIT = {config.variant: config for config in EVERY if is_emulated(config.variant) and config["arithmetic"] == "fp16x3"}
NATIVE = {(config.variant, dtype, param_dtype): config for config, dtype, param_dtype in TYPED
          if is_emulated(config.variant) and (dtype, param_dtype) in (("bfloat16", "bfloat16"), ("float16", "float32"))}
PLANTED = [(config, "float32", "float32", name) for config in SPLIT.values() for name in MATRIX_PLANTS]
PLANTED += [(config, dtype, param_dtype, name) for (_, dtype, param_dtype), config in NATIVE.items() for name in MATRIX_PLANTS
            if name not in ("returns at once", "low parts lost")]


@pytest.mark.parametrize(("config", "dtype", "param_dtype", "name"), [
    pytest.param(*plant, id=f"{plant[0].variant}-{'-'.join(plant[1:])}") for plant in PLANTED])
def test_planted_matrix_kernels_are_rejected(host_executor: Executor, config: Config, dtype: str, param_dtype: str,
                                             name: str) -> None:
    """In the accuracy class of the data type. Lost low parts, zero on the exact probe, show in the digits of the random data."""
    problem = Problem.of(SMALL_SHAPE, dtype=dtype, param_dtype=param_dtype)
    planted = MATRIX_PLANTS[name](render(problem, config))
    verdict = Validator(problem).validate(host_executor.compile(planted).run)
    assert not verdict.ok and verdict.reason
    assert name != "low parts lost" or "accuracy class fp32 allows" in verdict.reason


# --- on times that would win -------------------------------------------------------------------------------------------------


def returns_at_once(inputs: Inputs, wants: frozenset[str]) -> Gradients:
    right = PLAIN(inputs, wants).present()
    return Gradients(**{name: np.full_like(array, np.nan) for name, array in right.items()})


def skips_the_last_tile(inputs: Inputs, wants: frozenset[str]) -> Gradients:
    done = max(1, inputs.rows - TILE)
    result = PLAIN(inputs.first(done), wants)
    assert result.dx is not None
    return replace(result, dx=np.concatenate([result.dx, np.zeros((inputs.rows - done, inputs.hidden), np.float32)]))


FAKES: Mapping[str, Run] = {
    "returns at once": returns_at_once,
    "last tile skipped": skips_the_last_tile,
    "divides by H - 1": FAULTY_KERNELS["unbiased variance"],
    "mean term doubled": FAULTY_KERNELS["mean term doubled"],
    "launch fails": failing_launch,
}


def test_faults_are_rejected_though_they_are_the_fastest() -> None:
    candidates = ranked()[::3]
    planted = dict(zip(candidates, FAKES, strict=False))
    gpu = FakeGpu(lambda config: 0.6 if config in planted else rugged(config),
                  {config: FAKES[name] for config, name in planted.items()})
    result = tune(SHAPE, executor=gpu, variants=[VARIANT])
    check(result, planted)
    expected = min((config for config in ranked() if config not in planted), key=rugged)
    assert result.winner is not None and result.winner.config == expected
    assert not planted.keys() & set(gpu.timed)


def test_no_winner_is_faster_than_hardware_allows() -> None:
    suspect = ranked()[4]
    least = plausible_us(Problem.of(SHAPE), FakeGpu.limits)
    gpu = FakeGpu(lambda config: 0.9 * least if config == suspect else rugged(config))
    result = tune(SHAPE, executor=gpu, variants=[VARIANT])
    records = {record.config: record for record in result.records}
    assert records[suspect].status == Status.IMPLAUSIBLE
    assert "at least" in (records[suspect].reason or "")
    check(result, {suspect: "faster than memory"})


@pytest.mark.parametrize("name", FAKES)
def test_a_run_of_nothing_but_faults_has_no_winner(name: str) -> None:
    every = dict.fromkeys(valid_configs(Problem.of(SHAPE), FakeGpu.limits, ["row_thread"]), FAKES[name])
    with pytest.raises(NoValidKernel, match=rf"no valid kernel: {len(every)} of {len(every)} candidates ended with status '"):
        tune(SHAPE, executor=FakeGpu(kernels=every), variants=["row_thread"])
