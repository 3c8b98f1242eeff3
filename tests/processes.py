"""Processes: started as a user starts them, and as the system shows them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

FILES = {"best.cu", "best.h", "best.json", "trials.jsonl", "report.md"}
"""What a run of the tuner leaves in its folder."""


def tuner_process(*arguments: str, store: Path) -> subprocess.Popen[str]:
    """Started as from a terminal: SIGINT ends it, even where the tests run in the background and ignore the signal."""
    environment = {**os.environ, "LNL_STORE": str(store), "COLUMNS": "120"}
    return subprocess.Popen([sys.executable, "-m", "tuner", *arguments], cwd=ROOT, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def running(pid: int) -> bool:
    """Whether a process is there that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """The processes that a process started, and that those started, and so on."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            own = [int(word) for word in task.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [*own, *(below for child in own for below in children(child))]
    return found


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def status_kib(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
