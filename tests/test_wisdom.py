"""Wisdom: what a run leaves, which kernel a call gets from it, and what damage, rivals and other versions do to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tuner
import tuner.wisdom.source as sources
from codegen.config import Config
from codegen.problem import Problem, Shape
from codegen.space import parse_config, why_unfit
from tests.fake_gpu import FakeGpu
from tuner.candidates import distance, survey
from tuner.executors import Executor
from tuner.guess import best_predicted, rank
from tuner.records import Status
from tuner.tuning import Request, TuningRun
from tuner.wisdom import recall
from tuner.wisdom.book import Book
from tuner.wisdom.points import Key, Point
from tuner.wisdom.source import is_current, source_digest

HIDDEN, OUT = 64, 64
ROWWISE = ("row_thread", "row_warp")
GPU = FakeGpu()
ONE_BLOCK = "row_shared:threads=256,splits=1,reduction=single_block"
TWO_PASSES = "row_warp:warps=4,splits=64,reduction=two_pass"
ATOMIC = "row_warp:warps=4,splits=64,reduction=atomic"


def problem(rows: int, **options: Any) -> Problem:
    return Problem(rows, HIDDEN, OUT, **options)


def key(**options: Any) -> Key:
    return recall.key_of(problem(1, **options), GPU.device, GPU.limits.arch, "warm")


def point(rows: int, config: str, us: float = 5.0, about: Key | None = None, **options: Any) -> Point:
    """A point of today's sources."""
    chosen = parse_config(config)
    return Point(rows, str(chosen), us, **{"source": source_digest((about or key()).problem(rows), chosen), **options})


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def book(tmp_path: Path, said: list[str]) -> Book:
    return Book(tmp_path / "wisdom", shipped=tmp_path / "shipped", say=said.append)


def known(book: Book, rows: int, **options: Any) -> Config | None:
    return recall.known(problem(rows, **options), GPU, book)


# --- which kernel a call gets ------------------------------------------------------------------------------------------------


def test_nothing_is_known_of_what_nobody_tuned(book: Book) -> None:
    assert known(book, 16) is None
    assert recall.choose(problem(16), GPU, book) == best_predicted(problem(16), GPU.limits)


def test_the_row_count_that_was_tuned_is_answered_by_its_winner(book: Book) -> None:
    book.add(key(), [point(64, TWO_PASSES), point(4, ONE_BLOCK), point(1024, ATOMIC)])
    assert [known(book, rows) for rows in (4, 64, 1024)] == list(map(parse_config, (ONE_BLOCK, TWO_PASSES, ATOMIC)))


@pytest.mark.parametrize(("slow", "chosen"), [(ONE_BLOCK, TWO_PASSES), (TWO_PASSES, ONE_BLOCK)])
def test_between_two_row_counts_the_model_chooses_among_their_winners(book: Book, monkeypatch: pytest.MonkeyPatch, slow: str,
                                                                      chosen: str) -> None:
    class Slow:
        time_us = 9.0

    real = recall.predict
    monkeypatch.setattr(recall, "predict", lambda problem, config, limits: Slow if config == parse_config(slow) else
                        real(problem, config, limits))
    book.add(key(), [point(32, ONE_BLOCK), point(128, TWO_PASSES), point(2048, ATOMIC, 0.1), point(1, ATOMIC, 0.1)])
    assert known(book, 64) == parse_config(chosen)


