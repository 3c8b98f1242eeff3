"""The arrays one call writes: their shapes and data types, the same for every executor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.dtypes import dtype_words
from codegen.plan import Plan
from codegen.problem import Problem
from codegen.tensors import BY_NAME, OUTPUTS
from tuner.dtypes import NUMPY, DType
from tuner.errors import LaunchError
from tuner.inputs import Inputs


@dataclass(frozen=True, slots=True)
class Spec:
    """The shape and the data type of an array that is yet to be."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def output_specs(inputs: Inputs, wants: frozenset[str]) -> dict[str, Spec]:
    """The wanted gradients of a call, in their order."""
    return {name: Spec(BY_NAME[name].shape(inputs.rows, inputs.hidden, inputs.out),
                       NUMPY[BY_NAME[name].dtype(inputs.dtype, inputs.param_dtype)])
            for name in OUTPUTS if name in wants}


def workspace_specs(plan: Plan, rows: int, sms: int) -> dict[str, Spec]:
    """The scratch buffers of a plan, in its order."""
    return {buffer.name: Spec((buffer.size.evaluate(rows, sms),), NUMPY[buffer.dtype]) for buffer in plan.workspace}


def check_dtypes(problem: Problem, inputs: Inputs) -> None:
    """Raises LaunchError unless a kernel for that problem may read the inputs: their bytes would mean something else to it."""
    asked, given = (problem.dtype, problem.param_dtype), (inputs.dtype, inputs.param_dtype)
    if asked != given:
        raise LaunchError(f"the kernel is for {dtype_words(*asked)}, not for {dtype_words(*given)}")
