"""How processes that share a study keep out of one another's way: who may try a config, and who counts as lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from optuna.exceptions import StorageInternalError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import PendingRollbackError

from codegen.config import Config
from tests.fake_gpu import rugged
from tuner.calls import configs
from tuner.errors import StorageLost
from tuner.records import Record, Status
from tuner.search import config_of
from tuner.study import members as members_module
from tuner.study import storage
from tuner.study.members import LEFT, LOST_AFTER, Members
from tuner.study.shared import Shared
from tuner.study.storage import Ledger, open_storage
from tuner.study.urls import check_url, masked, without_password

SPACE = configs("4,4,8,16", variants=["row_thread"])


class Scripted:
    """Proposes these configs one after the other, whatever was tried. `before` is called before the first."""

    variants = ("row_thread",)

    def __init__(self, proposals: Sequence[Config], before: Callable[[], object] = lambda: None) -> None:
        self._proposals = list(proposals)
        self._before = before

    def propose(self, trials: Sequence[FrozenTrial], number: int) -> Config | None:
        before, self._before = self._before, lambda: None
        before()
        return self._proposals.pop(0) if self._proposals else None


class Study:
    """A study in a journal, and processes that share it."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        self._stack = stack
        self.ledger = self.opened()

    def opened(self) -> Ledger:
        return open_storage(f"journal:{self._path}").study("a study")

    def process(self, sampler: Scripted, budget: int = 10, on_record: Callable[[Record], None] = lambda record: None) -> Shared:
        ledger = self.opened()
        self.members = self._stack.enter_context(Members(ledger))
        return Shared(ledger, self.members, sampler, budget, on_record, lambda: True)  # type: ignore[arg-type]

    def states(self) -> list[TrialState]:
        return [trial.state for trial in self.ledger.trials()]


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Study]:
    monkeypatch.setattr(members_module, "BEAT_S", 1000.0)
    with ExitStack() as stack:
        yield Study(tmp_path / "log", stack)


def ok(config: Config) -> Record:
    return Record(config, Status.OK, time_us=rugged(config), measured=True)


def finish(process: Shared, record: Record) -> None:
    process.begin(record.config)
    process.add(record)
    process.tell(record.config, record.time_us if record.status is Status.OK else None)


def test_of_two_that_propose_the_same_at_the_same_time_one_tries_it(study: Study) -> None:
    second = study.process(Scripted(SPACE[:1]))
    theirs: list[Config] = []
    first = study.process(Scripted(SPACE[:2], lambda: theirs.extend(second.ask(1))))
    assert first.ask(1) == [SPACE[1]] and theirs == [SPACE[0]]
    assert study.states() == [TrialState.RUNNING, TrialState.FAIL, TrialState.RUNNING]


def test_the_budget_is_kept_however_many_ask_at_the_same_time(study: Study) -> None:
    second = study.process(Scripted(SPACE[:1]), budget=1)
    first = study.process(Scripted(SPACE[1:2], lambda: second.ask(1)), budget=1)
    assert first.ask(1) == []
    assert study.states() == [TrialState.RUNNING, TrialState.FAIL]


def test_records_are_handed_on_once_whatever_became_of_the_candidate(study: Study) -> None:
    seen: list[Record] = []
    first, second = study.process(Scripted(SPACE[:2])), study.process(Scripted(()), on_record=seen.append)
    made = [ok(SPACE[0]), Record(SPACE[1], Status.WRONG, "dx[0,0]: nan")]
    assert first.ask(2) == SPACE[:2]
    for record in made:
        finish(first, record)
    for _ in range(2):
        assert second.ask(1) == []
    assert seen == made
    assert study.states() == [TrialState.COMPLETE, TrialState.PRUNED]


def test_what_is_released_is_tried_by_the_next_before_anything_else(study: Study) -> None:
    first, second = study.process(Scripted(SPACE[:2])), study.process(Scripted(SPACE[5:]))
    assert first.ask(2) == SPACE[:2]
    finish(first, ok(SPACE[0]))
    first.release()
    assert second.ask(2) == [SPACE[1], SPACE[5]]


def lose(study: Study, process_members: Members) -> None:
    """Makes all who look see that a process has gone."""
    study.ledger.beat(process_members.own, LEFT)


def test_a_process_is_blamed_for_what_it_had_begun_alone(study: Study) -> None:
    """Two are lost with the first config, which is a crash then; the second config was only claimed by both, and is tried."""
    for _ in range(2):
        process = study.process(Scripted(SPACE[:2]))
        lost_members = study.members
        assert process.ask(2) == SPACE[:2]
        process.begin(SPACE[0])
        lose(study, lost_members)
    seen: list[Record] = []
    third = study.process(Scripted(()), on_record=seen.append)
    assert third.ask(2) == [SPACE[1]]
    assert [(record.config, record.status) for record in seen] == [(SPACE[0], Status.CRASH)]
    assert "2 processes" in (seen[0].reason or "")
    standing = [config_of(trial.params) for trial in study.ledger.trials() if trial.state is not TrialState.FAIL]
    assert standing == SPACE[:2]


