"""The check of one device: both passes on random data, random incoming gradients among them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from codegen.config import Config
from codegen.errors import InvalidConfig
from codegen.problem import Problem
from codegen.render import render
from codegen.space import why_refused
from tuner.dtypes import NUMPY
from tuner.evaluate import HOST_MULTIPLY_ADDS
from tuner.executors import Executor
from tuner.inputs import AnyFloats, Inputs, random_inputs
from tuner.verify.judge import FORWARD, Expected, Figure, judge_forward, judge_gradients
from tuner.verify.oracle import Oracle
from tuner.wisdom.recall import choose


@dataclass(frozen=True, slots=True)
class Request:
    """What to verify.

    Attributes:
        problem: the sizes, data types and accuracy class; all five gradients.
        eps: of the LayerNorm.
        seed: of the data.
        config: the kernel; None: the one that tuner.backward would take.
    """

    problem: Problem
    eps: float
    seed: int
    config: Config | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Data:
    """The data of one check and what is right for it."""

    inputs: Inputs
    bias: AnyFloats
    expected: Expected


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the check of one device came to.

    Attributes:
        device: its name.
        kernel: its config, or who chooses it.
        rows: how many were run.
        forward_by: what computed the forward pass.
        figures: of the forward pass, then of each gradient.
    """

    device: str
    kernel: str
    rows: int
    forward_by: str
    figures: tuple[Figure, ...]

    @property
    def forward_ok(self) -> bool:
        """Whether y is right."""
        return all(figure.ok for figure in self.figures if figure.name == FORWARD)

    @property
    def gradients_ok(self) -> bool:
        """Whether all gradients are."""
        return all(figure.ok for figure in self.figures if figure.name != FORWARD)

    @property
    def ok(self) -> bool:
        """Whether all is right."""
        return self.forward_ok and self.gradients_ok


def rows_on(executor: Executor, problem: Problem) -> int:
    """The rows of a check: those asked for; on the CPU as many of them as it does in seconds."""
    if executor.measures:
        return problem.rows
    return min(problem.rows, max(1, HOST_MULTIPLY_ADDS // (problem.hidden * problem.out)))


def make_data(request: Request, rows: int, oracle: Oracle) -> Data:
    """Seeded random data for so many rows."""
    problem = request.problem
    inputs = replace(random_inputs(rows, problem.hidden, problem.out, request.seed, dtype=problem.dtype,
                                   param_dtype=problem.param_dtype), eps=request.eps)
    bias = np.random.default_rng([request.seed, 3]).standard_normal(problem.out, np.float32).astype(NUMPY[problem.param_dtype])
    return Data(inputs, bias, oracle.expected(inputs, bias))


def check(request: Request, executor: Executor, oracle: Oracle) -> list[Outcome]:
    """Runs both passes on one device and judges them; on a GPU that PyTorch uses, once more as PyTorch's programs run them.

    Raises:
        InvalidConfig: the config cannot run these sizes.
        NoValidKernel: no kernel can.
        CompileError, LaunchError, ToolchainError: the kernel did not compile or run.
    """
    rows = rows_on(executor, request.problem)
    problem = replace(request.problem, rows=rows)
    config = choose(problem, executor) if request.config is None else request.config
    if request.config is not None and (reason := why_refused(problem, config, executor.limits)):
        raise InvalidConfig(f"{config} cannot run these sizes: {reason}")
    data = make_data(request, rows, oracle)
    place = "cuda" if executor.measures else "cpu"
    y = oracle.forward(data.inputs, data.bias, place)
    gradients = executor.compile(render(problem, config)).run(data.inputs, problem.wants)
    results = [(executor.device, str(config), gradients)]
    if executor.measures and (through := oracle.gradients(data.inputs, data.bias)) is not None:
        results.append((f"{executor.device}, through PyTorch", "what tuner.torch takes", through))
    forward = judge_forward(data.inputs, data.bias, y, data.expected)
    return [Outcome(device, kernel, rows, oracle.forward_name(place),
                    (forward, *judge_gradients(data.inputs, found, data.expected, problem.accuracy)))
            for device, kernel, found in results]
