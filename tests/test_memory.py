"""What a long run leaves in the memory of the process that tunes."""

from __future__ import annotations

import copy
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from codegen.limits import target
from codegen.problem import Problem, Shape
from tests import quick_worker
from tests.fake_gpu import rugged
from tuner.candidates import survey
from tuner.compact import Errors
from tuner.executors import Resources
from tuner.guess import rank
from tuner.records import Record, Status
from tuner.search import Guided, as_params
from tuner.surrogate import FITTED, Surrogate
from tuner.validate import GradientError

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = "row_warp,row_shared"
SPACE = survey(Problem.of(Shape(4, 4, 8, 16)), target("sm_90"), VARIANTS.split(","))


MOST_KIB = 4
"""What a candidate may leave behind: its record and its trial take 1.4 KiB, and not every hole in the heap is filled again."""


def test_a_thousand_candidates_leave_only_their_records() -> None:
    """What the search needs it has taken from the beginning."""
    assert len(SPACE.valid) > 1000
    done = subprocess.run([sys.executable, "-m", quick_worker.__name__, "4,4,8,16", "1000", VARIANTS], cwd=ROOT, text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    count, early, late = map(int, done.stdout.split())
    assert count == 1000
    assert late - early < MOST_KIB * (count - quick_worker.BETWEEN)


def test_the_model_is_the_same_however_many_configs_it_was_to_make_room_for() -> None:
    """More than it was told of, fewer, or as many; and times enough for a fit to look at a part of them only."""
    ranked = rank(SPACE)
    models = [Surrogate(SPACE.valid, ranked, room) for room in (0, 300, 1000)]
    told = {config: None if number % 9 == 4 else rugged(config) for number, config in enumerate(SPACE.valid[::5])}
    assert len(told) > 2 * FITTED
    for config, time_us in told.items():
        for model in models:
            model.take(config)
            model.tell(config, time_us)
    assert len({model.choose() for model in models}) == 1


def test_trials_share_what_is_the_same_in_all_of_them() -> None:
    strategy = Guided(SPACE.valid, rank(SPACE), 20, 0)
    asked = strategy.ask(20)
    for config in asked:
        strategy.tell(config, rugged(config))
    trials = strategy.study.get_trials(deepcopy=False)
    assert len({id(trial.distributions) for trial in trials}) == len({config.variant for config in asked}) == 2
    assert all(any(config is candidate for candidate in SPACE.valid) for config in asked)
    assert [trial.params for trial in trials] == [as_params(config) for config in asked]
    assert len({id(trial.user_attrs) for trial in trials}) == 1


def test_records_share_what_is_the_same_in_all_of_them() -> None:
    error, resources = GradientError(1e-7, 0.5), {"row_warp": Resources(32, 0)}
    given = [Record(config, Status.OK, None, 2.0, True, errors={"dx": error, "db": error}, rows=(1, 7), resources=resources)
             for config in SPACE.valid[:2]]
    found = [Record.from_json(json.loads(json.dumps(record.as_json()))) for record in given]
    assert found == given and found[0].errors == {"dx": error, "db": error}
    assert found[0].resources is found[1].resources and found[0].rows is found[1].rows and found[0].times is found[1].times


def test_errors_are_a_mapping_like_any_other() -> None:
    plain = {"dx": GradientError(1e-7, 0.5), "dw": GradientError(2e-7, math.inf)}
    errors = Errors(plain)
    assert errors == plain and list(errors) == ["dx", "dw"] and len(errors) == 2 and errors["dw"] == plain["dw"]
    assert "db" not in errors and errors.get("db") is None
    assert copy.deepcopy(errors) == pickle.loads(pickle.dumps(errors)) == plain
    with pytest.raises(KeyError, match="db"):
        errors["db"]
