"""Compilers as processes that end: each, and each that it starts, has a limit."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

CPU_LIMIT_S = 60
"""A kernel takes a second or two; the largest, for the CPU, ten. Counted in CPU time, which is the same on a busy machine."""

LIMIT_S = 300.0
"""For a compiler that waits instead of working, by the clock."""

_running: dict[int, int] = {}
"""By the number of each compiler's session, the process that started it, which a fork of that is not."""

_LIMITED = 'ulimit -S -t "$1"; shift; exec "$@"'


def run_compiler(command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None,
                 patience: int = 1) -> subprocess.CompletedProcess[str]:
    """Runs a compiler in `folder`, to its end or its limit, and returns its status and what it said.

    The limit on CPU time holds for each process that the compiler starts as well: killing it alone would leave them running.

    Args:
        environment: its variables; None: those of this process.
        patience: how many times both limits it may take, for what is no kernel.

    Raises:
        OSError: it is not there.
        TimeoutExpired: it did not end in LIMIT_S, and was ended with all that it had started. At the limit on CPU time, it fails.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    limited = ["/bin/sh", "-c", _LIMITED, "sh", str(patience * CPU_LIMIT_S), *command]
    # A session of its own, so that it can be ended with all that it has started.
    with subprocess.Popen(limited, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True) as process:
        _running[process.pid] = os.getpid()
        try:
            out, said = process.communicate(timeout=patience * LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            del _running[process.pid]
    return subprocess.CompletedProcess(limited, process.returncode, out, said)


def end_compilers() -> None:
    """Ends those that run in other threads of this process, with all that they have started, as if they had failed."""
    for session, owner in list(_running.items()):
        if owner == os.getpid():
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.killpg(session, signal.SIGKILL)
