"""`python -m tuner wisdom`: listing, moving and forgetting what runs found, and one sentence for every mistake."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from codegen.problem import Shape
from tests.fake_gpu import FakeGpu
from tests.test_wisdom import ATOMIC, ONE_BLOCK, TWO_PASSES, key, point
from tuner import cli
from tuner.bench.floors import Floor, Rates
from tuner.bench.measure import Spread
from tuner.bench.results import Case, Entry, Results, Row, Setting
from tuner.bench.shapes import NamedShape
from tuner.records import write_text
from tuner.report import best_json
from tuner.tuning import Request, TuningRun
from tuner.wisdom import book as books
from tuner.wisdom.book import Book
from tuner.wisdom.points import Key, Point

H200 = Path(__file__).resolve().parent.parent / "reports" / "h200"


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's own folder; nothing ships."""
    monkeypatch.setenv("LNL_WISDOM", str(tmp_path / "wisdom"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(books.Book.__init__, "__kwdefaults__", {"shipped": tmp_path / "shipped", "say": books.warn})
    return tmp_path / "wisdom"


Streams = pytest.CaptureFixture[str]


def wisdom(capsys: Streams, *arguments: object) -> tuple[int, str, str]:
    """Exit status, output and errors."""
    try:
        status = cli.main(["wisdom", *map(str, arguments)])
    except SystemExit as stop:
        status = int(stop.code or 0)
    streams = capsys.readouterr()
    return status, streams.out, streams.err


def fill(root: Path) -> Book:
    """Three points of two problems, one of them of other sources."""
    book = Book(root)
    book.add(key(), [point(64, TWO_PASSES, 5.25), point(4, ONE_BLOCK, 1.5, source="0123456789abcdef")])
    book.add(key(accuracy="tf32"), [point(64, ATOMIC, 4.0, about=key(accuracy="tf32"))])
    return book


def content(book: Book) -> dict[Key, tuple[Point, ...]]:
    return {entry.key: entry.points for entry in book.own()}


@pytest.fixture(scope="module")
def best(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The best.json of a run."""
    run = TuningRun(Request(Shape(2, 8, 8, 5), variants=("row_warp",), trials=10), FakeGpu())
    run.execute()
    path = tmp_path_factory.mktemp("results") / "test" / "2x8x8x5-float32" / "best.json"
    write_text(path, best_json(run.result()))
    return path


def bench_json(device: str = "NVIDIA H200", version: str = "abc") -> str:
    """A benchmark of which one row was measured, in its second part."""
    rates = Rates(4.0, 0.5, 800.0)
    setting = Setting("bench", "2026-01-02T03:04:05+00:00", version, device, {}, 0, 20, (), rates)
    floor = Floor(1.0, None, 0.5)
    case = Case.of(NamedShape("mine", Shape(4, 16, 64, 64)), "float32", "fp32")
    measured = Row(case, floor, Entry(Spread(4.5, 0.1, 40, 0.0)), TWO_PASSES, "known", "timed", part=1)
    rows = (measured, replace(measured, ours=Entry()), replace(measured, config=None))
    return json.dumps(Results((replace(setting, version="first"), setting), rows).as_json())


# --- list --------------------------------------------------------------------------------------------------------------------


def test_an_empty_list_says_where_it_looked(capsys: Streams, root: Path) -> None:
    assert wisdom(capsys, "list") == (0, f"0 points for 0 problems; own ones lie in {root}\n", "")


def test_the_list_shows_every_point(capsys: Streams, root: Path, tmp_path: Path) -> None:
    fill(root)
    Book(tmp_path / "shipped").add(key(), [point(512, ATOMIC, 7.75, date="2026-01-02T03:04:05+00:00")])
    status, output, _ = wisdom(capsys, "list")
    assert status == 0 and "4 points for 2 problems" in output
    assert output.count("NVIDIA Test, H 64, O 64, float32, class") == 2 and "class tf32" in output
    lines = {line.split("│")[1].strip(): line for line in output.splitlines() if line.count("│") == 7 and "class" not in line}
    assert "measured warm" in output
    assert "5.25" in lines["64"] or "4.00" in lines["64"]
    assert "other" in lines["4"] and "own" in lines["4"] and "1.50" in lines["4"]
    assert all(word in lines["512"] for word in ("current", "shipped", "2026-01-02", "7.75"))


@pytest.mark.parametrize(("filters", "count"), [
    ("--gpu test", 3), ("--gpu h200", 0), ("--size 64,64", 3), ("--size 64x65", 0), ("--dtype float32", 3),
    ("--dtype float16", 0), ("--accuracy tf32", 1), ("--regime warm", 3), ("--regime cold", 0), ("--sources current", 2),
    ("--sources other", 1),
    ("--sources other --accuracy tf32", 0)])
def test_filters_mean_the_same_everywhere(capsys: Streams, root: Path, filters: str, count: int) -> None:
    book = fill(root)
    assert f"{count} point" in wisdom(capsys, "list", *filters.split())[1]
    status, output, error = wisdom(capsys, "export", *filters.split())
    exported = json.loads(output)["wisdom"] if count else []
    assert sum(len(entry["points"]) for entry in exported) == count and status == (0 if count else 2)
    assert count or "nothing to export" in error
    assert wisdom(capsys, "forget", *filters.split())[:2] == (0, f"{count} point{'' if count == 1 else 's'} forgotten\n")
    assert sum(map(len, content(book).values())) == 3 - count


def test_off_is_said(capsys: Streams, monkeypatch: pytest.MonkeyPatch, best: Path) -> None:
    monkeypatch.setenv("LNL_WISDOM", "off")
    assert "wisdom is off" in wisdom(capsys, "list")[1]
    status, _, error = wisdom(capsys, "import", best)
    assert status == 2 and "LNL_WISDOM is off" in error


# --- export and import -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["all.json", "folder"])
def test_what_is_exported_can_be_imported(capsys: Streams, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          out: str) -> None:
    before = content(fill(root))
    status, output, _ = wisdom(capsys, "export", "--out", tmp_path / out)
    assert (status, output) == (0, f"3 points for 2 problems written to {tmp_path / out}\n")
    monkeypatch.setenv("LNL_WISDOM", str(tmp_path / "elsewhere"))
    for _ in range(2):
        status, output, _ = wisdom(capsys, "import", tmp_path / out)
        assert status == 0 and output.startswith("3 points for 2 problems imported\n1 of them only to begin searches with")
        assert content(Book(tmp_path / "elsewhere")) == before


def test_the_console_gets_what_a_file_gets(capsys: Streams, root: Path, tmp_path: Path) -> None:
    fill(root)
    wisdom(capsys, "export", "--out", tmp_path / "all.json")
    assert wisdom(capsys, "export")[1] == (tmp_path / "all.json").read_text()


def test_an_exported_folder_is_what_ships(capsys: Streams, root: Path, tmp_path: Path) -> None:
    fill(root)
    wisdom(capsys, "export", "--out", tmp_path / "shipped", "--accuracy", "tf32")
    wisdom(capsys, "export", "--out", tmp_path / "shipped", "--sources", "current")
    files = [path.name for path in (tmp_path / "shipped").rglob("*") if path.is_file()]
    assert sorted(files) == sorted(Path(each.path).name for each in (key(), key(accuracy="tf32")))
    assert wisdom(capsys, "forget", "--all")[:2] == (0, "3 points forgotten\n")
    output = wisdom(capsys, "list")[1]
    assert "2 points for 2 problems" in output and output.count("shipped") == 2


def test_a_run_s_result_is_imported_with_its_sources(capsys: Streams, root: Path, best: Path) -> None:
    for given in (best, best.parent.parent):
        status, output, _ = wisdom(capsys, "import", given)
        assert (status, output) == (0, "1 point for 1 problem imported\n")
    ((found_key, (found,)),) = content(Book(root)).items()
    values = json.loads(best.read_text())
    assert (found_key.gpu, found_key.hidden, found.rows) == ("NVIDIA Test", 8, 16)
    assert (found.config, found.source) == (values["winner"]["config"], values["source"])


def test_older_results_only_begin_searches_unless_they_are_trusted(capsys: Streams, root: Path) -> None:
    status, output, _ = wisdom(capsys, "import", H200)
    assert status == 0 and "of them only to begin searches with" in output
    old = content(Book(root))
    assert old and all(each.gpu == "NVIDIA H200" for each in old)
    status, output, _ = wisdom(capsys, "import", "--trust", H200)
    assert status == 0 and "only to begin" not in output
    new = content(Book(root))
    assert {k: [replace(p, source="") for p in points] for k, points in new.items()} == {
        k: [replace(p, source="") for p in points] for k, points in old.items()}
    assert all(found.source for points in new.values() for found in points)


def test_a_benchmark_is_imported(capsys: Streams, root: Path, tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(bench_json())
    assert wisdom(capsys, "import", tmp_path / "bench.json", "--trust")[0] == 0
    ((found_key, (found,)),) = content(Book(root)).items()
    assert found_key == replace(key(), gpu="NVIDIA H200")
    assert (found.rows, found.us, found.version, found.source) == (64, 4.5, "abc", point(64, TWO_PASSES).source)


@pytest.mark.parametrize(("revision", "known"), [("abc", True), ("abd", False), ("abc+", False), ("unknown", False)])
def test_results_of_this_very_revision_are_trusted(capsys: Streams, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                   revision: str, known: bool) -> None:
    monkeypatch.setenv("LNL_REVISION", revision)
    version = "abc" if revision in ("abc", "abd") else revision
    (tmp_path / "bench.json").write_text(bench_json(version=version))
    assert wisdom(capsys, "import", tmp_path / "bench.json")[0] == 0
    ((_, (found,)),) = content(Book(root)).items()
    assert bool(found.source) == known


def test_files_can_become_an_export_without_being_imported(capsys: Streams, root: Path, best: Path, tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(bench_json())
    status, _, _ = wisdom(capsys, "export", best, tmp_path / "bench.json", "--trust", "--out", tmp_path / "shipped")
    assert status == 0 and not root.exists()
    assert "2 points for 2 problems" in wisdom(capsys, "list")[1]


@pytest.mark.parametrize(("arguments", "said"), [
    ("", "list|export|import|forget"),
    ("lists", "invalid choice"),
    ("list --size 8", "two whole numbers H,O"),
    ("list --dtype float8", "invalid choice"),
    ("import", "FILE|DIR"),
    ("import none.json", "cannot be read (No such file or directory)"),
    ("import EMPTY", "no file in"),
    ("import TEXT", "is no JSON"),
    ("import OTHER", "holds no results"),
    ("import LATER", "schema version 99"),
    ("import BENCH", "schema version 99"),
    ("import UNKNOWN", "the architecture of NVIDIA Other is not known"),
    ("import BROKEN", "is damaged, or of another version"),
    ("import LOST", "no winner"),
    ("export", "nothing to export"),
    ("forget", "--all"), ("forget --all --dtype float16", "either some"), ("forget --gpu=", "either some"),
])
def test_mistakes_are_one_sentence(capsys: Streams, root: Path, tmp_path: Path, best: Path, arguments: str, said: str) -> None:
    files = {
        "TEXT": "text", "OTHER": "[]", "BENCH": bench_json().replace('"schema": 2', '"schema": 99'),
        "LATER": json.dumps({"schema": 99, "key": {}, "points": []}),
        "UNKNOWN": bench_json("NVIDIA Other"),
        "BROKEN": json.dumps({"schema": 1, "key": {"gpu": "x"}, "points": []}),
        "LOST": json.dumps({**json.loads(best.read_text()), "winner": None})}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "EMPTY").mkdir()
    words = [str(tmp_path / word) if word.isupper() else word for word in arguments.split()]
    status, output, error = wisdom(capsys, *words)
    assert (status, output) == (2, "") and said in error and error.startswith("wisdom") and error.count("\n") == 1
    assert not root.exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(capsys: Streams, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                         best: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LNL_WISDOM", str(tmp_path / "file" / "wisdom"))
    status, _, error = wisdom(capsys, "import", best)
    assert status == 1 and error.startswith("wisdom: ") and error.count("\n") == 1
    status, _, error = wisdom(capsys, "export", best, "--out", tmp_path / "file" / "out")
    assert status == 1 and error.startswith("wisdom: ") and error.count("\n") == 1


def test_a_damaged_file_is_said_and_the_rest_is_listed(capsys: Streams, root: Path) -> None:
    fill(root)
    (root / key().path).write_text("{")
    status, output, error = wisdom(capsys, "list")
    assert status == 0 and "1 point for 1 problem" in output
    assert error.startswith("wisdom: the wisdom in") and error.count("\n") == 1
