"""The benchmark's parts: shapes, spreads, floors."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.problem import Problem, Shape
from tests.fake_bench import RatedGpu
from tuner.bench.floors import Floor, Rates
from tuner.bench.measure import BUDGET_SECONDS, LEAST_SAMPLES, Spread, effort
from tuner.bench.results import Case, Entry, Row
from tuner.bench.shapes import NAMED, parse_shapes
from tuner.errors import InputError


def test_all_named_shapes_are_the_default() -> None:
    assert [named.name for named in parse_shapes(None)] == list(NAMED)
    assert len(NAMED) == 12


def test_names_keep_their_order() -> None:
    assert [named.name for named in parse_shapes(["tall, seed"])] == ["tall", "seed"]


def test_sizes_are_called_by_themselves_and_stand_beside_names_and_files(tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_text("first 1,2,3,4\n")
    found = parse_shapes(["4,4,8,16; tall,5x6x7x8", f"{file};seed;4x4x8x16", "1, 2, 3, 5"])
    assert [(named.name, str(named.shape)) for named in found] == [
        ("4x4x8x16", "4,4,8,16"), ("tall", "1,1048576,64,64"), ("5x6x7x8", "5,6,7,8"), ("first", "1,2,3,4"), ("seed", "4,4,8,16"),
        ("1x2x3x5", "1,2,3,5")]


def test_two_shapes_of_one_name_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_text("seed 1,2,3,4\n")
    with pytest.raises(InputError, match="two shapes are called 'seed': 4,4,8,16 and 1,2,3,4"):
        parse_shapes(["seed", str(file)])


def test_a_file_names_its_own_shapes(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("# mine\nfirst 1,2,3,4\n\nsecond 5x6x7x8  # wide\n")
    assert [(named.name, named.shape) for named in parse_shapes([str(file)])] == [
        ("first", Shape(1, 2, 3, 4)), ("second", Shape(5, 6, 7, 8))]


@pytest.mark.parametrize(("text", "complaint"), [
    ("first 1,2,3", "line 1 of mine.txt is not a name and B,S,H,O"),
    ("first\n", "line 1 of mine.txt is not a name"),
    ("a 1,2,3,4\na 5,6,7,8", "line 2 of mine.txt names a second shape 'a'"),
    ("a 0,2,3,4", "has no rows"),
    ("# nothing\n", "there is no shape in mine.txt"),
])
def test_what_a_file_gets_wrong_is_said_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(text)
    with pytest.raises(InputError, match=complaint):
        parse_shapes([str(file)])


@pytest.mark.parametrize("text", ["sed", "seed,sed", "", "4,4,8", "4,4,8,16,2", "seed;", "seed,4,4,8,16"])
def test_what_is_neither_name_nor_file_is_a_sentence(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="some of seed, tiny"):
        parse_shapes([text])


def test_long_calls_get_fewer_samples_but_some() -> None:
    assert effort(20).fitting(1e6 * BUDGET_SECONDS / 100) == 20
    assert effort(20).fitting(1e6 * BUDGET_SECONDS / 10) == 10
    assert effort(20).fitting(1e7 * BUDGET_SECONDS) == LEAST_SAMPLES
    assert effort(2).fitting(1e7 * BUDGET_SECONDS) == 2


def test_a_spread_covers_both_measurements_and_tells_them_apart() -> None:
    spread = Spread.of([10.0, 11.0, 12.0], [11.0, 12.1, 14.0])
    assert spread.samples == 6
    assert spread.median == 11.5
    assert spread.iqr == pytest.approx(12.075 - 11.0)
    assert spread.noise == pytest.approx(0.1)
    assert Spread.of([5.0], [4.0]).noise == pytest.approx(0.25)


@pytest.mark.parametrize(("ours", "peer", "standing"), [
    ((10.0, 0.0), (10.5, 0.0), "faster"), ((10.5, 0.0), (10.0, 0.0), "slower"), ((10.0, 0.0), (10.0, 0.0), "level"),
    ((10.0, 0.02), (10.5, 0.02), "faster"), ((10.0, 0.03), (10.5, 0.03), "level"), ((10.5, 0.03), (10.0, 0.03), "level"),
    ((10.5, 0.049), (10.0, 0.0), "slower"), ((10.5, 0.0), (10.0, 0.051), "level"), ((10.0, 0.3), None, None),
    (None, (10.0, 0.3), None)])
def test_times_no_further_apart_than_both_noises_are_level(
        ours: tuple[float, float] | None, peer: tuple[float, float] | None, standing: str | None) -> None:
    first, second = (Entry() if made is None else Entry(Spread(made[0], 1.0, 24, made[1])) for made in (ours, peer))
    case = Case.of(parse_shapes(["seed"])[0], "float32", "fp32")
    row = Row(case, Floor.of(case.problem, Rates(4.0, 0.5, None)), first, peers={"eager": second, "gemms": Entry(
        Spread(1.0, 0.1, 24, 0.0))})
    assert row.standing == standing


def test_floors_are_bytes_operations_and_a_launch() -> None:
    problem = Problem(1024, 256, 512)
    rates = Rates.measure(RatedGpu(), lambda: 800.0)
    floor = Floor.of(problem, rates)
    moved = 4 * (1024 * 512 + 1024 * 256 + 2 * 256 + 512 * 256) + 4 * (1024 * 256 + 2 * 256 + 512 * 256 + 512)
    assert floor.bytes_us == pytest.approx(moved / 4e6)
    assert floor.matrix_us == pytest.approx(2 * 2 * 1024 * 256 * 512 / 800e6)
    assert floor.us == floor.bytes_us
    assert Floor.of(Problem(16, 8, 16), rates).us == 0.5


def test_the_floor_of_wide_products_is_their_operations() -> None:
    problem = Problem(8192, 4096, 12288)
    assert Floor.of(problem, Rates(4.0, 0.5, 800.0)).us == pytest.approx(4 * 8192 * 4096 * 12288 / 800e6)
    without = Floor.of(problem, Rates.measure(RatedGpu(), None))
    assert without.matrix_us is None and without.us == without.bytes_us


def test_half_the_bytes_at_16_bits() -> None:
    full, half = (Floor.of(Problem(1024, 256, 512, dtype), Rates(4.0, 0.5, None)).bytes_us for dtype in ("float32", "bfloat16"))
    assert half == pytest.approx(full / 2)