def test_a_process_that_was_taken_for_lost_does_no_harm(study: Study) -> None:
    """Its trial was given to another; it ends its own all the same, and nobody's record is lost."""
    seen: list[Record] = []
    slow = study.process(Scripted(SPACE[:1]))
    slow_members = study.members
    assert slow.ask(1) == SPACE[:1]
    lose(study, slow_members)
    other = study.process(Scripted(()), on_record=seen.append)
    assert other.ask(1) == SPACE[:1]
    finish(slow, ok(SPACE[0]))
    finish(other, ok(SPACE[0]))
    assert study.states() == [TrialState.FAIL, TrialState.COMPLETE]


# --- members -----------------------------------------------------------------------------------------------------------------


class Board:
    """Counters as a ledger has them."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def beat(self, member: str, count: int) -> None:
        self.counts[member] = count

    def beats(self) -> Mapping[str, int]:
        return dict(self.counts)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    monkeypatch.setattr(members_module, "BEAT_S", 1000.0)
    return Board()


def test_only_a_counter_that_stands_still_while_one_looks_is_lost(board: Board) -> None:
    with Members(board) as members:  # type: ignore[arg-type]
        for count in range(3 * LOST_AFTER):
            board.beat("alive", count // 2)
            board.beat("dead", 7)
            assert members.lost("dead") == (count > LOST_AFTER) and not members.lost("alive")
            assert members.alive == (2 if count > LOST_AFTER else 3)
            members._beat()
        board.beat("dead", 8)
        members._beat()
        assert not members.lost("dead") and not members.lost(members.own)


def test_one_that_ended_in_order_is_gone_at_once_and_one_without_a_counter_after_a_while(board: Board) -> None:
    with Members(board) as members:  # type: ignore[arg-type]
        board.beat("left", LEFT)
        assert not members.lost("never seen")
        members._beat()
        assert members.lost("left") and not members.lost("never seen")
        for _ in range(LOST_AFTER):
            members._beat()
        assert members.lost("never seen")
    assert board.counts[members.own] == LEFT


# --- urls --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "shown"), [
    ("postgresql://me:secret@host:5432/db", "postgresql://me:***@host:5432/db"),
    ("--storage=mysql+pymysql://me:a%40b@host/db", "--storage=mysql+pymysql://me:***@host/db"),
    ("postgresql://me:not/escaped @:it?@host/db", "postgresql://me:***@host/db"),
    ("postgresql://host/db?user=me&password=secret&sslmode=off", "postgresql://host/db?user=me&password=***&sslmode=off"),
    ("postgresql://me@host/db", "postgresql://me@host/db"),
    ("postgresql://me:pw@/db?host=/d&sslpassword=s3cr3t", "postgresql://me:***@/db?host=/d&sslpassword=***"),
    ("postgresql://me@corp:s3cr3t@127.0.0.1:1/db", "postgresql://me@corp:***@127.0.0.1:1/db"),
    ("mysql://me@h:1/db?passwd=s3@cr3t&a=b", "mysql://me@h:***&a=b"),
    ("mysql://me@h/db?auth_token=t", "mysql://me@h/db?auth_token=***"),
    ("postgresql:/me:s3cr3t@h/db", "postgresql:/me:***@h/db"), ("postgresql://me@[::1]:5432/db", "postgresql://me@[::1]:5432/db"),
    ("postgresql://me:a?pass=b@host/db", "postgresql://me:***"),
    ("sqlite:////a/b.db", "sqlite:////a/b.db"), ("sqlite:///a:b@c.db", "sqlite:///a:b@c.db"),
    ("journal:a/b@c:d.log", "journal:a/b@c:d.log"),
])
def test_passwords_are_masked(text: str, shown: str) -> None:
    assert masked(text) == shown


def test_what_a_driver_says_is_masked_too() -> None:
    url = "postgresql://me:p%40ss%2Fword@host/db"
    assert without_password("p@ss/word and p%40ss%2Fword", url) == "*** and ***"
    assert without_password("one, two", "mysql://me@h/d?passwd=one&ssl_key_password=two") == "***, ***"


def test_what_sqlalchemy_says_of_its_own_sessions_is_not_shown() -> None:
    error = StorageInternalError("x")
    error.__cause__ = PendingRollbackError("Can't reconnect until invalid transaction is rolled back.")
    with pytest.raises(StorageLost, match="cannot be used: the connection was lost"), storage._failures("sqlite:///a"):
        raise error


def test_what_the_system_says_of_a_journal_is_said_once(tmp_path: Path) -> None:
    with pytest.raises(StorageLost) as caught:
        open_storage(f"journal:{tmp_path}").study("a study")
    assert str(caught.value) == f"the storage journal:{tmp_path} cannot be used: Is a directory"


@pytest.mark.parametrize(("url", "scheme"), [
    ("postgresql+psycopg2://host/db", "postgresql"), ("mysql://host/db", "mysql"), ("sqlite:///a.db", "sqlite"),
    ("journal:a", "journal")])
def test_schemes(url: str, scheme: str) -> None:
    assert check_url(url) == scheme
