"""Compilers that do not end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.processes import running, wait_until
from tuner import compilers
from tuner.errors import CompileError, ToolchainError
from tuner.executors.host_toolchain import Compiler
from tuner.toolchain import Nvcc


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_compiler_that_works_for_ever_is_ended_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "CPU_LIMIT_S", 1)
    path = script(tmp_path / "c++", 'echo $$ >> pids\nsh -c \'echo $$ >> pids; while :; do :; done\'\necho "error: $?"; exit 1')
    with pytest.raises(CompileError, match="refused the kernel: error: 152"):  # 128 + SIGXCPU
        Compiler((str(path),), "c++ 1.0").run([], tmp_path, "the kernel")
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("kind", ["host", "nvcc"])
def test_a_compiler_that_waits_for_ever_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(compilers, "LIMIT_S", 0.5)
    path = script(tmp_path / "compiler", "echo $$ >> pids\nsh -c 'echo $$ >> pids; sleep 100; :'\nsleep 100")
    began = time.monotonic()
    with pytest.raises(CompileError, match=r"did not finish (the|a) kernel within 0 s"):
        if kind == "host":
            Compiler((str(path),), "c++ 1.0").run([], tmp_path, "the kernel")
        else:
            Nvcc(path, "1.0")._run([], tmp_path, "sm_90a")
    assert time.monotonic() - began < 10.0
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    wait_until(lambda: not any(running(pid) for pid in pids), 10.0)


def test_what_is_no_kernel_may_take_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "LIMIT_S", 0.5)
    path = script(tmp_path / "c++", "ulimit -S -t > limit; sleep 1")
    Compiler((str(path),), "c++ 1.0").run([], tmp_path, "more than a kernel", 60)
    assert int((tmp_path / "limit").read_text()) == 60 * compilers.CPU_LIMIT_S


def test_a_compiler_that_is_not_there_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="cannot be started"):
        Compiler((os.fspath(tmp_path / "none"),), "c++ 1.0").run([], tmp_path, "the kernel")
