"""Optuna's journal files, kept whole: one that a process left with half a line can be used again, and damage is noticed.

A journal is a file of lines, one JSON object each, that only grows. Processes append to it under a lock. One that is killed while
it appends leaves a line without an end, to which Optuna would glue the next one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

_BEGINNING = b'{"op_code":'
"""Of every line."""

_CHUNK = 1 << 16


class NoJournal(Exception):
    """What is in the file was not written by Optuna, or was damaged since. It is as it was."""


class WholeFile(JournalFileBackend):
    """A journal of Optuna's of which every line is whole whenever one is appended.

    Attributes:
        cut_bytes: how long the half line was that was there when the file was opened, and was cut off.

    Args:
        path: the file; it is made if need be.

    Raises:
        NoJournal: it is none.
        OSError: it cannot be read or written. Later also: it has become shorter, so that what was in it is lost.
    """

    def __init__(self, path: str) -> None:
        file = Path(path)
        if file.exists():
            _check(file)
        self._whole = _Whole(path)
        super().__init__(path, self._whole)
        self._whole.acquire()
        self._whole.release()
        self.cut_bytes = self._whole.cut_bytes

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        """As JournalFileBackend.read_logs."""
        self._whole.check()
        return super().read_logs(log_number_from)


class _Whole(JournalFileSymlinkLock):
    """The lock of a journal. Whoever has it finds the file ending with a whole line."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._path = Path(path)
        self._length = 0
        self.cut_bytes = 0

    def acquire(self) -> bool:
        """As JournalFileSymlinkLock.acquire. OSError also where the file has become shorter."""
        super().acquire()
        try:
            self.check()
            self._cut()
        except OSError:
            self.release()
            raise
        return True

    def check(self) -> None:
        """Raises OSError where there are fewer whole lines than there were."""
        if self._path.stat().st_size < self._length:
            raise OSError("the file has become shorter; somebody has emptied or replaced it")

    def _cut(self) -> None:
        with self._path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            self._length = _after_last_line(file, end)
            if self._length < end:
                file.truncate(self._length)
                self.cut_bytes += end - self._length


def _after_last_line(file: BinaryIO, end: int) -> int:
    """Where the last whole line of a file ends."""
    while end:
        begin = max(0, end - _CHUNK)
        file.seek(begin)
        if (found := file.read(end - begin).rfind(b"\n")) >= 0:
            return begin + found + 1
        end = begin
    return 0


def _check(file: Path) -> None:
    """Raises NoJournal where a whole line is none of a journal, or there is only a half line that could not become one."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n"):
                try:
                    good = "op_code" in json.loads(line) and line.startswith(_BEGINNING)
                except (TypeError, ValueError, RecursionError):
                    good = False
            else:
                good = number > 1 or line[:len(_BEGINNING)] == _BEGINNING[:len(line)]
            if not good:
                raise NoJournal("is not a journal of Optuna's" if number == 1 else f"is damaged: line {number} says nothing")
