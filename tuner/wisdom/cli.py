"""The command line of wisdom: `python -m tuner wisdom list|export|import|forget`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from codegen.dtypes import ACCURACIES, DTYPES, dtype_words
from codegen.problem import ALL_GRADIENTS
from tuner.arguments import FAILED, OK, Parser, exit_status
from tuner.console import results_console
from tuner.errors import InputError
from tuner.wisdom.book import OFF, Book
from tuner.wisdom.points import PREDICTED, REGIMES, Entry, Key, Point
from tuner.wisdom.source import is_current
from tuner.wisdom.transfer import as_text, gather, save

CURRENT, OTHER = "current", "other"
"""Sources of a kernel: today's, or any others, whose times are not trusted."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command line, given what follows `wisdom`, and returns the exit status.

    0: done, also where nothing was there to be done. 1: a file cannot be written. 2: the arguments or the files given make no
    sense.
    """
    options = _parser().parse_args(arguments)
    return exit_status("wisdom", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    try:
        _COMMANDS[options.command](Book(say=_say), options)
    except OSError as error:
        if error.filename is None:  # no file's: the console's
            raise
        print(f"wisdom: {error.filename} cannot be written ({error.strerror or error}); choose another folder with --out or "
              "LNL_WISDOM", file=sys.stderr)
        return FAILED
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="wisdom", allow_abbrev=False, description=(
        "What tuning runs found, kept for tuner.backward and for later runs. LNL_WISDOM is the folder it is kept in; off: "
        "nothing is kept or used."))
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|export|import|forget")
    which = Parser(add_help=False)
    which.add_argument("--gpu", metavar="TEXT", help="only of GPUs whose name has this in it")
    which.add_argument("--size", type=_size, metavar="H,O", help="only for these sizes")
    which.add_argument("--dtype", choices=DTYPES, help="only for this data type of dy, x and dx")
    which.add_argument("--accuracy", choices=ACCURACIES, help="only for this class")
    which.add_argument("--regime", choices=REGIMES, help="only times that came about so")
    which.add_argument("--sources", choices=(CURRENT, OTHER),
                       help="only kernels that this program still makes as they were, or only the others, which are not trusted")
    commands.add_parser("list", parents=[which], allow_abbrev=False, help="show what is known, own and shipped with the package")
    export = commands.add_parser("export", parents=[which], allow_abbrev=False, help="write it as JSON")
    export.add_argument("paths", nargs="*", type=Path, metavar="FILE|DIR",
                        help="best.json, bench.json, exports, or folders of them, instead of what is kept on this machine")
    export.add_argument("--out", type=Path, metavar="FILE.json|DIR",
                        help="one file, or a folder with one for each problem, as the package ships them (default: the console)")
    _add_trust(export)
    take = commands.add_parser("import", allow_abbrev=False, help="add what files hold to what is kept on this machine")
    take.add_argument("paths", nargs="+", type=Path, metavar="FILE|DIR",
                      help="best.json, bench.json, exports, or folders of them")
    _add_trust(take)
    forget = commands.add_parser("forget", parents=[which], allow_abbrev=False, help="drop what is kept on this machine")
    forget.add_argument("--all", action="store_true", help="all of it")
    return parser


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust", action="store_true", help=(
        "take kernels of results that do not say their sources for those that this program makes today; without it such results "
        "only tell tuning runs where to begin"))


def _size(text: str) -> tuple[int, int]:
    parts = text.replace("x", ",").split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"sizes are two whole numbers H,O such as 8,16, not {text!r}")
    return int(parts[0]), int(parts[1])


def _list(book: Book, options: argparse.Namespace) -> None:
    console = results_console()
    if book.root is None:
        console.print(f"wisdom is off: LNL_WISDOM is {OFF}", soft_wrap=True)
        return
    own, shipped = _chosen(book.own(), options), _chosen(book.shipped(), options)
    keys = sorted({entry.key for entry in (*own, *shipped)})
    for key in keys:
        console.print(_table(key, [(where, point) for where, entries in (("own", own), ("shipped", shipped))
                                   for entry in entries if entry.key == key for point in entry.points]))
    points = sum(len(entry.points) for entry in (*own, *shipped))
    console.print(f"{_count(points, 'point')} for {_count(len(keys), 'problem')}; own ones lie in {book.root}", markup=False,
                  highlight=False, soft_wrap=True)


def _table(key: Key, points: Iterable[tuple[str, Point]]) -> Table:
    wants = "all gradients" if key.problem(1).wants == ALL_GRADIENTS else key.wants
    parts = [key.gpu, f"H {key.hidden}, O {key.out}", dtype_words(key.dtype, key.param_dtype), f"class {key.accuracy}", wants]
    kind = PREDICTED if key.regime == PREDICTED else f"measured {key.regime}"
    table = Table(title=Text(", ".join([*parts, *["deterministic"] * key.deterministic])), title_justify="left")
    table.add_column("rows", justify="right")
    table.add_column(f"us, {kind}", justify="right")
    table.add_column("config")
    for name in ("sources", "from", "date"):
        table.add_column(name)
    for where, point in sorted(points, key=lambda pair: (pair[1].rows, pair[1].us)):
        sources = CURRENT if is_current(key, point) else OTHER
        config = point.config.replace(":", " ").replace(",", " ")
        table.add_row(*map(Text, (str(point.rows), f"{point.us:.2f}", config, sources, where, point.date[:10])))
    return table


def _export(book: Book, options: argparse.Namespace) -> None:
    entries = _chosen(gather(options.paths, options.trust) if options.paths else book.own(), options)
    if not entries:
        raise InputError("there is nothing to export; tune or import first, or ask for less")
    if options.out is None:
        print(as_text(entries), end="")
    else:
        save(entries, options.out)
        print(f"{_counts(entries)} written to {options.out}")


def _import(book: Book, options: argparse.Namespace) -> None:
    if book.root is None:
        raise InputError(f"nothing can be imported while LNL_WISDOM is {OFF}; set it to a folder, or unset it")
    entries = gather(options.paths, options.trust)
    for entry in entries:
        book.add(entry.key, entry.points)
    print(f"{_counts(entries)} imported")
    unsure = sum(not is_current(entry.key, point) for entry in entries for point in entry.points)
    if unsure:
        print(f"{unsure} of them only to begin searches with, as their kernels' sources are others than today's or not known")


def _forget(book: Book, options: argparse.Namespace) -> None:
    given = [name for name in _FILTERS if getattr(options, name) is not None]
    if options.all == bool(given) or options.gpu == "":
        raise InputError(f"say what to forget: either some, with {', '.join('--' + name for name in _FILTERS)}, or --all of it")
    count = book.forget(lambda key, point: _is_chosen(key, point, options))
    print(f"{_count(count, 'point')} forgotten")


def _chosen(entries: Iterable[Entry], options: argparse.Namespace) -> list[Entry]:
    """What the filters leave."""
    left = [Entry(entry.key, tuple(point for point in entry.points if _is_chosen(entry.key, point, options)))
            for entry in entries]
    return [entry for entry in left if entry.points]


def _is_chosen(key: Key, point: Point, options: argparse.Namespace) -> bool:
    return ((options.gpu is None or options.gpu.lower() in key.gpu.lower())
            and options.size in (None, (key.hidden, key.out))
            and options.dtype in (None, key.dtype)
            and options.accuracy in (None, key.accuracy)
            and options.regime in (None, key.regime)
            and (options.sources is None or (options.sources == CURRENT) == is_current(key, point)))


def _counts(entries: Sequence[Entry]) -> str:
    points = sum(len(entry.points) for entry in entries)
    return f"{_count(points, 'point')} for {_count(len(entries), 'problem')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _say(sentence: str) -> None:
    print(f"wisdom: {sentence}", file=sys.stderr)


_FILTERS = ("gpu", "size", "dtype", "accuracy", "regime", "sources")
_COMMANDS = {"list": _list, "export": _export, "import": _import, "forget": _forget}
