"""The nursery as this process sees it, and the workers that it forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path

from tuner.errors import DeviceLost
from tuner.workers.messages import Job, Message, Place, receive, send

MODULE = "tuner.workers.main"

CLOSE_S = 10.0
"""For the nursery to end after its socket was closed; then it is killed."""


class Died(Exception):
    """A worker ended with a request unanswered; the text is a clause that says how.

    Attributes:
        killed: by SIGKILL, and not by this process: by the user, or for want of memory.
    """

    def __init__(self, said: str, killed: bool = False) -> None:
        super().__init__(said)
        self.killed = killed


class Gone(Died):
    """A process had ended before it was asked anything."""


class Hung(Exception):
    """A worker did not answer in time, and was killed."""


class Stuck(DeviceLost):
    """A worker cannot be ended, and its device can be used by nobody."""


class Nursery:
    """A running nursery. Thread-safe.

    Args:
        module: what it runs.

    Raises:
        Gone: from every method but `close`, once the nursery has ended or cannot be relied on any more.
    """

    def __init__(self, module: str = MODULE) -> None:
        self._lock = threading.Lock()
        self._connection, theirs = Pipe()
        # A session of its own: Ctrl-C at a terminal is for this process alone.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno())], pass_fds=(theirs.fileno(),), env=inherited(),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
        theirs.close()

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can be asked for workers."""
        return not self._connection.closed

    def fork(self, place: Place) -> Worker:
        """A new worker, which is about to open its executor."""
        ours, theirs = Pipe()
        try:
            with self._exchange():
                send(self._connection, {"do": "fork", "place": place.as_json()})
                send_handle(self._connection, theirs.fileno(), self._process.pid)
                pid = receive(self._connection)["pid"]
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return Worker(self, pid, ours)

    def prepare(self, job: Job, measures: bool) -> None:
        """Has the data made that workers forked from now on need for this job. Does not wait for it."""
        with self._exchange():
            send(self._connection, {"do": "prepare", "job": job.as_json(), "measures": measures})

    def end(self, pid: int) -> Message:
        """Kills a worker unless it has ended, and says how it ended; see tuner.workers.main."""
        with self._exchange():
            send(self._connection, {"do": "end", "pid": pid})
            return receive(self._connection)

    def kill(self) -> None:
        """From any thread: ends the process, and with it all workers, whatever is being waited for."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process, and with it all workers."""
        self._connection.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """One command and its answer. One that is left half-way leaves nothing to rely on."""
        with self._lock:
            try:
                if not self.alive:
                    raise EOFError
                yield
            except BaseException as error:
                self._connection.close()
                self._process.kill()
                self._process.wait()
                if isinstance(error, EOFError | OSError):
                    raise Gone("ended, as the one that starts them had ended before") from error
                raise


class Worker:
    """A worker process and the socket to it. Used by one thread at a time."""

    def __init__(self, nursery: Nursery, pid: int, connection: Connection) -> None:
        self.pid = pid
        self._nursery = nursery
        self._connection = connection

    def ask(self, request: Message, limit_s: float) -> Message:
        """The reply to a request.

        Raises:
            Gone: the worker had ended before; it has not seen the request.
            Died: it ended without a reply.
            Hung: there was none after so many seconds.
        """
        try:
            send(self._connection, request)
        except OSError as error:
            raise Gone(_clause(self.end())) from error
        return self.reply(limit_s)

    def reply(self, limit_s: float) -> Message:
        """The next message. Raises as `ask`; whatever it raises, the worker has ended."""
        try:
            if self._connection.poll(limit_s):
                return receive(self._connection)
        except (EOFError, OSError) as error:
            how = self.end()
            raise Died(_clause(how), how.get("signal") == signal.SIGKILL) from error
        except BaseException:
            self.end()
            raise
        self.end()
        raise Hung(f"did not end within {limit_s:.0f} s")

    def end(self) -> Message:
        """Makes sure that the process is gone; how it ended."""
        self._connection.close()
        try:
            how = self._nursery.end(self.pid)
        except Gone:
            return {"signal": int(signal.SIGKILL)}  # by the kernel: no worker outlives its nursery
        if not how:
            raise Stuck(f"process {self.pid}, in which a kernel hangs, cannot be ended; the GPU may need a reset")
        return how


def _clause(how: Message) -> str:
    if "signal" in how:
        number = how["signal"]
        why = ", from outside or for want of memory" if number == signal.SIGKILL else ""
        return f"was ended by signal {number} ({signal.strsignal(number)}{why})"
    return f"ended with status {how['exit']}"


def inherited() -> dict[str, str]:
    """The environment of this process, so that another finds the same modules, wherever it is started."""
    root = str(Path(__file__).resolve().parent.parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *(path or os.getcwd() for path in sys.path)])}