def test_a_winner_that_is_not_for_so_many_rows_makes_room_for_the_next_on_its_side(book: Book) -> None:
    rows = 1 << 15
    assert why_unfit(problem(rows), parse_config(ONE_BLOCK), GPU.limits) is not None
    book.add(key(), [point(rows // 2, ONE_BLOCK, 0.1), point(rows // 4, TWO_PASSES)])
    assert known(book, rows) == parse_config(TWO_PASSES)
    book.add(key(), [point(rows, ONE_BLOCK, 0.1)])
    assert known(book, rows) == parse_config(TWO_PASSES)


def test_the_faster_of_two_winners_at_one_row_count(book: Book) -> None:
    book.add(key(), [point(64, TWO_PASSES, 5.0)])
    book.add(key(), [point(64, ATOMIC, 4.0), point(64, ONE_BLOCK, 6.0)])
    assert known(book, 64) == parse_config(ATOMIC)


def test_far_from_its_row_count_a_winner_must_look_credible(book: Book) -> None:
    slow = "row_thread:threads=32,splits=4,reduction=two_pass"
    rows = 1 << 14
    assert why_unfit(problem(rows), parse_config(slow), GPU.limits) is None
    book.add(key(), [point(16, slow, 0.1)])
    assert known(book, 16) == known(book, 64) == parse_config(slow)
    assert known(book, rows) is None
    assert recall.choose(problem(rows), GPU, book) == best_predicted(problem(rows), GPU.limits)


@pytest.mark.parametrize("source", ["", "0123456789abcdef"])
def test_times_of_other_sources_are_not_believed(book: Book, source: str) -> None:
    book.add(key(), [point(64, TWO_PASSES, 0.1, source=source)])
    assert known(book, 64) is None
    book.add(key(), [point(64, ATOMIC, 9.0)])
    assert known(book, 64) == parse_config(ATOMIC)


def test_a_config_that_is_no_more_is_kept_but_not_used(book: Book) -> None:
    gone = Point(64, "row_warp:lanes=7", 0.1, source="0123456789abcdef")
    book.add(key(), [gone, point(64, TWO_PASSES)])
    assert known(book, 64) == parse_config(TWO_PASSES) and gone in book.points(key())


KINDS = [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "param_dtype": "float32"}, {"dtype": "float16"}, {"accuracy": "tf32"},
         {"deterministic": True}, {"wants": frozenset({"dx"})}]


@pytest.mark.parametrize("asked", KINDS, ids=str)
def test_kinds_of_problems_are_kept_apart(book: Book, asked: dict[str, Any]) -> None:
    for warps, options in zip((1, 2, 4, 8, 1, 2, 4), KINDS, strict=True):
        config = f"row_warp:warps={warps},splits={16 if len(options) == 1 else 64},reduction=two_pass"
        book.add(key(**options), [point(64, config, about=key(**options))])
    assert len(book.own()) == len(KINDS)
    answered = known(book, 64, **asked)
    assert answered is not None and str(answered) == book.points(key(**asked))[0].config


@pytest.mark.parametrize("change", [{"device": "NVIDIA Other"}, {"measures": False}, {"device": "nvidia TEST"}], ids=str)
def test_other_devices_know_nothing_of_it(book: Book, change: dict[str, Any]) -> None:
    book.add(key(), [point(64, TWO_PASSES)])
    other: Executor = FakeGpu()
    for name, value in change.items():
        setattr(other, name, value)
    assert recall.known(problem(64), other, book) is None


def test_winners_for_more_gradients_serve_where_there_are_none_for_these(book: Book) -> None:
    book.add(key(), [point(64, TWO_PASSES)])
    three = {"wants": frozenset({"dx", "dw", "db"})}
    assert known(book, 64, **three) == parse_config(TWO_PASSES)
    book.add(key(**three), [point(64, ATOMIC, about=key(**three))])
    assert known(book, 64, **three) == known(book, 64, wants=frozenset({"dx", "dw"})) == parse_config(ATOMIC)
    assert known(book, 64, wants=frozenset({"dgamma"})) == parse_config(TWO_PASSES)


def test_what_ships_is_used_and_one_s_own_goes_before_it_where_faster(book: Book, tmp_path: Path) -> None:
    Book(tmp_path / "shipped").add(key(), [point(64, TWO_PASSES, 5.0)])
    assert known(book, 64) == parse_config(TWO_PASSES)
    book.add(key(), [point(64, ATOMIC, 4.0)])
    assert known(book, 64) == parse_config(ATOMIC)


def test_what_the_package_ships_is_sound(said: list[str], tmp_path: Path) -> None:
    for entry in Book(tmp_path, say=said.append).shipped():
        assert all(point.parsed is not None and point.source for point in entry.points)
    assert said == []


def test_warm_times_go_before_cold_ones(book: Book) -> None:
    book.add(replace(key(), regime="cold"), [point(64, TWO_PASSES, 9.0)])
    assert known(book, 64) == parse_config(TWO_PASSES)
    book.add(key(), [point(64, ATOMIC, 9.5)])
    assert known(book, 64) == parse_config(ATOMIC)


def test_only_this_very_problem_counts_as_exact(book: Book) -> None:
    book.add(key(), [point(64, TWO_PASSES, 5.0), point(64, ATOMIC, 4.0), point(64, ONE_BLOCK, 3.0, source="")])
    assert recall.exact(problem(64), GPU, book) == parse_config(ATOMIC)
    assert recall.exact(problem(65), GPU, book) is None
    assert recall.exact(problem(64, wants=frozenset({"dx"})), GPU, book) is None


# --- the digest of a kernel's source -----------------------------------------------------------------------------------------


def test_a_digest_is_of_the_kernel_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config(TWO_PASSES)
    digest = source_digest(problem(64), config)
    assert source_digest(problem(65), config) == digest
    assert source_digest(problem(64), parse_config(ATOMIC)) != digest
    assert source_digest(problem(64, dtype="bfloat16"), config) != digest
    assert source_digest(Problem(64, HIDDEN, OUT + 1), config) != digest
    real = sources.render
    for text, same in ((lambda text: text.replace("\n", "  // why\n\n"), True), (lambda text: f"/* a\nb */{text}", True),
                       (lambda text: f"{text}int more;", False)):
        sources._digest.cache_clear()
        monkeypatch.setattr(sources, "render", lambda problem, config, text=text: (
            replace(source := real(problem, config), text=text(source.text))))
        assert (source_digest(problem(64), config) == digest) == same
    sources._digest.cache_clear()


def test_a_changed_plan_is_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    config, real = parse_config(TWO_PASSES), sources.render
    digest = source_digest(problem(64), config)
    sources._digest.cache_clear()
    monkeypatch.setattr(sources, "render", lambda problem, config: (
        replace(source := real(problem, config), plan=replace(source.plan, steps=source.plan.steps[1:]))))
    assert source_digest(problem(64), config) != digest
    sources._digest.cache_clear()


def test_what_cannot_run_the_sizes_is_of_no_current_source() -> None:
    refused = point(64, TWO_PASSES)
    assert is_current(key(), refused)
    assert not is_current(replace(key(), arch="sm_1"), refused)
    assert not is_current(key(deterministic=True), point(64, ATOMIC))


# --- what a run adds and begins with -----------------------------------------------------------------------------------------


def run(shape: str, book: Book, gpu: FakeGpu | None = None, **options: Any) -> TuningRun:
    tuning = TuningRun(Request(Shape.parse(shape), **{"trials": 40, "variants": ROWWISE, **options}), gpu or FakeGpu())
    tuning.execute()
    recall.remember(tuning.result(), book)
    return tuning


def test_a_run_adds_its_winner(book: Book) -> None:
    result = run("2,8,64,64", book).result()
    assert result.winner is not None
    (entry,) = book.own()
    assert entry.key == key()
    (found,) = entry.points
    assert (found.rows, found.config, found.us) == (16, str(result.winner.config), result.winner.best_us)
    assert (found.date, found.version) == (result.info.date, result.info.version)
    assert known(book, 16) == result.winner.config


def test_a_cold_run_adds_cold_times_and_their_interval(book: Book) -> None:
    result = run("2,8,64,64", book, regime="cold").result()
    winner = result.winner
    assert winner is not None
    (entry,) = book.own()
    (found,) = entry.points
    assert entry.key.regime == "cold" and found.us == winner.times["cold"].median
    sure = replace(winner.times["cold"], low=1.5, high=2.5, level=0.97)
    for times, interval in ((sure, (1.5, 2.5)), (replace(sure, level=0.94), None)):
        _, (learned,) = recall.learned(result.info, replace(winner, times={"cold": times}), "")
        assert learned.interval == interval


def test_a_run_without_a_winner_adds_nothing(book: Book) -> None:
    def wrong(inputs: Any, wants: Any) -> Any:
        raise tuner.LaunchError("no")

    every = dict.fromkeys(tuner.configs("2,8,64,64", variants="row_thread"), wrong)
    run("2,8,64,64", book, FakeGpu(kernels=every), variants=("row_thread",))
    assert book.own() == []


def test_predictions_are_kept_apart_from_measurements(host_executor: Executor, book: Book) -> None:
    tuning = TuningRun(Request(Shape.parse("1,4,8,5"), trials=1, variants=("row_thread",)), host_executor)
    tuning.execute()
    recall.remember(tuning.result(), book)
    (entry,) = book.own()
    assert (entry.key.gpu, entry.key.regime) == ("sm_90a", "predicted")
    winner = tuning.result().winner
    assert winner is not None and recall.known(Problem(4, 8, 5), host_executor, book) == winner.config


def test_a_run_begins_with_what_is_known(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "Book", lambda: book)
    space = survey(problem(16), GPU.limits, ROWWISE)
    unlikely = [config for config in rank(space) if config.variant == "row_warp"][-3:]
    book.add(key(), [point(64, str(unlikely[0])), point(16, str(unlikely[1]), source="")])
    book.add(key(accuracy="tf32"), [point(16, str(unlikely[2]), about=key(accuracy="tf32"))])
    tuning = TuningRun(Request(Shape(2, 8, HIDDEN, OUT), variants=ROWWISE, trials=60), FakeGpu())
    assert recall.seeds(tuning.info, space, book) == [unlikely[1], unlikely[0], unlikely[2]]
    tuning.execute()
    tried = [record.config for record in tuning.result().records if record.status is Status.OK]
    first = tried[:len(space.variants) * (1 + recall.SEEDS)]  # each family's default goes before them
    assert set(unlikely) <= set(first)


def test_a_winner_at_far_row_counts_is_no_seed_where_it_is_predicted_to_be_slow(book: Book) -> None:
    space = survey(problem(16), GPU.limits, ROWWISE)
    ranked = [config for config in rank(space) if config.variant == "row_warp"]
    book.add(key(), [point(4096, str(ranked[-1])), point(1 << 20, str(ranked[0]))])
    info = TuningRun(Request(Shape(2, 8, HIDDEN, OUT), variants=ROWWISE, trials=1), FakeGpu()).info
    assert recall.seeds(info, space, book) == [ranked[0]]


def test_seeds_are_candidates_of_the_run(book: Book) -> None:
    rows = 1 << 15
    book.add(key(), [point(rows, ONE_BLOCK), point(rows, TWO_PASSES), point(rows, "row_thread")])
    space = survey(problem(rows), GPU.limits, ["row_warp"])
    tuning = TuningRun(Request(Shape(1, rows, HIDDEN, OUT), variants=("row_warp",)), GPU)
    assert recall.seeds(tuning.info, space, book) == [parse_config(TWO_PASSES)]
    assert recall.seeds(replace(tuning.info, measures=False), space, book) == []
    few = survey(problem(100), GPU.limits, ROWWISE)
    assert few.why_not(parse_config(TWO_PASSES)) is not None
    found = [config for config in recall.seeds(tuning.info, few, book) if config.variant == "row_warp"]
    assert [distance(config, parse_config(TWO_PASSES))[0] for config in found] == [1] and few.why_not(found[0]) is None
    ranked = {config: float(place) for place, config in enumerate(space.valid)}
    first = recall.seeds_first(ranked, space, tuning.info, book)
    assert next(iter(first)) == parse_config(TWO_PASSES) and first == ranked
    del ranked[parse_config(TWO_PASSES)]
    assert list(recall.seeds_first(ranked, space, tuning.info, book))[1:] == list(ranked)


def test_a_folder_that_cannot_be_written_does_not_cost_the_result(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "file").write_text("")
    tuning = run("2,8,64,64", Book(tmp_path / "elsewhere"))
    recall.remember(tuning.result(), Book(tmp_path / "file" / "wisdom"), said.append)
    (sentence,) = said
    assert "was not added" in sentence and "(Not a directory)" in sentence and "LNL_WISDOM" in sentence
