"""The files of wisdom: round trips, merging, damage, rivals, other versions, and where they lie."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest

import tuner
from codegen.problem import GRADIENTS
from codegen.space import parse_config
from tests.fake_gpu import FakeGpu
from tests.test_wisdom import ATOMIC, HIDDEN, KINDS, OUT, TWO_PASSES, book, key, known, point, said
from tuner.errors import InputError
from tuner.inputs import random_inputs
from tuner.wisdom.book import KEPT, Book, default_root, merged
from tuner.wisdom.points import SCHEMA, Entry

__all__ = ["book", "said"]


def test_points_survive_a_round_trip() -> None:
    entry = Entry(key(), (point(64, TWO_PASSES, interval=(4.5, 5.5), date="2026-01-02T03:04:05+00:00", version="abc"),))
    assert Entry.from_json(json.loads(json.dumps(entry.as_json()))) == entry


def test_of_one_kernel_the_later_measurement_counts(book: Book) -> None:
    early, late = point(64, TWO_PASSES, 3.0, date="2026-01-01"), point(64, TWO_PASSES, 4.0, date="2026-01-02")
    assert merged(key(), [early], [late]) == merged(key(), [late], [early]) == (late,)
    assert merged(key(), [replace(late, source="")], [early]) == (early,)


def test_old_points_make_room(book: Book) -> None:
    fresh = [point(64, f"row_warp:warps={warps},splits=16,reduction=two_pass", 9.0 - warps) for warps in (1, 2, 4, 8)]
    assert len(fresh) == KEPT
    stale = [point(64, TWO_PASSES, 0.1, source="0"), point(64, ATOMIC, 0.2, source="0")]
    assert merged(key(), stale, fresh[:KEPT - 1]) == (*reversed(fresh[:KEPT - 1]), stale[0])
    assert merged(key(), stale, fresh) == tuple(reversed(fresh))


def empty(data: bytes) -> bytes:
    return b""


def half(data: bytes) -> bytes:
    return data[:len(data) // 2]


def noise(data: bytes) -> bytes:
    return bytes(byte ^ 0xA5 for byte in data)


@pytest.mark.parametrize("damage", [
    empty, half, noise, lambda data: b"[]", lambda data: b"null", lambda data: data.replace(b'"hidden": 64', b'"hidden": "64"'),
    lambda data: data.replace(b'"out": 64', b'"out": 65'), lambda data: data.replace(b"5.0", b"-5.0"),
    lambda data: data.replace(b'"rows": 64', b'"rows": true'), lambda data: data.replace(b"5.0", b"NaN"),
    lambda data: data.replace(b'"us"', b'"ms"'), lambda data: data.replace(b'"fp32"', b'"fp1"'),
    lambda data: b"[" * 100_000, lambda data: data.replace(b"5.0", b"1" * 400),
    lambda data: data.replace(b'"rows": 64', b'"rows": ' + b"1" * 400)])
def test_a_damaged_file_is_put_aside_and_said(book: Book, said: list[str], damage: Callable[[bytes], bytes]) -> None:
    assert book.root is not None
    book.add(key(), [point(64, TWO_PASSES)])
    path = book.root / key().path
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    assert known(book, 64) is None
    assert len(said) == 1 and f"the wisdom in {path} was damaged" in said[0] and "\n" not in said[0]
    assert [aside.read_bytes() for aside in path.parent.iterdir()] == [damaged]
    book.add(key(), [point(64, ATOMIC)])
    assert known(book, 64) == parse_config(ATOMIC) and len(said) == 1


def test_a_damaged_file_stands_in_no_run_s_way(book: Book, said: list[str]) -> None:
    assert book.root is not None
    book.add(key(), [point(64, TWO_PASSES)])
    (book.root / key().path).write_text("{")
    book.add(key(), [point(64, ATOMIC)])
    assert [found.config for found in book.points(key())] == [str(parse_config(ATOMIC))] and len(said) == 1


def test_backward_warns_of_a_damaged_file_and_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LNL_WISDOM", str(tmp_path))
    Book().add(key(), [point(64, TWO_PASSES)])
    (tmp_path / key().path).write_text("{")
    data = random_inputs(64, HIDDEN, OUT)
    with pytest.warns(UserWarning, match="was damaged"):
        result = tuner.backward(data.dy, data.x, data.gamma, data.beta, data.w, executor=FakeGpu())
    assert set(result.present()) == set(GRADIENTS)


def test_files_of_another_version_are_left_alone(book: Book, said: list[str]) -> None:
    assert book.root is not None
    book.add(key(), [point(64, TWO_PASSES)])
    path = book.root / key().path
    later = path.read_text().replace(f'"schema": {SCHEMA}', f'"schema": {SCHEMA + 1}')
    path.write_text(later)
    assert known(book, 64) is None and book.own() == [] and said == []
    assert path.read_text() == later


def test_what_another_version_has_written_is_not_written_over(book: Book, said: list[str]) -> None:
    assert book.root is not None
    book.add(key(), [point(64, TWO_PASSES)])
    path = book.root / key().path
    for change in ((f'"schema": {SCHEMA}', f'"schema": {SCHEMA + 1}'), ('"key": {', '"key": {"clock": "locked",')):
        later = path.read_text().replace(*change)
        path.write_text(later)
        book.add(key(), [point(64, ATOMIC)])
        assert path.read_text() == later
        assert "another version of this program" in said.pop() and not said
        path.write_text(later.replace(*reversed(change)))
    assert known(book, 64) == parse_config(TWO_PASSES)


def test_what_a_point_says_besides_is_kept(book: Book, said: list[str]) -> None:
    assert book.root is not None
    book.add(key(), [point(64, TWO_PASSES)])
    path = book.root / key().path
    path.write_text(path.read_text().replace('"rows": 64', '"rows": 64, "watts": [7, 8]'))
    assert known(book, 64) == parse_config(TWO_PASSES)
    book.add(key(), [point(128, ATOMIC)])
    kept = json.loads(path.read_text())["points"]
    assert [found.get("watts") for found in kept] == [[7, 8], None] and not any("more" in found for found in kept)
    assert not said


def test_what_replaced_a_damaged_file_meanwhile_is_not_put_aside(book: Book, said: list[str],
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the reading of a damaged file and its renaming another process has put a good one there."""
    assert book.root is not None
    book.add(key(), [point(64, TWO_PASSES)])
    path = book.root / key().path
    good = path.read_text()
    path.write_text("{")
    lock = fcntl.flock

    def wait(file: IO[str], how: int) -> None:
        lock(file, how)
        path.write_text(good)

    monkeypatch.setattr(fcntl, "flock", wait)
    assert known(book, 64) == parse_config(TWO_PASSES) and not said and list(path.parent.iterdir()) == [path]


