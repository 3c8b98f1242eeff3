"""Both passes in C++ (direct.cpp), which is compiled against PyTorch's headers, so that nothing of them enters Python.

That takes some twenty seconds on a machine that has not done it before, so it happens in a thread of its own; until it is done,
and where it cannot be done, Python does the same (tuner/torch/function.py, ops.py and enqueue.py).
"""

from __future__ import annotations

import atexit
import fcntl
import importlib.util
import logging
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tuner.compilers import end_compilers
from tuner.errors import CompileError, ToolchainError
from tuner.executors.host_toolchain import Compiler, find_compiler
from tuner.store import BuildKey, Store

extension: Any = None
"""The module that was compiled; None where it is not there, or not yet. Its functions take their arguments by place:

layer_norm_linear(x, weight, bias, linear_weight, linear_bias, eps): as tuner.torch.layer_norm_linear; None where it does not
    serve these tensors, or not now.
backward(grad, x, weight, bias, linear_weight, mean, rstd, eps, needs): as tuner.torch.engine.backward, but None also where the
    kernel is not known, and `needs` is a tuple.
learn(grad, ..., needs, replay): what to replay for calls of this kind. With the first, both operations are registered for GPUs;
    the backward one comes to tuner.torch.ops for kernels that are not known.
forget(): knows no kernel any more."""

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("direct.cpp", "enqueue.h", "known.h"))
_LIBRARY = "lnl_direct.so"
_LOCK = ".direct"
_FLAGS = ("-std=c++17", "-O1", "-w", "-fPIC", "-shared")
_PATIENCE = 10
"""PyTorch's headers take the compiler twenty seconds of CPU time where a kernel takes two, so it may have as many times as long:
on a slow or busy machine too, where nothing waits for it."""

_LEAVING_S = 5.0
"""Far more than it takes to clear up behind a compiler that was ended."""

_log = logging.getLogger(__name__)
_starting = threading.Lock()
_thread: threading.Thread | None = None


def start() -> threading.Thread:
    """Begins to make `extension`, once in a process.

    Returns:
        The thread that does.
    """
    global _thread
    with _starting:
        if _thread is None:
            _thread = threading.Thread(target=_make, name="lnl-direct", daemon=True)
            _thread.start()
            atexit.register(_leave, _thread)
        return _thread


def build(store: Store, compiler: Compiler) -> ModuleType:
    """The extension, compiled for this PyTorch and this Python, or as the store has it.

    Raises:
        CompileError, ToolchainError: it cannot be compiled.
        ImportError: it cannot be loaded.
    """
    home = Path(torch.__file__).parent
    folders = [home / "include", home / "include" / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"]]
    on_gpu = torch.version.cuda is not None
    libraries = ["torch_python", "torch_cpu", *(["torch_cuda"] if on_gpu else []), "c10"]
    flags = (*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *(["-DLNL_CUDA"] if on_gpu else []))
    made_for = f"{torch.__version__}, {sysconfig.get_config_var('SOABI')}, {home}"
    key = BuildKey("extension of PyTorch", tuple((path.name, path.read_text(encoding="utf-8")) for path in _SOURCES), flags,
                   f"{compiler.version}, PyTorch {made_for}")

    def compile_in(folder: Path) -> None:
        compiler.run([*flags, *(f"-I{include}" for include in folders), _SOURCES[0].name, "-o", _LIBRARY, f"-L{home / 'lib'}",
                      *(f"-l{library}" for library in libraries)], folder, "the extension of PyTorch", _PATIENCE)

    spec = importlib.util.spec_from_file_location("lnl_direct", store.get_or_build(key, compile_in) / _LIBRARY)
    if spec is None or spec.loader is None:
        raise ImportError(f"{_LIBRARY} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def forget() -> None:
    """Knows no kernel any more."""
    if extension is not None:
        extension.forget()


@contextmanager
def _alone(store: Store) -> Iterator[None]:
    """While this process alone of those that share the store is here. Where a lock cannot be had, it may be one of many."""
    with ExitStack() as held:
        with suppress(OSError):
            lock = held.enter_context((store.root / _LOCK).open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _leave(thread: threading.Thread) -> None:
    """Nobody waits for the extension any more when the program ends: no compiler outlives it, and no half of its work."""
    end_compilers()
    thread.join(_LEAVING_S)


def _make() -> None:
    global extension
    try:
        store = Store()
        with _alone(store):  # each process of a machine would do it otherwise
            extension = build(store, find_compiler())
    except (CompileError, ToolchainError, ImportError, OSError) as error:
        _log.info("both passes cost the CPU more than they could, as direct.cpp cannot be compiled (%s)", error)
