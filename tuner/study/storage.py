"""Storages that several processes share, on one machine or many: Optuna's own, opened by URL, and one study in them.

Every call that a storage can fail raises StorageLost with a sentence, which never has the password in it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.exceptions import DuplicatedStudyError, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, get_storage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import (
    ArgumentError,
    IntegrityError,
    OperationalError,
    PendingRollbackError,
    ProgrammingError,
    SQLAlchemyError,
)

from tuner.errors import InputError, StorageLost, ToolchainError, why
from tuner.study.journal import NoJournal, WholeFile
from tuner.study.urls import JOURNAL, check_url, masked, without_password

DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}
"""The drivers that the extra `storage` installs, whichever SQLAlchemy would take."""

CONNECT_S = 10
"""For a server to answer at all."""

SQLITE_WAIT_S = 60
"""For the other processes' transactions on one file."""

OPENINGS = 5
"""Processes that are the first to open an empty database make its tables at the same time, and all but one of them fail."""

_ALIVE = "alive "

_DAMAGED = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What Optuna raises, in no particular way, where a storage holds what it never wrote, or not any more what it did."""


def open_storage(url: str) -> Storage:
    """The storage of that URL: postgresql://, mysql://, sqlite:/// or journal:PATH.

    Raises:
        InputError: it is no such URL.
        ToolchainError: the database's driver is not installed.
        StorageLost: it cannot be opened.
    """
    scheme = check_url(url)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if scheme == JOURNAL:
        return _open_journal(url)
    options = {"connect_args": {"timeout": SQLITE_WAIT_S} if scheme == "sqlite" else {"connect_timeout": CONNECT_S},
               "pool_pre_ping": scheme != "sqlite"}
    dialect, rest = url.split(":", 1)
    address = f"{DRIVERS.get(dialect, dialect)}:{rest}"
    _check_address(address, url)
    with _failures(url):
        for opening in range(1, OPENINGS + 1):
            try:
                return Storage(get_storage(RDBStorage(address, engine_kwargs=dict(options))), url)
            except ImportError as error:
                raise ToolchainError(f"the driver of {scheme} databases is not installed ({error.__cause__ or error}); "
                                     "pip install 'lnl-tuner[storage]'") from error
            except (IntegrityError, OperationalError, ProgrammingError, StorageInternalError) as error:
                if opening == OPENINGS or not re.search("exists|duplicate|unique", _innermost(error), re.IGNORECASE):
                    raise
                time.sleep(0.2 * opening)
    raise AssertionError("unreachable")


def _open_journal(url: str) -> Storage:
    path = url.partition(":")[2]
    with _failures(url):
        try:
            file = WholeFile(path)
        except NoJournal as error:
            raise StorageLost(f"{masked(url)} {error}; name another file with --storage") from error
        said = (f"the last line of {path} was cut off where a process ended while it wrote, and was removed: what it said is "
                "lost") if file.cut_bytes else ""
        return Storage(JournalStorage(file), url, said)


def _check_address(address: str, url: str) -> None:
    """Raises InputError where no server could have the address."""
    try:
        parsed = make_url(address)
        parsed.get_dialect()
    except ArgumentError as error:
        raise InputError(f"--storage {masked(url)!r} names no driver that SQLAlchemy knows, or is no URL; leave the driver "
                         "out, as in postgresql://USER:PASSWORD@HOST/DATABASE") from error
    except ValueError as error:
        raise InputError(f"--storage {masked(url)!r} has a port that is no number") from error
    if parsed.port is not None and not 0 < parsed.port < 1 << 16:
        raise InputError(f"--storage {masked(url)!r} has the port {parsed.port}; ports are from 1 to 65535")


class Storage:
    """An open storage.

    Attributes:
        optuna: Optuna's own object.
        url: where it is, with the password.
        said: what had to be mended when it was opened, as a sentence; empty where nothing had.
    """

    def __init__(self, opened: BaseStorage, url: str, said: str = "") -> None:
        self.optuna = opened
        self.url = url
        self.said = said

    def names(self) -> list[str]:
        """Of all studies."""
        with _failures(self.url):
            return [study.study_name for study in self.optuna.get_all_studies()]

    def study(self, name: str) -> Ledger:
        """The study of that name, which is made if need be."""
        with _failures(self.url):
            try:
                number = self.optuna.create_new_study([StudyDirection.MINIMIZE], name)
            except DuplicatedStudyError:
                number = self.optuna.get_study_id_from_name(name)
        return Ledger(self, number)


class Ledger:
    """One study: its trials, and the counters by which its members show that they live. Thread-safe."""

    def __init__(self, storage: Storage, number: int) -> None:
        self._storage = storage.optuna
        self._url = storage.url
        self._study = number

    def trials(self) -> Sequence[FrozenTrial]:
        """All trials in the order of their numbers."""
        with _failures(self._url):
            return self._storage.get_all_trials(self._study, deepcopy=False)

    def add(self, trial: FrozenTrial) -> int:
        """Adds a trial with all its parameters at once, and returns its id. Its number is larger than any before."""
        with _failures(self._url):
            return self._storage.create_new_trial(self._study, trial)

    def note(self, trial_id: int, key: str, value: Any) -> bool:
        """Writes to a trial; False where somebody has ended it."""
        with _failures(self._url):
            try:
                self._storage.set_trial_user_attr(trial_id, key, value)
            except UpdateFinishedTrialError:
                return False
        return True

    def end(self, trial_id: int, state: TrialState, time_us: float | None = None) -> bool:
        """Ends a trial; False where somebody else has."""
        with _failures(self._url):
            try:
                return self._storage.set_trial_state_values(trial_id, state, None if time_us is None else [time_us])
            except UpdateFinishedTrialError:
                return False

    def beat(self, member: str, count: int) -> None:
        """Writes a member's counter."""
        with _failures(self._url):
            self._storage.set_study_user_attr(self._study, _ALIVE + member, count)

    def beats(self) -> Mapping[str, int]:
        """The counters of all members there ever were."""
        with _failures(self._url):
            attributes = self._storage.get_study_user_attrs(self._study)
        return {key.removeprefix(_ALIVE): count for key, count in attributes.items() if key.startswith(_ALIVE)}


@contextmanager
def _failures(url: str) -> Iterator[None]:
    try:
        yield
    except (StorageInternalError, SQLAlchemyError, OSError) as error:
        raise StorageLost(f"the storage {masked(url)} cannot be used: {without_password(_innermost(error), url)}") from error
    except _DAMAGED as error:
        raise StorageLost(f"what is in the storage {masked(url)} is damaged, or was written by another version of Optuna: "
                          f"{without_password(_innermost(error), url)}") from error


def _innermost(error: BaseException) -> str:
    """The first line of what the database or the system said."""
    while (inner := getattr(error, "orig", None) or error.__cause__) is not None:
        error = inner
    if isinstance(error, PendingRollbackError):  # the error before it, in the same transaction, said why
        return "the connection was lost"
    return (why(error).strip() or type(error).__name__).splitlines()[0]
