"""The extension in C++ is compiled beside the calls, once; where it cannot be, Python serves."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fake_driver import FakeDriver
from tests.processes import running, wait_until
from tests.torch_extension import gradients
from tests.torch_on_host import leaves
from tuner.compilers import CPU_LIMIT_S
from tuner.errors import CompileError, ToolchainError
from tuner.executors.host_toolchain import Compiler
from tuner.store import Store
from tuner.torch import direct

ROOT = Path(__file__).resolve().parent.parent


def test_where_it_cannot_be_compiled_python_serves(torch_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch,
                                                   caplog: pytest.LogCaptureFixture) -> None:
    def none() -> None:
        raise ToolchainError("there is no C++ compiler")

    caplog.set_level(logging.INFO, "tuner")
    monkeypatch.setattr(direct, "find_compiler", none)
    monkeypatch.setattr(direct, "extension", None)
    direct._make()
    assert direct.extension is None and "there is no C++ compiler" in caplog.text
    assert all(tensor is not None for tensor in gradients(leaves(), torch.randn(4, 9, 16)))


def test_it_is_made_once_and_beside_the_calls(monkeypatch: pytest.MonkeyPatch, built_extension: Any) -> None:
    roots = []

    def build(store: Store, compiler: Any) -> Any:
        roots.append(store.root)
        return built_extension

    for name, value in (("build", build), ("extension", None), ("_thread", None)):
        monkeypatch.setattr(direct, name, value)
    threads = {direct.start() for _ in range(3)}
    assert len(threads) == 1
    threads.pop().join()
    assert direct.extension is built_extension and len(roots) == 1 and isinstance(roots[0], Path)


def test_it_may_take_longer_than_a_kernel(tmp_path: Path, store: Store) -> None:
    """PyTorch's headers alone take as long as many kernels."""
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\nulimit -S -t > {tmp_path / 'limit'}\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(CompileError, match="refused the extension of PyTorch"):
        direct.build(store, Compiler((str(compiler),), "c++ 1.0"))
    assert int((tmp_path / "limit").read_text()) >= 5 * CPU_LIMIT_S


def test_without_a_lock_what_is_compiled_serves(store: Store, monkeypatch: pytest.MonkeyPatch, built_extension: Any,
                                                tmp_path: Path) -> None:
    """A store that cannot be written has no lock, but may have the library."""
    monkeypatch.setattr(direct, "_LOCK", str(tmp_path))  # a folder
    monkeypatch.setattr(direct, "extension", None)
    monkeypatch.setattr(direct, "Store", lambda: store)
    direct._make()
    assert direct.extension is not None


def test_a_program_that_ends_leaves_no_compiler_behind(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && echo c++ 1.0 && exit\n"
                        "echo $$ >> ../../../pids\nsh -c 'echo $$ >> ../../../pids; sleep 300; :'\n")
    compiler.chmod(0o755)
    code = ("from tuner.torch import direct\nfrom pathlib import Path\nimport time\ndirect.start()\n"
            f"while len(Path({str(tmp_path / 'pids')!r}).read_text().split()) < 2: time.sleep(0.05)")
    (tmp_path / "pids").write_text("")
    environment = {**os.environ, "CXX": str(compiler), "LNL_STORE": str(tmp_path / "store")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    wait_until(lambda: not any(running(pid) for pid in pids), 10.0)
    assert list((tmp_path / "store").glob("*/*")) == []
