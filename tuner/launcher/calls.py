"""tuner.backward on arrays that lie on a GPU: nothing is copied, and nothing waited for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from codegen.config import Config
from codegen.dtypes import ITEMSIZE, check_dtypes
from codegen.errors import InvalidConfig
from codegen.problem import Problem
from codegen.space import why_refused
from codegen.tensors import BY_NAME, OUTPUTS, SAVED
from tuner.errors import InputError, InputTypeError
from tuner.inputs import Gradients
from tuner.launcher.arrays import (
    LEGACY_STREAM,
    OnDevice,
    add_into,
    device_of,
    empty_like,
    is_on_device,
    mark_written,
    on_device,
    stream_handle,
)
from tuner.launcher.engine import Engine, engine
from tuner.launcher.program import ALIGNMENT, TENSOR_FIELDS, adds


@dataclass(frozen=True, slots=True)
class Given:
    """What a call was given, beside what it wants.

    Attributes:
        tensors: dy, x, gamma, beta, w, mean and rstd, of any library; None for those that are absent.
        out: where gradients go, by name; others are made.
        stream: as arrays.stream_handle.
        workspace: scratch memory; None: it is made for this call.
        accumulate: whether parameter gradients are added to what `out` holds.
    """

    tensors: Mapping[str, Any]
    out: Mapping[str, Any]
    stream: object
    workspace: Any
    accumulate: bool = False


def backward_on_device(given: Given, eps: float, wants: frozenset[str], config: Config | None) -> Gradients:
    """The wanted gradients, enqueued on the stream.

    Raises:
        InputTypeError: an array is of another type or data type, or on no GPU.
        InputError: shapes do not agree, an array is not C-contiguous or too small, or what is written lies over another array.
        InvalidConfig: the config cannot run these sizes.
        CompileError, LaunchError, NoValidKernel, ToolchainError: as Engine.ready and Replay.
    """
    x = given.tensors["x"]
    stream = stream_handle(given.stream, x)
    read = {name: on_device(name, array, stream) for name, array in given.tensors.items() if array is not None}
    rows, hidden, out = _sizes(read)
    _check(read, rows, hidden, out)
    found = engine(_common_device(given))
    problem = Problem(rows, hidden, out, read["x"].dtype, wants, param_dtype=read["w"].dtype)
    if config is not None and (reason := why_refused(problem, config, found.device.limits)):
        raise InvalidConfig(f"{config} cannot run these sizes: {reason}")
    replay = found.ready(problem, eps, config)
    added = wants - {"dx"} if given.accumulate else frozenset[str]()
    if added <= adds(replay.plan):
        replay, later = found.ready(problem, eps, config, added), frozenset[str]()
    else:
        later = added  # the kernel's own results first, then one addition for each

    leading = read["x"].shape[:-1]
    results, written = {}, {}
    for name in (name for name in OUTPUTS if name in wants):
        shape = (*leading, hidden) if name == "dx" else BY_NAME[name].shape(rows, hidden, out)
        dtype = BY_NAME[name].dtype(problem.dtype, problem.param_dtype)
        results[name] = empty_like(x, shape, dtype, stream) if name in later or name not in given.out else given.out[name]
        written[name] = _writable(f"out[{name!r}]", on_device(f"out[{name!r}]", results[name], stream), shape, dtype)
    workspace, held = _workspace(given, replay.workspace_bytes, stream)
    _check_apart(read, written if held is None else {**written, "workspace": held})
    _wait_for_producers(found, [*read.values(), *written.values(), *([] if held is None else [held])], stream)
    addresses = {name: array.address for name, array in (read | written).items()}
    replay([addresses.get(name, 0) for name in TENSOR_FIELDS], workspace, stream)
    for name in later:
        add_into(given.out[name], results[name], stream)
    for array in given.out.values():
        mark_written(array)
    return Gradients(**{**results, **given.out})


def _sizes(read: Mapping[str, OnDevice]) -> tuple[int, int, int]:
    """Rows, hidden and out, of the shapes of x and w."""
    x, w = read["x"], read["w"]
    if len(w.shape) != 2 or len(x.shape) < 1 or min(w.shape) < 1:
        raise InputError(f"w must have the shape [O, H] and x [..., H], not {w.shape} and {x.shape}")
    return math.prod(x.shape[:-1]), w.shape[1], w.shape[0]


def _common_device(given: Given) -> int:
    index = device_of(given.tensors["x"])
    for name, array in {**given.tensors, **given.out, "workspace": given.workspace}.items():
        if array is not None and is_on_device(array) and (other := device_of(array)) != index:
            raise InputError(f"{name} lies on GPU {other}, but x on GPU {index}")
    return index


def _check(read: Mapping[str, OnDevice], rows: int, hidden: int, out: int) -> None:
    x, w = read["x"], read["w"]
    for name in ("x", "w"):
        if read[name].dtype not in ITEMSIZE:
            raise InputTypeError(f"{name} must be float32, float16 or bfloat16, not {read[name].dtype}")
    check_dtypes(x.dtype, w.dtype)
    if ("mean" in read) != ("rstd" in read):
        raise InputError("mean and rstd belong together; give both or neither")
    leading = x.shape[:-1]
    for name, array in read.items():
        shape = {"dy": (*leading, out), "x": (*leading, hidden)}.get(name, BY_NAME[name].shape(rows, hidden, out))
        if array.shape != shape and not (name in SAVED and math.prod(array.shape) == rows):
            raise InputError(f"{name} has the shape {array.shape}, but x {x.shape} and w {w.shape} ask for {shape}")
        dtype = BY_NAME[name].dtype(x.dtype, w.dtype)
        if array.dtype != dtype:
            raise InputTypeError(f"{name} is {array.dtype}, but must be {dtype} beside x of {x.dtype} and w of {w.dtype}")
        if not array.contiguous:
            raise InputError(f"{name} must be C-contiguous, as arrays on a GPU are not copied")


def _writable(name: str, array: OnDevice, shape: tuple[int, ...], dtype: str) -> OnDevice:
    if array.shape != shape or array.dtype != dtype:
        raise InputError(f"{name} is {array.dtype} {array.shape}, but must be {dtype} {shape}")
    if not (array.contiguous and array.writable):
        raise InputError(f"{name} must be C-contiguous and writable")
    return array


def _check_apart(read: Mapping[str, OnDevice], written: Mapping[str, OnDevice]) -> None:
    """Kernels write while they still read, so that what they write may lie over nothing else."""
    others = list(read.items())
    for name, array in written.items():
        for other, beside in others:
            if array.address < beside.address + beside.nbytes and beside.address < array.address + array.nbytes:
                raise InputError(f"{name} shares memory with {other}; give results and scratch memory a place of their own")
        others.append((name, array))


def _workspace(given: Given, needed: int, stream: int) -> tuple[int, OnDevice | None]:
    """Where scratch memory of so many bytes begins, and what keeps it alive."""
    if needed == 0:
        return 0, None
    room = needed + ALIGNMENT - 1  # enough wherever it begins
    scratch = empty_like(given.tensors["x"], (room,), "uint8", stream) if given.workspace is None else given.workspace
    found = on_device("workspace", scratch, stream)
    begin = -(-found.address // ALIGNMENT) * ALIGNMENT
    if begin + needed > found.address + found.nbytes or not (found.contiguous and found.writable):
        raise InputError(f"workspace must have {room} contiguous bytes that may be written; it has {found.nbytes}")
    return begin, found


def _wait_for_producers(found: Engine, arrays: list[OnDevice], stream: int) -> None:
    """Orders the stream after those on which arrays are made, as __cuda_array_interface__ asks. DLPack has done it."""
    own = stream or LEGACY_STREAM
    for producer in sorted({array.producer for array in arrays if array.producer is not None} - {own}):
        found.device.order(producer, stream)
