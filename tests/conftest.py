"""Fixtures and options shared by all tests: executors, and where a GPU is."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

# The tests run in several processes at once, whose BLAS threads would get in one another's way. NumPy reads this at its import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# No test learns from what this machine's user has tuned, or adds to it; tests of wisdom have a folder of their own.
os.environ["LNL_WISDOM"] = "off"
# The page of a run takes seconds; tests of it ask for it.
os.environ["LNL_HTML"] = "off"

import pytest

from codegen.limits import target
from tests.browser import has_chromium
from tests.fake_driver import FakeDriver
from tests.postgres import Postgres, has_postgres
from tuner.executors import Executor
from tuner.store import Store

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_torch*.py"]
"""PyTorch is optional; these files import it, and exist only where it is installed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the templates render now")


@cache
def _has_gpu() -> bool:
    from tuner.executors.cuda_context import why_unavailable

    return why_unavailable() is None


@cache
def _has_two_gpus() -> bool:
    if not _has_gpu():
        return False
    from pycuda import driver

    return bool(driver.Device.count() > 1)


MARKERS = {"cuda": _has_gpu, "two_gpus": _has_two_gpus, "postgres": has_postgres, "chromium": has_chromium}
"""Marked tests exist only where what they need does: elsewhere they are deselected, not skipped."""

_missing = pytest.StashKey[dict[str, int]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = [marker for marker, is_there in MARKERS.items() if not is_there()]
    there, gone = [], []
    for item in items:
        (gone if any(item.get_closest_marker(marker) for marker in missing) else there).append(item)
    config.stash[_missing] = {marker: sum(item.get_closest_marker(marker) is not None for item in gone) for marker in missing}
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = there


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Why tests were deselected."""
    described = dict(line.split(": ", 1) for line in config.getini("markers") if ": " in line)
    return [f"{marker}: {count} deselected; {described[marker]}"
            for marker, count in config.stash.get(_missing, {}).items() if count > 0]


@pytest.fixture(scope="session")
def store() -> Store:
    """The store of compiled kernels that all tests of a machine share, so that no source is compiled twice."""
    return Store()


@pytest.fixture(scope="session")
def host_executor(store: Store) -> Executor:
    """Runs kernels on the CPU, for the limits of sm_90."""
    from tuner.executors.host import HostExecutor

    return HostExecutor(target("sm_90"), store)


@pytest.fixture(scope="session")
def cuda_executor(store: Store) -> Iterator[Executor]:
    """Runs kernels on GPU 0."""
    from tuner.executors.cuda import CudaExecutor

    executor = CudaExecutor(store=store)
    yield executor
    executor.close()


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.cuda)])
def executor(request: pytest.FixtureRequest) -> Executor:
    """Each executor in turn; `cuda` only where a GPU is."""
    found: Executor = request.getfixturevalue(f"{request.param}_executor")
    return found


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server of the tests' own."""
    with Postgres() as server:
        yield server


@pytest.fixture
def golden_folder() -> Path:
    return Path(__file__).parent / "golden"


@pytest.fixture
def seeded_torch() -> None:
    """The same random tensors in every run."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def torch_driver(monkeypatch: pytest.MonkeyPatch, host_executor: Executor, store: Store) -> FakeDriver:
    """The driver whose kernels serve PyTorch's CPU tensors during the test."""
    from tests.torch_on_host import install
    from tuner.executors.host import HostExecutor

    assert isinstance(host_executor, HostExecutor)
    return install(monkeypatch, host_executor, store)


@pytest.fixture(scope="session")
def built_extension(store: Store) -> Any:
    """Both passes of tuner.torch in C++, for CPU tensors."""
    from tests.torch_on_host import STREAM
    from tuner.executors.host_toolchain import find_compiler
    from tuner.torch import direct

    module: Any = direct.build(store, find_compiler())
    module.stand_in(STREAM)
    return module


@pytest.fixture
def extension(built_extension: Any, torch_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The extension, in use, knowing no kernel; and knowing none afterwards, as their memory goes."""
    from tuner.torch import direct, engine

    monkeypatch.setattr(direct, "extension", built_extension)
    engine.forget()
    yield built_extension
    built_extension.forget()


@pytest.fixture(params=[False, True], ids=["python", "compiled"])
def way(request: pytest.FixtureRequest, extension: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the extension is in use."""
    from tuner.torch import direct

    if not request.param:
        monkeypatch.setattr(direct, "extension", None)
    return bool(request.param)
