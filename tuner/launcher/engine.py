"""The kernels of one GPU in this process: chosen for a problem, compiled and loaded once, ready for any row count."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

from codegen.config import Config
from codegen.problem import Problem
from codegen.render import Source, render
from tuner.errors import LaunchError
from tuner.executors import Executor
from tuner.launcher.driver import Device, open_driver
from tuner.launcher.program import Kernel, Launcher, Replay
from tuner.store import Store
from tuner.toolchain import find_nvcc
from tuner.wisdom.recall import choose

REMEMBERED = 1024
"""Calls of different sizes that stay ready; each takes a few hundred bytes."""

_log = logging.getLogger(__name__)
_engines: dict[int, Engine] = {}
_opening = threading.Lock()


class Engine:
    """The kernels of one device. Thread-safe.

    Args:
        device: the device.
        launcher: what launches on it.
        compiled: the machine code of a source. It may raise CompileError and ToolchainError.
    """

    def __init__(self, device: Device, launcher: Launcher, compiled: Callable[[Source], bytes]) -> None:
        self.device = device
        self._launcher = launcher
        self._compiled = compiled
        self._lock = threading.Lock()
        self._kernels: dict[tuple[Problem, Config], Kernel] = {}
        self._ready: dict[tuple[Problem, float, Config | None, frozenset[str]], Replay] = {}

    @property
    def place(self) -> Executor:
        """The device as tuner.wisdom.recall asks for it: its name, its limits, and that it measures."""
        return cast(Executor, SimpleNamespace(measures=True, device=self.device.name, limits=self.device.limits))

    def forget(self) -> None:
        """Looks again for the best kernel of each call, as after a tuning run. Loaded kernels are kept."""
        with self._lock:
            self._ready.clear()

    def ready(self, problem: Problem, eps: float, config: Config | None = None,
              kept: frozenset[str] = frozenset(), may_load: Callable[[], bool] = lambda: True) -> Replay:
        """A call, ready to be replayed.

        Args:
            problem: with its row count.
            eps: of the LayerNorm.
            config: the kernel; None: the best that is known, else the best predicted one.
            kept: the outputs to which the call adds; some of what program.adds says of the plan.
            may_load: whether a kernel may be loaded now.

        Raises:
            NoValidKernel: no kernel computes this.
            CompileError, ToolchainError: it cannot be compiled.
            LaunchError: it cannot be loaded, or not now.
        """
        key = problem, eps, config, kept
        with self._lock:
            found = self._ready.get(key)
            if found is None:
                chosen = choose(replace(problem, rows=max(problem.rows, 1)), self.place) if config is None else config
                if len(self._ready) >= REMEMBERED:
                    self._ready.pop(next(iter(self._ready)))
                kernel = self._kernel(replace(problem, rows=1), chosen, may_load)
                found = self._ready[key] = kernel.at(problem.rows, eps, kept)
            return found

    def _kernel(self, problem: Problem, config: Config, may_load: Callable[[], bool]) -> Kernel:
        found = self._kernels.get((problem, config))
        if found is None:
            if not may_load():
                raise LaunchError("a kernel cannot be loaded while a CUDA graph is captured; run the backward pass once before")
            _log.info("compiling kernel %d of %s, for H=%d, O=%d in %s: %s; other row counts may be better served by others",
                      len(self._kernels) + 1, self.device.name, problem.hidden, problem.out, problem.dtype, config)
            source = render(problem, config)
            found = self._kernels[problem, config] = Kernel(self._launcher, self.device, source, self._compiled(source))
        return found


def engine(index: int) -> Engine:
    """The engine of the GPU with that number in this process.

    Raises:
        ToolchainError: there is no driver or no compiler.
        LaunchError: there is no such GPU.
    """
    with _opening:
        if index not in _engines:
            _engines[index] = _open(index)
        return _engines[index]


def forget() -> None:
    """Every engine looks again for the best kernel of each call."""
    for each in _engines.values():
        each.forget()


def _open(index: int) -> Engine:
    device, store = Device(open_driver(), index), Store()
    arch = device.arch

    def compiled(source: Source) -> bytes:
        return find_nvcc(arch).compile(source.text, arch, store).cubin.read_bytes()

    return Engine(device, Launcher(device.driver, store), compiled)
