"""Programs that watch a kernel in a process of its own: each ends, and all that it has started with it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from tuner.workers.nursery import inherited

NO_PROGRAM = 127
"""What a shell says of a program that cannot be started."""


@dataclass(frozen=True, slots=True)
class Run:
    """A tool that runs, or has run; None: it could not be started."""

    process: subprocess.Popen[bytes] | None
    said: IO[bytes]

    def wait(self, deadline: float) -> int | None:
        """Its exit status; None where it has none by the deadline of time.monotonic."""
        if self.process is None:
            return NO_PROGRAM
        try:
            return self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def output(self) -> str:
        """What it has said."""
        self.said.seek(0)
        return self.said.read().decode(errors="replace")


@contextmanager
def started(command: Sequence[str]) -> Iterator[Run]:
    """A process that ends with the block, and all that it has started with it."""
    with tempfile.TemporaryFile() as said:
        try:
            # A session of its own, so that it can be ended as a whole, and Ctrl-C is for this process alone.
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=inherited(),
                                       start_new_session=True)
        except OSError as error:
            said.write(f"it cannot be started ({error.strerror})".encode())
            yield Run(None, said)
            return
        try:
            yield Run(process, said)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
