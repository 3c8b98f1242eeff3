"""The command line of the tuner: `python -m tuner --shape B,S,H,O`."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from codegen.dtypes import ACCURACIES, DTYPES, OWN_CLASS
from codegen.limits import TARGETS
from codegen.problem import ALL_GRADIENTS, GRADIENTS, Shape
from codegen.variants import VARIANTS
from tuner.arguments import (
    FAILED,
    INTERRUPTED,
    OK,
    Parser,
    exit_status,
    parse_folder,
    parse_gpus,
    parse_names,
    terminated_as_interrupted,
)
from tuner.choose import EXECUTORS, open_isolated
from tuner.companions import choose_companion
from tuner.console import results_console
from tuner.errors import InputError
from tuner.executors import Executor
from tuner.heap import keep_compact
from tuner.known import reports_folder
from tuner.outcome import TuneResult, why_no_winner
from tuner.progress import ProgressBar, best_table, error_table
from tuner.proofs import Proofs
from tuner.publish import Folder, Published
from tuner.request import Request
from tuner.schedule import Schedule
from tuner.study.urls import masked
from tuner.timing.regimes import REGIMES
from tuner.tuning import SHORTLIST, TIMEOUT, TRIALS, TuningRun
from tuner.wisdom.recall import remember
from tuner.wording import share_of_floor, time_text
from tuner.workers.pool import Workers

if TYPE_CHECKING:
    from tuner.study.storage import Storage

TARGET = "sm_90"


def main(arguments: Sequence[str] | None = None, began: float | None = None) -> int:
    """Runs the command line and returns the exit status.

    Args:
        arguments: None: those of this process.
        began: when the command was given, by time.monotonic; None: now.

    0: a kernel was found. 1: none was, or this machine lacks something. 2: the arguments make no sense. 130: interrupted by
    Ctrl-C; what was finished is kept.
    """
    began = time.monotonic() if began is None else began
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["bench"]:
        from tuner.bench import cli as bench

        return bench.main(given[1:])
    if given[:1] == ["compile"]:
        from tuner import compile_cli

        return compile_cli.main(given[1:])
    if given[:1] == ["race"]:
        from tuner import race_cli as race

        return race.main(given[1:])
    if given[:1] == ["record"]:
        from tuner.replay import record_cli as record

        return record.main(given[1:])
    if given[:1] == ["retime"]:
        from tuner import retime_cli as retime

        return retime.main(given[1:])
    if given[:1] == ["verify"]:
        from tuner.verify import cli as verify

        return verify.main(given[1:])
    if given[:1] == ["wisdom"]:
        from tuner.wisdom import cli as wisdom

        return wisdom.main(given[1:])
    if any(word.partition("=")[0] == "--replay" for word in given):
        from tuner.replay import cli as replay

        return replay.main(given)
    options = _parser().parse_args(given)
    command = "python -m tuner " + shlex.join(map(masked, given))
    return exit_status("tuner", lambda: _tune(options, command, began), options.debug,
                       "interrupted before all results were written")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tuner", description="Finds the fastest valid CUDA kernel for the backward pass of y = Linear(LayerNorm(x)).",
        epilog="tuner bench [--help]: compares tuned kernels with what else there is, side by side on the GPU. "
               "tuner compile [--help]: compiles kernels ahead, without a GPU. "
               "tuner race [--help]: validates kernels you name and times them in turns. "
               "tuner record [--help]: times a whole space into a file. "
               "tuner retime [--help]: times the winners of several runs in turns. "
               "tuner --replay FILE [--help]: a run on a recorded space. "
               "tuner wisdom [--help]: lists, exports, imports and forgets what earlier runs found. "
               "tuner verify [--help]: checks both passes on the CPU and on the GPU.",
        allow_abbrev=False)
    parser.add_argument("--shape", required=True, metavar="B,S,H,O", help="batch, sequence, hidden and output sizes: 4,4,8,16")
    parser.add_argument("--executor", choices=EXECUTORS, default="auto",
                        help="cuda: measure on the GPU; host: predict, validate on the CPU; auto: the GPU if there is one")
    parser.add_argument("--target", metavar="ARCH",
                        help=f"what to predict for without a GPU: {', '.join(TARGETS)} (default {TARGET})")
    parser.add_argument("--dtype", default="float32", help=f"data type of dy, x and dx: {', '.join(DTYPES)} (default float32)")
    parser.add_argument("--param-dtype", default="", metavar="DTYPE",
                        help="data type of gamma, beta, w and their gradients: that of --dtype (default); float32 goes with all")
    parser.add_argument("--accuracy", default="", metavar="CLASS",
                        help=f"what every kernel must meet: {', '.join(ACCURACIES)} (default: the class of --dtype)")
    parser.add_argument("--regime", choices=REGIMES, default="warm",
                        help="on a GPU, the times that decide: warm, of calls replayed back to back (default); cold, of single "
                             "calls that find nothing in the L2 cache")
    parser.add_argument("--eps", type=float, default=1e-5, help="eps of the LayerNorm (default 1e-5)")
    parser.add_argument("--deterministic", action="store_true", help="only kernels whose results are bitwise reproducible")
    parser.add_argument("--variants", type=parse_names, metavar="A,B", help=f"only these variants, of {', '.join(VARIANTS)}")
    parser.add_argument("--wants", type=parse_names, metavar="A,B", help=f"only these gradients, of {', '.join(GRADIENTS)}")
    parser.add_argument("--trials", type=int, metavar="N",
                        help=f"most candidates to try (default {TRIALS}; without a GPU the {SHORTLIST} best predicted)")
    parser.add_argument("--timeout", type=float, metavar="SECONDS",
                        help="how long all of it may take, from the command to the last file "
                             f"(default {TIMEOUT:.0f} on a GPU, without one no limit)")
    parser.add_argument("--seed", type=int, default=0, help="of the data and the search (default 0)")
    parser.add_argument("--out", type=parse_folder, metavar="DIR",
                        help="where to write (default reports/<device>/<shape>-<dtype>)")
    parser.add_argument("--resume", action="store_true",
                        help="go on with what an earlier run of the problem has left there, however it ended; its trials count")
    parser.add_argument("--storage", metavar="URL",
                        help="share the search with all who name the same postgresql://USER:PASSWORD@HOST/DATABASE, mysql://..., "
                             "sqlite:///FILE or journal:FILE; --trials is for all together")
    parser.add_argument("--gpus", type=parse_gpus, metavar="all|0,1", help="the GPUs to tune on, of one model (default 0)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _tune(options: argparse.Namespace, command: str, began: float) -> int:
    keep_compact()
    request = Request(
        Shape.parse(options.shape), options.dtype, options.eps, options.deterministic, options.variants, options.trials,
        options.timeout, options.seed, None if options.wants is None else frozenset(options.wants), command,
        param_dtype=options.param_dtype, accuracy=options.accuracy, regime=options.regime, ablation=True)
    request.problem()
    if options.storage is not None and options.resume:
        raise InputError("--resume is for a run alone; what was finished with --storage is in its study: leave one of them out")
    storage = None if options.storage is None else _open_storage(options.storage)
    where = {} if options.gpus is None else {"gpus": options.gpus}
    with ProgressBar(Console(stderr=True)) as bar:
        bar.stage("opening the device")
        with closing(open_isolated(options.executor, options.target or TARGET, **where)) as executor:
            if executor.measures and options.target is not None:
                _say(f"--target is ignored, since kernels are measured on {executor.device}; it is for --executor host")
            if options.gpus is not None and not executor.measures:
                _say("--gpus is ignored, since no GPU is used; it is for --executor cuda")
            if request.regime != "warm" and not executor.measures:
                _say("--regime is ignored, since times are predicted; it is for --executor cuda")
                request = replace(request, regime="warm")
            ran = _run(request, executor, options.out, options.resume, storage, bar, began)
    return _show(results_console(), ran)


def _open_storage(url: str) -> Storage:
    from tuner.study.storage import open_storage

    return open_storage(url)


def _joined(storage: Storage | None, run: TuningRun) -> tuple[str, ...]:
    if storage is None:
        return ()
    from tuner.study.together import join

    return join(storage, run.info, run.space)


@dataclass(frozen=True, slots=True)
class _Ran:
    """What there is to show of a run: its result, its files, whether the user ended it, and the schedule that it had."""

    result: TuneResult
    published: Published
    interrupted: bool
    schedule: Schedule


def _run(request: Request, executor: Executor | Workers, out: Path | None, resume: bool, storage: Storage | None,
         bar: ProgressBar, began: float) -> _Ran:
    bar.stage("listing the candidates")
    with _proofs(executor, request.seed) as proofs:
        run = TuningRun(request, executor, storage=storage, files=True, proofs=proofs, began=began)
        interrupted = False
        said = _joined(storage, run)  # before anything in the folder is changed
        where = out or _default_folder(executor, request)
        with Folder(where, run.info, run.space if resume else None, may_resume=storage is None) as folder:
            for sentence in filter(None, (folder.said, *said)):
                _say(sentence)
            run.take_up(folder.taken)
            run.on_record, run.on_event = folder.add, bar.show
            try:
                with terminated_as_interrupted():
                    run.execute()
            except KeyboardInterrupt:
                interrupted = True
            result = run.result()
            with _first_noted() as interrupts:
                if interrupted and result.winner is not None:
                    _say("interrupted; what was finished is being written, which takes a while (Ctrl-C twice ends that too)")
                choose = partial(choose_companion, executor, result, check=None if proofs is None else proofs.why_invalid)
                published = folder.finish(result, interrupted, choose, bar.stage, run.schedule.has_time_for_page)
    interrupted = interrupted or bool(interrupts)
    if request.variants is None and not interrupted:
        remember(result, say=_say)
    return _Ran(result, published, interrupted, run.schedule)


def _proofs(executor: Executor | Workers, seed: int) -> AbstractContextManager[Proofs | None]:
    return Proofs(executor, seed) if isinstance(executor, Workers) else nullcontext()


def _say(sentence: str) -> None:
    print(f"tuner: {sentence}", file=sys.stderr)


@contextmanager
def _first_noted() -> Iterator[list[int]]:
    """The first Ctrl-C in the block is only noted, in the list: what is being written becomes whole. The next one ends it."""
    noted: list[int] = []

    def note(signal_number: int, frame: object) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(signal_number)

    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield noted
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _default_folder(executor: Executor | Workers, request: Request) -> Path:
    """reports/<device>/<shape>-<dtype>, and what else sets the run apart from an ordinary one."""
    problem = request.problem()
    parts = [request.shape.slug, problem.dtype]
    if problem.param_dtype != problem.dtype:
        parts.append(f"param-{problem.param_dtype}")
    if problem.accuracy != OWN_CLASS[problem.dtype]:
        parts.append(problem.accuracy)
    if request.regime != "warm" and executor.measures:
        parts.append(request.regime)
    if request.deterministic:
        parts.append("deterministic")
    if problem.wants != ALL_GRADIENTS:
        parts += [name for name in GRADIENTS if name in problem.wants]
    return reports_folder() / executor.slug / "-".join(parts)


def _show(console: Console, ran: _Ran) -> int:
    """Shows what a run has left, and returns the exit status."""
    result, published, winner = ran.result, ran.published, ran.result.winner
    if winner is not None:
        console.print(best_table(result))
        console.print(error_table(result, winner))
        console.print(f"winner: {winner.config}", markup=False, soft_wrap=True)
        console.print(f"{time_text(winner)}; the floor is {result.floor_us:.2f} us, {share_of_floor(result, winner):.0%} of that")
    console.print("written: " + ", ".join(str(path) for path in published.written), markup=False, soft_wrap=True)
    for sentence in filter(None, (published.kept, published.no_page, ran.schedule.took_text())):
        console.print(sentence, markup=False, soft_wrap=True)
    if result.lost is not None:
        _say(f"{result.lost}; what was finished is written")
    if ran.interrupted:
        _say("interrupted; what was finished is written")
        return INTERRUPTED
    if winner is None:
        _say(why_no_winner(result))
        return FAILED
    return OK
