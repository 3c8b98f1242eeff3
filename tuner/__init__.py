"""Tunes, checks and runs CUDA kernels for the backward pass of `y = Linear(LayerNorm(x))`."""

from codegen.config import Config
from codegen.errors import CodegenError, InvalidConfig, InvalidProblem, UnsupportedDtype
from codegen.problem import Shape
from tuner.calls import backward, configs
from tuner.errors import (
    CompileError,
    DeviceLost,
    InputError,
    InputTypeError,
    LaunchError,
    NoValidKernel,
    ToolchainError,
    TunerError,
)
from tuner.inputs import Gradients
from tuner.outcome import Event, TuneResult
from tuner.records import Record, Status
from tuner.tuning import tune

__all__ = [
    "CodegenError", "CompileError", "Config", "DeviceLost", "Event", "Gradients", "InputError", "InputTypeError",
    "InvalidConfig", "InvalidProblem", "LaunchError", "NoValidKernel", "Record", "Shape", "Status", "ToolchainError",
    "TuneResult", "TunerError", "UnsupportedDtype", "backward", "configs", "tune",
]
