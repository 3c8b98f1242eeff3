"""The command line of a replay: `python -m tuner --replay FILE`, a tuning run on a recorded space, without a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from codegen.config import Config
from tuner.arguments import OK, Parser, exit_status
from tuner.errors import InputError, NoValidKernel
from tuner.outcome import REJECTED
from tuner.pipeline import try_in_turn
from tuner.records import Record, Status
from tuner.replay.field import Field
from tuner.replay.judge import Fault, RecordedJudge
from tuner.replay.recorded import load
from tuner.search import Guided
from tuner.strategy import Listed
from tuner.tuning import TRIALS


def replay(field: Field, trials: int, seed: int, faults: Mapping[Config, Fault] | None = None) -> list[Record]:
    """The records of a tuning run, in the order in which they were judged; the same every time."""
    ranked = field.candidates
    strategy = Listed(ranked) if len(ranked) <= trials else Guided(ranked, field.predicted, trials, seed)
    records: list[Record] = []
    try_in_turn(strategy, RecordedJudge(field, faults), lambda: False, records.append)
    return records


def winner(records: Sequence[Record]) -> Record:
    """The fastest valid one, the first of equals.

    Raises:
        NoValidKernel: there is none.
    """
    valid = [record for record in records if record.status is Status.OK]
    if not valid:
        raise NoValidKernel("no candidate of the recorded space is valid; record more of it")
    return min(valid, key=lambda record: record.best_us)


def main(arguments: Sequence[str]) -> int:
    """Runs the command line and returns the exit status. 0: a kernel was found. 1: none was. 2: the arguments make no sense.
    130: interrupted."""
    parser = Parser(prog="tuner", allow_abbrev=False, description="A tuning run on a recorded space: no GPU, nothing compiled.")
    parser.add_argument("--replay", required=True, type=Path, metavar="FILE", help="what `python -m tuner record` wrote")
    parser.add_argument("--trials", type=int, default=TRIALS, metavar="N", help=f"most candidates to try (default {TRIALS})")
    parser.add_argument("--seed", type=int, default=0, help="of the search (default 0)")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="so many runs, with that seed and those after it")
    options = parser.parse_args(arguments)
    return exit_status("tuner", lambda: _replay(options))


def _replay(options: argparse.Namespace) -> int:
    if options.trials < 1 or options.runs < 1 or options.seed < 0:
        raise InputError("there must be one trial and one run at least, and no negative seed")
    _show(Field(load(options.replay)), options.trials, range(options.seed, options.seed + options.runs))
    return OK


def _show(field: Field, trials: int, seeds: range) -> None:
    found: list[float] = []
    for seed in seeds:
        records = replay(field, trials, seed)
        best = winner(records)
        found.append(best.best_us)
        rejected = sum(record.status in REJECTED for record in records)
        print(f"seed {seed}: {best.best_us:.4g} us, {field.best_us / best.best_us:.1%} of the optimum, {len(records)} tried, "
              f"{rejected} rejected: {best.config}", flush=True)
    if len(found) > 1:
        print(f"{len(found)} runs: the slowest winner takes {max(found) / min(found) - 1:.1%} more than the fastest")
