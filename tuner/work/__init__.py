"""What each kernel does, as numbers: the variant-specific half of the cost model.

One function per kernel name says what a launch costs. Counts follow the templates and are rough: they are there to rank
configs of one problem, not to time them. Every kernel of this project has an entry in the KERNELS of one module of this package;
a new module is found by being there. A kernel without one is taken for a plain one.
"""

from __future__ import annotations

import importlib
import pkgutil

from tuner.work.base import Kernels, Setting, Work, plain

__all__ = ["KERNELS", "Setting", "Work", "work"]

_modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
KERNELS: Kernels = {name: cost for module in _modules for name, cost in getattr(module, "KERNELS", {}).items()}


def work(kernel: str, setting: Setting) -> Work:
    """The cost of a launch of that kernel, by its entry in KERNELS; without one, that of a plain kernel."""
    return KERNELS.get(kernel, plain)(setting)
