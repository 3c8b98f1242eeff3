"""The backward pass on NumPy arrays, by the best kernel known, and the list of kernels there are."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from codegen.config import Config
from codegen.errors import InvalidConfig
from codegen.limits import target as limits_of
from codegen.problem import ALL_GRADIENTS, Problem, Shape, check_wants
from codegen.render import render
from codegen.space import valid_configs, why_refused
from tuner.arguments import as_config, as_dtype, as_flag, as_shape, as_text, parse_names
from tuner.choose import checked_executor, open_executor
from tuner.errors import InputError, InputTypeError
from tuner.executors import Executor, Program
from tuner.executors.arrays import output_specs
from tuner.inputs import AnyFloats, Array32, Gradients, Inputs, as_eps
from tuner.launcher.arrays import is_on_device
from tuner.launcher.calls import Given, backward_on_device
from tuner.wisdom.recall import choose


def backward(dy: AnyFloats, x: AnyFloats, gamma: AnyFloats | None, beta: AnyFloats | None, w: AnyFloats, eps: float = 1e-5,
             wants: Iterable[str] | str | None = None, config: Config | str | None = None,
             executor: Executor | str | None = None, *, mean: AnyFloats | None = None, rstd: AnyFloats | None = None,
             out: Mapping[str, Any] | None = None, accumulate: bool = False, stream: object = None,
             workspace: Any = None) -> Gradients:
    """The gradients of `y = Linear(LayerNorm(x))`, of NumPy arrays, or of arrays that lie on a GPU.

    Arrays of PyTorch, CuPy, PyCUDA or another library that have __dlpack__ or __cuda_array_interface__ are used where they are,
    and results are arrays of the same library: the call is enqueued on the stream, and nothing is waited for.

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
        executor: "auto", "cuda" or "host", or one that is open; None: "auto". Arrays on a GPU stay there, with "auto" or "cuda".
        mean, rstd: the rows' mean and 1/sqrt(variance + eps), float32, one for each row, where the forward pass saved them: both
            or neither. They are read instead of worked out.
        out: arrays that gradients are written to, by name: {"dw": ...}; the others are new. C-contiguous.
        accumulate: add the gradients of the parameters to what `out` holds, which must have all that are wanted; dx is
            overwritten. Kernels that add anyway, those with reduction=atomic and one launch, do so at no cost.
        stream: for arrays on a GPU, the handle of a stream, or a stream of PyTorch, CuPy or PyCUDA; None: the current one of
            PyTorch or CuPy where x is theirs, else the default stream.
        workspace: for arrays on a GPU, scratch memory to use instead of new memory, an array of bytes; the error says how many
            where it has too few. One workspace serves one stream at a time.

    NumPy arrays of any memory layout are taken; what is not C-contiguous is copied.

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
    tensors = {"dy": dy, "x": x, "gamma": gamma, "beta": beta, "w": w, "mean": mean, "rstd": rstd}
    chosen = _wanted(tensors, wants)
    targets = _targets(out, chosen, accumulate)
    if is_on_device(x):
        if executor is not None and not (isinstance(executor, str) and executor in ("auto", "cuda")):
            raise InputError(f"arrays on a GPU cannot go through the executor {executor!r}; leave it out")
        given = Given(tensors, targets, stream, workspace, accumulate)
        return backward_on_device(given, as_eps(eps), chosen, None if config is None else as_config(config))
    if stream is not None or workspace is not None:
        raise InputError("stream and workspace are for arrays on a GPU; these are NumPy's")
    inputs = Inputs.from_arrays(dy, x, gamma, beta, w, eps)
    if mean is not None or rstd is not None:
        inputs = replace(inputs, mean=_flat("mean", mean), rstd=_flat("rstd", rstd))
    opened = _opened("auto" if executor is None else executor)
    problem = Problem(inputs.rows, inputs.hidden, inputs.out, inputs.dtype, chosen, param_dtype=inputs.param_dtype)
    if inputs.rows == 0:
        nothing = output_specs(inputs, chosen)
        zeros = Gradients(**{name: np.zeros(spec.shape, spec.dtype) for name, spec in nothing.items()})
        return _stored(_shaped(zeros, x.shape), targets, accumulate)
    kernel = choose(problem, opened) if config is None else _given(config, problem, opened)
    results = _program(replace(problem, rows=1), kernel, cast(Hashable, opened)).run(inputs, chosen)
    return _stored(_shaped(results, x.shape), targets, accumulate)


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


def _wanted(tensors: Mapping[str, object], wants: Iterable[str] | str | None) -> frozenset[str]:
    absent = {f"d{name}" for name in ("gamma", "beta") if tensors[name] is None}
    if wants is None:
        return ALL_GRADIENTS - absent
    chosen = frozenset(parse_names(wants))
    check_wants(chosen)
    if impossible := sorted(absent & chosen):
        raise InputError(f"{impossible[0]} cannot be wanted where {impossible[0].removeprefix('d')} is None")
    return chosen


def _targets(out: Mapping[str, Any] | None, wants: frozenset[str], accumulate: bool) -> Mapping[str, Any]:
    """`out` itself, or nothing."""
    out = {} if out is None else out
    if not isinstance(out, Mapping):
        raise InputTypeError(f"out must be a mapping of names to arrays, such as {{'dw': ...}}, not {type(out).__name__}")
    if accumulate and (missing := sorted(wants - {"dx"} - set(out))):
        raise InputError(f"accumulate needs something to add to; give {missing[0]} in out")
    if extra := sorted(set(out) - wants):
        raise InputError(f"out has {extra[0]!r}, which is not among the gradients wanted")
    return out


def _flat(name: str, array: AnyFloats | None) -> Array32 | None:
    """Statistics of any shape as one vector."""
    if array is None:
        return None
    if not isinstance(array, np.ndarray):
        raise InputTypeError(f"{name} must be a NumPy array, not {type(array).__name__}")
    return cast(Array32, np.ascontiguousarray(array.reshape(-1)))


def _stored(gradients: Gradients, targets: Mapping[str, Any], accumulate: bool) -> Gradients:
    """The gradients, those that have a target written or added there."""
    for name, target in targets.items():
        found = getattr(gradients, name)
        if not isinstance(target, np.ndarray):
            raise InputTypeError(f"out[{name!r}] must be a NumPy array, not {type(target).__name__}")
        if target.shape != found.shape or target.dtype != found.dtype or not target.flags.writeable:
            raise InputError(f"out[{name!r}] is {target.dtype} {target.shape}, but must be writable {found.dtype} {found.shape}")
        target[...] = target + found if accumulate and name != "dx" else found
    return replace(gradients, **targets)


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
