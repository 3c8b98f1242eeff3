"""What each kernel does, as numbers: the variant-specific half of the cost model.

One function per kernel name says what a launch costs. Counts follow the templates and are rough: they are there to rank
configs of one problem, not to time them. Every kernel of every plan has an entry in the KERNELS of one module of this package;
a new module is found by being there.
"""

from __future__ import annotations

import importlib
import pkgutil

from tuner.work.base import Kernels, Setting, Work

__all__ = ["KERNELS", "Setting", "Work", "work"]

_modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
KERNELS: Kernels = {name: cost for module in _modules for name, cost in getattr(module, "KERNELS", {}).items()}


def work(kernel: str, setting: Setting) -> Work:
    """The cost of a launch of that kernel.

    Raises:
        KeyError: it has no entry in KERNELS.
    """
    if kernel not in KERNELS:
        raise KeyError(f"the cost model does not know the kernel {kernel!r}; give it an entry in a module of tuner/work")
    return KERNELS[kernel](setting)
