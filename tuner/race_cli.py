"""The command line that times kernels somebody names: `python -m tuner race --shape B,S,H,O CONFIG|FILE...`.

A new variant, a new value of a parameter, or one question put to the GPU needs no search: each kernel named is validated, and
those that are right are timed in turns.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from codegen.config import Config
from codegen.errors import InvalidConfig
from codegen.problem import Problem
from codegen.space import parse_config, why_unfit
from tuner.arguments import FAILED, OK, Parser, run_recorded
from tuner.asked import add_problem, request
from tuner.choose import open_isolated
from tuner.errors import InputError, why
from tuner.evaluate import Judge
from tuner.pipeline import workers as cores
from tuner.records import Record, Status
from tuner.timing import finals
from tuner.timing.regimes import REGIMES
from tuner.turns import in_turns, table
from tuner.workers.pool import Workers


def main(arguments: Sequence[str]) -> int:
    """Runs the command line, given what follows `race`, and returns the exit status.

    0: all kernels are right and were timed. 1: some are not, or there is no GPU. 2: the arguments make no sense. 130: interrupted
    by Ctrl-C.
    """
    parser = Parser(prog="race", allow_abbrev=False, description=(
        "Validates kernels and times them in turns on the GPU. A config leaves out what has its default, as in "
        "row_warp:warps=4,vector=2."))
    parser.add_argument("configs", nargs="+", metavar="CONFIG|FILE",
                        help="a config, or a file of configs, one a line; what follows a # is a comment")
    add_problem(parser)
    parser.add_argument("--regime", choices=REGIMES, default="warm", help="which times decide (default warm); both are taken")
    parser.add_argument("--rounds", type=int, default=finals.ROUNDS, metavar="N",
                        help=f"how often each is timed (default {finals.ROUNDS})")
    return run_recorded(parser, _race, arguments, "interrupted")


def _race(options: argparse.Namespace, command: str) -> int:
    problem = request(options, command).problem()
    if options.rounds < 1:
        raise InputError("there must be one round at least")
    configs = list(dict.fromkeys(config for text in options.configs for config in _configs(text)))
    with closing(open_isolated("cuda")) as workers:
        judge = workers.judge(problem, regime=options.regime)
        records = _judged(workers, judge, problem, configs)
        right = [record.config for record in records if record.status is Status.OK]
        if not right:
            return FAILED
        found = in_turns(workers, judge, problem, right, options.regime, options.rounds)
    print("\n".join(table(found, problem, _errors(records).__getitem__)))
    return OK if len(right) == len(configs) and all(finalist.times for finalist in found.finalists) else FAILED


def _errors(records: Sequence[Record]) -> dict[Config, str]:
    """What is said of each valid kernel: the largest error of the wanted gradients."""
    return {record.config: f"error {max(error.normwise for error in record.errors.values()):.1e}"
            for record in records if record.errors}


def _configs(text: str) -> list[Config]:
    """What an argument names.

    Raises:
        InvalidConfig: it is neither a config nor a file of them.
        InputError: it is a file that cannot be read, has a line that is no config, or none that is.
    """
    path = Path(text)
    try:
        if not path.exists():
            return [parse_config(text)]
    except OSError:  # too long for a name, say
        return [parse_config(text)]
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({why(error)})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text; name a file with one config a line") from error
    found = []
    for number, line in enumerate(lines, 1):
        if config := line.partition("#")[0].strip():
            try:
                found.append(parse_config(config))
            except InvalidConfig as error:
                raise InputError(f"{path}, line {number}: {error}") from error
    if not found:
        raise InputError(f"{path} names no config; it has one a line, such as row_warp:warps=4,vector=2")
    return found


def _judged(workers: Workers, judge: Judge, problem: Problem, configs: Sequence[Config]) -> list[Record]:
    """A record for each config; they are compiled side by side, and each is validated whatever the others take. What fails is
    said at once."""
    unfit = {config: reason for config in configs if (reason := why_unfit(problem, config, workers.limits)) is not None}
    fit = [config for config in configs if config not in unfit]
    records = [Record(config, Status.NOT_RUN, reason) for config, reason in unfit.items()]
    for record in records:
        _say(record)
    with ThreadPoolExecutor(cores()) as pool:
        for number, compiled in enumerate(pool.map(judge.compile, fit), 1):
            judge.best_us = math.inf
            records.append(judge.judge(compiled))
            if records[-1].status is not Status.OK:
                _say(records[-1])
            print(f"validated {number} of {len(fit)}", flush=True)
    return records


def _say(record: Record) -> None:
    print(f"{record.status.value}: {record.config} ({record.reason})", flush=True)
