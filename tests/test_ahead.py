"""Kernels compiled ahead of a tuning run, without a GPU."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor, Future
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from codegen.config import Config
from codegen.limits import target
from codegen.problem import Problem, Shape
from codegen.render import render
from tuner import cli
from tuner.arguments import FAILED, INTERRUPTED, OK, USAGE
from tuner.candidates import survey
from tuner.errors import ToolchainError
from tuner.guess import rank
from tuner.prebuild import AHEAD, Builders, Built, built
from tuner.store import Store
from tuner.toolchain import Nvcc, find_nvcc

ROOT = Path(__file__).resolve().parent.parent
SHAPE, VARIANT = "4,4,8,16", "row_thread"
PROBLEM = Problem.of(Shape.parse(SHAPE))
RANKED = list(rank(survey(PROBLEM, target("sm_90"), (VARIANT,))))
ARGUMENTS = ("compile", "--shape", SHAPE, "--variants", VARIANT, "--jobs", "2")


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("LNL_STORE", str(tmp_path / "store"))
    return Store()


# --- compile -----------------------------------------------------------------------------------------------------------------


def test_what_was_compiled_ahead_is_not_compiled_again(own_store: Store, capsys: pytest.CaptureFixture[str],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main([*ARGUMENTS, "--best", "2"]) == OK
    assert "2 of 2 compiled for sm_90a" in capsys.readouterr().out
    nvcc = find_nvcc("sm_90a")

    def none(self: Nvcc, arguments: list[str], folder: Path, arch: str) -> str:
        raise ToolchainError("is compiled again")

    monkeypatch.setattr(Nvcc, "_run", none)
    for config in RANKED[:2]:
        assert nvcc.compile(render(PROBLEM, config).text, "sm_90a", own_store).cubin.is_file()
    with pytest.raises(ToolchainError):
        nvcc.compile(render(PROBLEM, RANKED[2]).text, "sm_90a", own_store)


def test_what_is_compiled_when_time_is_up_stays(own_store: Store, capsys: pytest.CaptureFixture[str],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    def entries() -> list[Path]:
        return list(own_store.root.glob("??/*/key.json"))

    clock = SimpleNamespace(monotonic=lambda: 61.0 if entries() else 0.0)
    monkeypatch.setattr("tuner.compile_cli.time", clock)
    assert cli.main([*ARGUMENTS, "--timeout", "60"]) == FAILED
    done = int(re.findall(r"(\d+) of \d+ compiled", capsys.readouterr().out)[0])
    assert done < len(RANKED) and len(entries()) >= max(1, done)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda ending: ending.name)
def test_a_compilation_that_is_ended_leaves_no_process_and_no_half_entry(tmp_path: Path, ending: signal.Signals) -> None:
    environment = {**os.environ, "LNL_STORE": str(tmp_path)}
    many = [*ARGUMENTS, "--variants", "row_shared"]
    process = subprocess.Popen([sys.executable, "-m", "tuner", *many], cwd=ROOT, env=environment, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                               # as from a terminal, even where the tests run in the background and ignore the signal
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    while not (list(tmp_path.glob("??/*/key.json")) and compilers(tmp_path)):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(ending)
    _, said = process.communicate(timeout=60)  # which ends with the last process that has its end of the pipe
    if ending is not signal.SIGKILL:
        assert process.returncode == INTERRUPTED and said == "compile: interrupted; run the same command again to go on\n"
    with pytest.raises(ProcessLookupError):  # the whole session is gone
        for _ in range(600):
            os.killpg(process.pid, 0)
            time.sleep(0.05)
    assert not compilers(tmp_path) and not list(tmp_path.glob("??/.building-*"))


def compilers(store: Path) -> list[Path]:
    """The processes that work in folders of the store. They have sessions of their own."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if (process / "cwd").readlink().is_relative_to(store):
                found.append(process)
    return found


@pytest.mark.parametrize(("more", "said"), [
    (("--jobs", "0"), "one process"), (("--best", "0"), "one kernel"), (("--target", "sm_10"), "sm_10"),
    (("--variants", "nobody"), "nobody"), (("--timeout", "-1"), "timeout")])
def test_what_makes_no_sense_is_one_sentence(capsys: pytest.CaptureFixture[str], more: tuple[str, ...], said: str) -> None:
    assert cli.main([*ARGUMENTS, *more]) == USAGE
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1


def test_a_builder_that_is_killed_ends_the_run_with_a_sentence(own_store: Store) -> None:
    with Builders(PROBLEM, "sm_90a", own_store, 1) as builders:
        finished = built(builders, RANKED, 0.05)
        assert next(found for found in finished if found is not None)[1].failure is None
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        spawned = [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
        assert spawned
        for child in spawned:
            os.kill(child, signal.SIGKILL)
        with pytest.raises(ToolchainError, match="ended from outside"):
            list(finished)


def test_a_pool_that_broke_since_takes_nothing_and_that_is_a_sentence() -> None:
    """The process died while the last outcome was looked at."""
    class Broken:
        count = 1

        def __init__(self) -> None:
            self.asked = 0

        def submit(self, config: Config) -> Future[Built]:
            self.asked += 1
            if self.asked > AHEAD:
                raise BrokenExecutor
            future = Future[Built]()
            future.set_result(Built(render(PROBLEM, config), {}))
            return future

    with pytest.raises(ToolchainError, match="ended from outside"):
        list(built(Broken(), RANKED[:AHEAD + 1], 0.05))
