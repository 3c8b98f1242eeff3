"""The command line of the reports: `python -m reports DIR...`, `python -m reports index` and `python -m reports pictures`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tuner.arguments import FAILED, OK, Parser, exit_status
from tuner.bench.sheet import JSON as BENCH_JSON
from tuner.errors import InputError, why
from tuner.known import reports_folder
from tuner.publish import TRIALS
from tuner.records import write_text

COMPARISON = "comparison.html"
TOLERANCE_PERCENT = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status.

    0: what was asked for is written. 1: a run is slower than the first of its kind, or a page cannot be written. 2: the arguments
    make no sense.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = COMMANDS[given.pop(0)] if given[:1] and given[0] in COMMANDS else _runs
    try:
        return exit_status("reports", lambda: command(given), interrupted="interrupted; no page is half-written")
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "pygments"):
            raise
        print(f"reports: {error.name} is not installed; pip install {error.name}", file=sys.stderr)
        return FAILED


def _runs(given: Sequence[str]) -> int:
    parser = Parser(prog="reports", allow_abbrev=False, description="Builds report.html of a tuning run, or compares several.",
                    epilog="reports index [--help]: one page over all published results of a GPU. reports pictures [--help]: "
                           "pictures of them, and a text's tables.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a folder that python -m tuner has written")
    parser.add_argument("--tolerance", type=_percent, default=TOLERANCE_PERCENT, metavar="PERCENT",
                        help="with several: how much longer than in the first run of a problem on a device a measured time may "
                             f"be (default {TOLERANCE_PERCENT:g})")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"with several: the page to write (default {COMPARISON})")
    options = parser.parse_args(given)
    if len(options.folders) == 1:
        if options.out is not None:
            raise InputError("--out is for a comparison; the page of one run is written into its folder")
        from reports.build import build

        print(f"written: {build(options.folders[0], _say)}")
        return OK
    from reports.compare import changes, compare_page
    from reports.run import read_run

    runs = [read_run(folder, _say) for folder in options.folders]
    tolerance, page = options.tolerance / 100, options.out or Path(COMPARISON)
    found = changes(runs, tolerance)
    write_text(page, compare_page(runs, found, tolerance))
    print(f"written: {page}")
    for change in found:
        if change.regressed:
            print(f"reports: regression: {change.sentence}", file=sys.stderr)
        else:
            print(change.sentence)
    return FAILED if any(change.regressed for change in found) else OK


def _index(given: Sequence[str]) -> int:
    options = _rooted("reports index", "One page over all results of a GPU.").parse_args(given)
    from reports.index import build_index

    root = options.root or _only_folder(BENCH_JSON, f"*/{TRIALS}")
    print(f"written: {build_index(root, _say)}")
    return OK


def _pictures(given: Sequence[str]) -> int:
    parser = _rooted("reports pictures", "Draws a GPU's published results as SVG files beside them.")
    parser.add_argument("--into", type=Path, metavar="FILE", help="also rewrite the parts of this text that are made of them")
    options = parser.parse_args(given)
    from reports.readme import rewritten, write_pictures

    root, text = options.root or _only_folder(BENCH_JSON), None
    if options.into is not None:  # whatever is wrong with it is said before anything is written
        text = rewritten(_text(options.into), root, _link(root, options.into))
    written = write_pictures(root)
    if text is not None:
        write_text(options.into, text)
        written.append(options.into)
    print("written: " + ", ".join(str(path) for path in written))
    return OK


def _say(sentence: str) -> None:
    print(f"reports: {sentence}", file=sys.stderr)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({why(error)}); name a text with --into") from error


def _link(root: Path, text: Path) -> str:
    """The folder as links in the text name it."""
    return Path(os.path.relpath(root, text.parent)).as_posix()


def _rooted(prog: str, description: str) -> Parser:
    """A command about all results of a GPU."""
    parser = Parser(prog=prog, allow_abbrev=False, description=description)
    parser.add_argument("--root", type=Path, metavar="DIR", help="the folder with bench.json and the folders of tuning runs "
                        f"(default: the one that there is in {reports_folder()})")
    return parser


def _only_folder(*patterns: str) -> Path:
    """The folder of results in the current folder's `reports`, or in $LNL_REPORTS: with a file of one of these patterns.

    Raises:
        InputError: there is none, or more than one.
    """
    root = reports_folder()
    found = sorted(path for path in root.glob("*") if any(any(path.glob(pattern)) for pattern in patterns))
    if not found:
        raise InputError(f"there are no results in {root}; name the folder of a GPU's with --root")
    if len(found) > 1:
        raise InputError(f"there are results in {' and '.join(map(str, found))}; name one of them with --root")
    return found[0]


COMMANDS = {"index": _index, "pictures": _pictures}


def _percent(text: str) -> float:
    """Raises ArgumentTypeError: it is no percentage from 0."""
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage such as 5")
    return value
