"""The backward pass on NumPy arrays, by the best kernel known, and the list of kernels there are."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from codegen.config import Config
from codegen.errors import InvalidConfig
from codegen.limits import target as limits_of
from codegen.problem import ALL_GRADIENTS, Problem, Shape, check_wants
from codegen.render import render
from codegen.space import valid_configs, why_refused
from tuner.arguments import as_config, as_dtype, as_flag, as_shape, as_text, parse_names
from tuner.choose import checked_executor, open_executor
from tuner.errors import InputError
from tuner.executors import Executor, Program
from tuner.executors.arrays import output_specs
from tuner.inputs import AnyFloats, Gradients, Inputs
from tuner.wisdom.recall import choose


def backward(dy: AnyFloats, x: AnyFloats, gamma: AnyFloats | None, beta: AnyFloats | None, w: AnyFloats, eps: float = 1e-5,
             wants: Iterable[str] | str | None = None, config: Config | str | None = None,
             executor: Executor | str | None = None) -> Gradients:
    """The gradients of `y = Linear(LayerNorm(x))`.

    Args:
        dy: incoming gradient [..., O], float32, float16 or bfloat16 (ml_dtypes.bfloat16).
        x: input of the LayerNorm [..., H], with the leading dimensions and the data type of dy.
        gamma: scale [H]; None: there is none.
        beta: shift [H]; None: there is none.
        w: weight of the Linear [O, H]; it, gamma and beta have all the data type of x or all float32.
        eps: of the LayerNorm.
        wants: the gradients to compute, a list of names or "dx,dw"; None: all that exist.
        config: the kernel; None: the best of earlier tuning runs for this H and O on this device that is right and worth taking
            for so many rows, else what the cost model expects to be fastest. One that is given is taken as it is, also where
            its arithmetic or its long sums are coarser than the accuracy class of the data type.
        executor: "auto", "cuda" or "host", or one that is open; None: "auto".

    Arrays of any memory layout are taken; what is not C-contiguous is copied.

    Returns:
        dx of the shape and data type of x, dgamma [H], dbeta [H], dw [O, H], db [O] of the data type of w, all C-contiguous;
        None for those not wanted, for dgamma without gamma and for dbeta without beta. Without rows, dx is empty and the others
        are zero.

    Raises:
        InputTypeError: an argument is of another type or data type, or data types do not go together.
        InputError: shapes do not agree, eps is not positive, or a gradient is wanted of something that is None.
        InvalidProblem: `wants` is empty or names something else.
        InvalidConfig: there is no such config, or it cannot run these sizes.
        ToolchainError: a compiler or library is missing.
        CompileError, LaunchError: the kernel did not compile or run.
    """
    inputs = Inputs.from_arrays(dy, x, gamma, beta, w, eps)
    chosen = _wanted(inputs, wants)
    opened = _opened("auto" if executor is None else executor)
    problem = Problem(inputs.rows, inputs.hidden, inputs.out, inputs.dtype, chosen, param_dtype=inputs.param_dtype)
    if inputs.rows == 0:
        nothing = output_specs(inputs, chosen)
        return _shaped(Gradients(**{name: np.zeros(spec.shape, spec.dtype) for name, spec in nothing.items()}), x.shape)
    kernel = choose(problem, opened) if config is None else _given(config, problem, opened)
    return _shaped(_program(replace(problem, rows=1), kernel, cast(Hashable, opened)).run(inputs, chosen), x.shape)


def configs(shape: Shape | str | Sequence[int], *, target: str = "sm_90", dtype: str | type = "float32",
            param_dtype: str | type = "", accuracy: str = "", deterministic: bool = False,
            variants: Iterable[str] | str | None = None, wants: Iterable[str] | str | None = None) -> list[Config]:
    """Every config that can run the shape on a GPU of that architecture and is worth trying, in a fixed order.

    `variants` and `wants` are lists of names or texts with commas: "dx,dw"; None: all. `param_dtype` is the data type of gamma,
    beta and w, empty for that of dy and x; `accuracy` is the class results must meet, empty for that of the data type. Data types
    are names, or NumPy's.

    Raises:
        InputTypeError: an argument is of another type.
        InvalidProblem, UnsupportedDtype: the shape, data types, class or wanted gradients describe no problem.
        InvalidConfig: there is no such target or variant.
    """
    chosen = None if wants is None else parse_names(wants)
    problem = Problem.of(as_shape(shape), dtype=as_dtype("dtype", dtype), wants=chosen,
                         deterministic=as_flag("deterministic", deterministic), accuracy=as_text("accuracy", accuracy),
                         param_dtype=as_dtype("param_dtype", param_dtype))
    return valid_configs(problem, limits_of(as_text("target", target)), None if variants is None else parse_names(variants))


def _wanted(inputs: Inputs, wants: Iterable[str] | str | None) -> frozenset[str]:
    absent = {name for name, array in (("dgamma", inputs.gamma), ("dbeta", inputs.beta)) if array is None}
    if wants is None:
        return ALL_GRADIENTS - absent
    chosen = frozenset(parse_names(wants))
    check_wants(chosen)
    if impossible := sorted(absent & chosen):
        raise InputError(f"{impossible[0]} cannot be wanted where {impossible[0].removeprefix('d')} is None")
    return chosen


def _opened(executor: Executor | str) -> Executor:
    return _named(executor) if isinstance(executor, str) else checked_executor(executor)


@functools.cache
def _named(name: str) -> Executor:
    """One executor of each name a process, so that programs are kept between calls."""
    return open_executor(name)


def _given(config: Config | str, problem: Problem, executor: Executor) -> Config:
    kernel = as_config(config)
    if reason := why_refused(problem, kernel, executor.limits):
        raise InvalidConfig(f"{kernel} cannot run these sizes: {reason}")
    return kernel


@functools.lru_cache(maxsize=64)
def _program(problem: Problem, config: Config, executor: Hashable) -> Program:
    """Compiled for any row count; the problem's is not looked at."""
    return cast(Executor, executor).compile(render(problem, config))


def _shaped(gradients: Gradients, x_shape: tuple[int, ...]) -> Gradients:
    return gradients if gradients.dx is None else replace(gradients, dx=gradients.dx.reshape(x_shape))
