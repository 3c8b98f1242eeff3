"""The nursery: a process that forks workers, says how they ended, and runs no kernel itself. `python -m tuner.workers.main FD`.

Imports and the data that candidates are judged on are here before a worker is forked, so that one that takes the place of another
begins at once. No thread runs here and no device is touched, which makes forking safe.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import NoReturn

from tuner.choose import open_for_worker
from tuner.evaluate import Material
from tuner.workers.messages import Job, Message, Place, receive, send
from tuner.workers.worker import Open, serve

END_S = 30.0
"""A process that was killed ends in milliseconds, or, where a GPU has to be taken away from a kernel, in a few seconds."""

MEMORY_SHARE = 0.5
"""Of the machine's memory, what a worker without a GPU may write to. What runs away is refused more before others suffer."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(open_executor: Open = open_for_worker) -> None:
    """Answers commands until the other side hangs up.

        {"do": "fork", "place": ...} and a socket  -> {"pid": ...}
        {"do": "end", "pid": ...}                  -> {"signal": n}, {"exit": n}, or {} where it does not end
        {"do": "prepare", "job": ..., "measures": ...}: no answer
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the user's Ctrl-C is for the process above, which ends this one
    connection = Connection(int(sys.argv[1]))
    materials: dict[Job, Material] = {}
    working: set[int] = set()
    with suppress(EOFError, OSError):
        while True:
            request = receive(connection)
            if request["do"] == "fork":
                socket = Connection(recv_handle(connection))
                place = Place.from_json(request["place"])
                nursery = os.getpid()
                pid = os.fork()
                if pid == 0:
                    connection.close()
                    _work(nursery, socket, place, open_executor, materials)
                socket.close()
                working.add(pid)
                send(connection, {"pid": pid})
            elif request["do"] == "end":
                working.discard(request["pid"])
                send(connection, _ended(request["pid"]))
            else:
                materials = _prepared(request)
                gc.collect()
                gc.freeze()  # so that collections in the workers leave these pages shared
    for pid in working:
        _ended(pid)


def _prepared(request: Message) -> dict[Job, Material]:
    job = Job.from_json(request["job"])
    material = Material(job.problem, eps=job.eps, seed=job.seed, measures=request["measures"])
    with suppress(MemoryError):  # a worker meets it again, and says so
        material.prepare()
    return {job: material}


def _work(nursery: int, socket: Connection, place: Place, open_executor: Open, materials: dict[Job, Material]) -> NoReturn:
    """All that the forked process does."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == nursery:
            _limit(place)
            serve(socket, place, open_executor, materials)
    except BaseException:  # whatever it is, it is a mistake in this program, and nobody else can say so
        with suppress(OSError):
            send(socket, {"bug": traceback.format_exc()})
    finally:
        os._exit(0)


def _limit(place: Place) -> None:
    """What kernels print goes nowhere; a crash leaves no core; what takes too much memory is ended before anything else."""
    with open(os.devnull, "r+b") as nothing:
        for stream in (1, 2):
            os.dup2(nothing.fileno(), stream)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # where memory runs out, this process is the one to kill
        Path("/proc/self/oom_score_adj").write_text("1000")
    if place.executor == "host":
        allowed = int(MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))


def _ended(pid: int) -> Message:
    """Kills a worker that has not ended by itself, and says how it ended."""
    deadline = time.monotonic() + END_S
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.002)
        ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        return {}
    return {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {"exit": os.WEXITSTATUS(status)}


if __name__ == "__main__":
    main()