def test_damage_in_the_package_is_said_and_nothing_is_moved(book: Book, said: list[str], tmp_path: Path) -> None:
    shipped = tmp_path / "shipped" / key().path
    shipped.parent.mkdir(parents=True)
    shipped.write_text("{")
    assert known(book, 64) is None
    assert len(said) >= 1 and all("install the package again" in sentence for sentence in said) and shipped.exists()


PROCESS = """
import sys
from pathlib import Path
from tests.test_wisdom import key, point
from tuner.wisdom.book import Book

sys.stdin.read()
book = Book(Path(sys.argv[1]))
for rows in range(int(sys.argv[2]), 40, 4):
    book.add(key(), [point(1 + rows, "row_warp")])
"""


def test_processes_that_add_at_once_lose_nothing(book: Book) -> None:
    root = Path(__file__).parent.parent
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS, str(book.root), str(first)], stdin=subprocess.PIPE, cwd=root)
                 for first in range(4)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait(timeout=120) for process in processes] == [0] * 4
    assert [found.rows for found in book.points(key())] == list(range(1, 41))
    assert book.root is not None
    assert {path.name for path in book.root.rglob("*") if path.is_file()} == {".lock", Path(key().path).name}


def test_where_wisdom_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LNL_WISDOM", str(tmp_path))
    assert default_root() == tmp_path == Book().root
    monkeypatch.setenv("LNL_WISDOM", "off")
    off = Book(shipped=tmp_path)
    Book(tmp_path, shipped=tmp_path).add(key(), [point(64, TWO_PASSES)])
    off.add(key(), [point(64, ATOMIC)])
    assert off.root is None and off.points(key()) == () and off.own() == off.shipped() == [] and known(off, 64) is None
    assert off.forget(lambda key, point: True) == 0
    monkeypatch.delenv("LNL_WISDOM")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    root = default_root()
    assert root is not None and root.is_relative_to(tmp_path / "data")


@pytest.mark.parametrize("change", [{"gpu": ""}, {"gpu": 3}, {"hidden": 0}, {"out": True}, {"dtype": "float8"}, {"regime": "hot"},
                                    {"wants": "dw,dx"}, {"wants": ""}, {"accuracy": ""}, {"deterministic": 1}], ids=str)
def test_keys_that_make_no_sense(change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        replace(key(), **change)


def test_file_names_are_of_one_key_each() -> None:
    keys = [key(**options) for options in KINDS]
    changed = [replace(key(), gpu=gpu) for gpu in ("NVIDIA TEST", "NVIDIA Other")] + [replace(key(), regime="cold")]
    paths = {each.path for each in (*keys, *changed)}
    assert len(paths) == len(keys) + len(changed) and all(os.sep not in path.partition("/")[2] for path in paths)
