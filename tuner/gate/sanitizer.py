"""compute-sanitizer's tools on one kernel, each in a process that can be killed, all at once.

They watch the winner's binary on few rows (tuner.gate.sanitized): a kernel is a hundred times slower under them. Most of the time
goes into starting: memcheck takes 6 s in all, racecheck 2 s (H200).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

from codegen.config import Config
from codegen.limits import Limits
from codegen.problem import Problem
from tuner.gate import sanitized
from tuner.gate.checks import Check, Outcome
from tuner.tools import started
from tuner.workers.messages import Job, Place

NAME = "compute-sanitizer"

TOOLS: Mapping[str, tuple[str, ...]] = {
    "memcheck": ("--report-api-errors", "no"),  # what a call reports is no finding about the kernel: too little memory, say
    "racecheck": (), "initcheck": (), "synccheck": ()}
"""The tools, and what each is told besides."""

ROWS = (1, 33, 300)
"""Row counts: a tile with one row in it, full warps and one row, several tiles of which the last is ragged."""

FOUND = 99
"""Exit status of a tool that has found something."""

MOST_SECONDS, LEAST_SECONDS = 60.0, 2.0
"""A tool gets no more time than the one; with less than the other it is not started."""


def find_sanitizer(environ: Mapping[str, str] | None = None, toolkits: Path = Path("/usr/local"),
                   packages: Iterable[str] | None = None) -> str | None:
    """The program: on $PATH, in $CUDA_HOME, in a toolkit, or where the Python package nvidia-cuda-sanitizer-api has put it.

    Args:
        environ: None: this process's environment.
        toolkits: where cuda lies.
        packages: folders of Python packages; None: sys.path.
    """
    environ = os.environ if environ is None else environ
    homes = [toolkits / "cuda"]
    if home := environ.get("CUDA_HOME"):
        homes.insert(0, Path(home))
    for folder in sys.path if packages is None else packages:
        homes += sorted(Path(folder or ".").glob("nvidia/cu*"), reverse=True)
    places = [environ.get("PATH", ""), *(str(home / below) for home in homes for below in ("bin", NAME))]
    return shutil.which(NAME, path=os.pathsep.join(places))


class Sanitizer:
    """Runs the tools on kernels for one problem.

    Args:
        problem: what the kernels compute.
        bus_id: PCI address of the GPU.
        limits: of that GPU.
        store: where the compiled kernels are.
        module: what runs under the tools.
    """

    def __init__(self, problem: Problem, bus_id: str, limits: Limits, store: Path, module: str = sanitized.__name__) -> None:
        self._problem = problem
        self._bus_id = bus_id
        self._limits = limits
        self._store = store
        self._module = module

    def check(self, config: Config, seconds: float) -> list[Check]:
        """What each tool says of a kernel; of none after the first that has found something.

        Args:
            config: which kernel.
            seconds: how long all of it may take.
        """
        program = find_sanitizer()
        if program is None:
            return [Check(NAME, Outcome.NOT_RUN, "it was not found on this machine; it comes with the CUDA toolkit")]
        if seconds < LEAST_SECONDS:
            return [Check(NAME, Outcome.NOT_RUN, "time was up")]
        limit = min(seconds, MOST_SECONDS)
        deadline = time.monotonic() + limit
        checks: list[Check] = []
        with ExitStack() as stack:
            runs = {tool: stack.enter_context(started(self._command(program, tool, config))) for tool in TOOLS}
            for tool, run in runs.items():
                status = run.wait(deadline)
                if status is None:
                    checks.append(Check(tool, Outcome.NOT_RUN, f"it did not end within {limit:.0f} s"))
                    continue
                checks.append(_verdict(tool, status, run.output()))
                if checks[-1].outcome is Outcome.FAILED:
                    break
        return checks

    def _command(self, program: str, tool: str, config: Config) -> list[str]:
        job = Job(self._problem, 1e-5, 0)
        place = Place("cuda", self._limits.arch, self._store, limits=self._limits)
        return [program, "--tool", tool, "--error-exitcode", str(FOUND), *TOOLS[tool], sys.executable, "-P", "-m", self._module,
                str(config), ",".join(map(str, ROWS)), self._bus_id, json.dumps(job.as_json()), json.dumps(place.as_json())]


def _verdict(tool: str, status: int, output: str) -> Check:
    hazards = re.search(r"RACECHECK SUMMARY: ([1-9]\d*) hazard", output)
    if status == FOUND or hazards:
        return Check(tool, Outcome.FAILED, _finding(output))
    if status == 0 and sanitized.done(ROWS) in output:
        return Check(tool, Outcome.PASSED, f"nothing found at {', '.join(map(str, ROWS))} rows")
    said = [line for line in output.splitlines() if line.strip(" =")]
    return Check(tool, Outcome.NOT_RUN, f"it failed: {said[-1].strip(' =') if said else f'status {status}'}")


def _finding(output: str) -> str:
    """The tool's first sentence, and where in the kernel that was."""
    lines = [line.strip("= ") for line in output.splitlines() if line.startswith("=====")]
    said = [line for line in lines if line and line.upper() != NAME.upper()]
    where = [line for line in said[1:2] if line.startswith(("at ", "in "))]
    return " ".join([*said[:1], *where]) or "it has found something that it does not name"
