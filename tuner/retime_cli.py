"""The command line that times winners of several runs together: `python -m tuner retime DIR...`.

Times of different runs are not to be compared closely: the GPU was warmer, or another one. Here the winners take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from codegen.config import Config
from codegen.problem import Problem, Shape
from codegen.space import why_not
from tuner.arguments import FAILED, OK, Parser, exit_status
from tuner.choose import open_isolated
from tuner.errors import InputError
from tuner.known import Known, read_best
from tuner.publish import BEST_JSON
from tuner.records import RunInfo
from tuner.timing import finals
from tuner.turns import in_turns, table

_SAME = ("shape", "dtype", "param_dtype", "accuracy", "wants", "deterministic", "regime")
"""Fields of RunInfo that runs must agree in."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command line, given what follows `retime`, and returns the exit status.

    0: all winners were timed. 1: some could not be, or there is no GPU. 2: the arguments make no sense. 130: interrupted.
    """
    parser = Parser(prog="retime", allow_abbrev=False, description=(
        "Times the winners of tuning runs of one problem again, in turns, on one GPU, and says how far apart they are."))
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help=f"a run's folder, or its {BEST_JSON}")
    parser.add_argument("--rounds", type=int, default=finals.ROUNDS, metavar="N",
                        help=f"how often each is timed (default {finals.ROUNDS})")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(arguments)
    return exit_status("retime", lambda: _retime(options), options.debug)


def _retime(options: argparse.Namespace) -> int:
    if options.rounds < 1:
        raise InputError("there must be one round at least")
    known = {path: _read(path) for path in options.runs}
    info = next(iter(known.values())).info
    for path, other in known.items():
        if differs := [name for name in _SAME if getattr(other.info, name) != getattr(info, name)]:
            raise InputError(f"{path} is of another {differs[0]} than {options.runs[0]}; name runs of one problem")
    with closing(open_isolated("cuda")) as workers:
        problem = _problem(info)
        for path, other in known.items():
            if (reason := why_not(problem, other.winner.config, workers.limits)) is not None:
                raise InputError(f"the winner in {path} is no candidate any more ({reason}); tune again")
        judge = workers.judge(problem, eps=info.eps, seed=info.seed, regime=info.regime)
        winners = [other.winner.config for other in known.values()]
        for config in dict.fromkeys(winners):
            judge.compile(config)
        found = in_turns(workers, judge, problem, winners, info.regime, options.rounds)

    def runs(config: Config) -> str:
        return ", ".join(str(path) for path, other in known.items() if other.winner.config == config)

    print("\n".join(table(found, problem, runs)))
    return OK if all(finalist.times for finalist in found.finalists) else FAILED


def _read(path: Path) -> Known:
    file = path / BEST_JSON if path.is_dir() else path
    known = read_best(file)
    if known is None:
        raise InputError(f"{file} is no {BEST_JSON} of this program's version; name the folder of a tuning run")
    return known


def _problem(info: RunInfo) -> Problem:
    return Problem.of(Shape.parse(info.shape), dtype=info.dtype, wants=info.wants.split(","), deterministic=info.deterministic,
                      param_dtype=info.param_dtype, accuracy=info.accuracy)
