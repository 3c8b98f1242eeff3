"""Tunes, checks and runs CUDA kernels for the backward pass of `y = Linear(LayerNorm(x))`."""

import sys

try:
    from codegen.config import Config
    from codegen.errors import CodegenError, InvalidConfig, InvalidProblem, UnsupportedDtype
    from codegen.problem import Shape
    from tuner.calls import backward, configs
    from tuner.entry import tune
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
except KeyboardInterrupt:
    if sys.argv[:1] == ["-m"]:  # `python -m tuner`, of which this is the longest part before tuner/__main__.py
        sys.exit(130)
    raise

__all__ = [
    "CodegenError", "CompileError", "Config", "DeviceLost", "Event", "Gradients", "InputError", "InputTypeError",
    "InvalidConfig", "InvalidProblem", "LaunchError", "NoValidKernel", "Record", "Shape", "Status", "ToolchainError",
    "TuneResult", "TunerError", "UnsupportedDtype", "backward", "configs", "tune",
]
