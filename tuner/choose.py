"""Which executor to use, by name: a GPU's libraries are loaded only when one is asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from codegen.limits import Limits, target
from tuner.errors import InputError, InputTypeError
from tuner.executors import Executor
from tuner.store import Store
from tuner.workers.messages import Place
from tuner.workers.pool import Workers

EXECUTORS = ("auto", "cuda", "host")


def open_executor(name: str = "auto", target_name: str = "sm_90", store: Store | None = None, device_index: int = 0) -> Executor:
    """The executor of that name.

    Args:
        name: "cuda": a GPU of this machine. "host": its CPU. "auto": the GPU if PyCUDA is installed and finds one,
            else the CPU.
        target_name: the architecture that the host executor stands for; a GPU knows its own.
        store: where compiled kernels are kept; None: the default store.
        device_index: which GPU, from 0.

    Raises:
        InputError: there is no executor of that name.
        InvalidConfig: the target is not known.
        ToolchainError: it cannot be used here; with "auto", there is a GPU, but no compiler for it.
    """
    if name not in EXECUTORS:
        raise InputError(f"there is no executor {name!r}; choose from {', '.join(EXECUTORS)}")
    limits = target(target_name)
    if name == "cuda" or (name == "auto" and _gpu_usable()):
        from tuner.executors.cuda import CudaExecutor

        return CudaExecutor(device_index, store)
    return open_host(limits, store)


def checked_executor(executor: Executor) -> Executor:
    """The executor itself.

    Raises:
        InputTypeError: it is none.
    """
    if isinstance(executor, type) or not callable(getattr(executor, "compile", None)):
        raise InputTypeError(f"executor must be one of {', '.join(EXECUTORS)} or an open executor, not {executor!r}")
    return executor


def open_isolated(name: str = "auto", target_name: str = "sm_90", store: Store | None = None,
                  gpus: Sequence[int] = (0,)) -> Workers:
    """The executor of that name in processes of its own, which a bad kernel ends alone. Arguments and errors as open_executor.

    Args:
        gpus: numbers of the GPUs to use, all of one model; none: all there are.
    """
    if name not in EXECUTORS:
        raise InputError(f"there is no executor {name!r}; choose from {', '.join(EXECUTORS)}")
    target(target_name)
    return Workers(Place(name, target_name, (Store() if store is None else store).root), gpus=gpus)


def open_for_worker(place: Place) -> Executor:
    """What open_executor opens, in the process that runs the kernels.

    Raises:
        ToolchainError: as open_executor.
    """
    store = Store(place.store)
    if place.limits is None:
        return open_executor(place.executor, place.target, store, place.device_index)
    if place.executor == "host":
        return open_host(place.limits, store)
    from tuner.executors.cuda import CudaExecutor

    return CudaExecutor(place.device_index, store, place.limits)


def open_host(limits: Limits, store: Store | None = None) -> Executor:
    """The CPU of this machine, in the place of a GPU with these limits.

    Raises:
        ToolchainError: there is no C++ compiler.
    """
    from tuner.executors.host import HostExecutor

    return HostExecutor(limits, Store() if store is None else store)


def _gpu_usable() -> bool:
    if importlib.util.find_spec("pycuda") is None:
        return False
    from tuner.executors.cuda_context import why_unavailable

    return why_unavailable() is None
