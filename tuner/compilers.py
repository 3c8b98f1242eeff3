"""Compilers as processes that end: each, and each that it starts, has a limit."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tuner.errors import RunEnded

CPU_LIMIT_S = 60
"""A kernel takes a second or two; the largest, for the CPU, ten. Counted in CPU time, which is the same on a busy machine."""

LIMIT_S = 300.0
"""For a compiler that waits instead of working, by the clock."""

_running: dict[int, int] = {}
"""By the number of each compiler's session, the process that started it, which a fork of that is not."""

_threads = threading.local()
"""By thread, whose compilers it runs, where they can be ended together: a Group."""

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
        RunEnded: it is one of a Group that was ended.
    """
    group: Group | None = getattr(_threads, "group", None)
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    limited = ["/bin/sh", "-c", _LIMITED, "sh", str(patience * CPU_LIMIT_S), *command]
    # A session of its own, so that it can be ended with all that it has started.
    with subprocess.Popen(limited, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True) as process:
        _running[process.pid] = os.getpid()
        try:
            if group is not None:
                group.add(process.pid)
            out, said = process.communicate(timeout=patience * LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            del _running[process.pid]
            if group is not None:
                group.discard(process.pid)
    if group is not None:
        group.check()
    return subprocess.CompletedProcess(limited, process.returncode, out, said)


def end_compilers() -> None:
    """Ends those that run in other threads of this process, with all that they have started, as if they had failed."""
    for session, owner in list(_running.items()):
        if owner == os.getpid():
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.killpg(session, signal.SIGKILL)


class Group:
    """The compilers that certain threads run, which can be ended together. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: set[int] = set()
        self._ended = False

    def join(self) -> None:
        """From now on the compilers that this thread runs belong here."""
        _threads.group = self

    def end(self) -> None:
        """Ends those that run, with all that they have started, and none begins any more: whoever waits for one gets RunEnded."""
        with self._lock:
            self._ended = True
            for session in self._sessions:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(session, signal.SIGKILL)

    def add(self, session: int) -> None:
        """One that has begun. Raises RunEnded: after the end."""
        self.check()
        with self._lock:
            self._sessions.add(session)
        self.check()

    def discard(self, session: int) -> None:
        """One that has ended."""
        with self._lock:
            self._sessions.discard(session)

    def check(self) -> None:
        """Raises RunEnded: after the end."""
        if self._ended:
            raise RunEnded("nobody waits for what is compiled any more")
