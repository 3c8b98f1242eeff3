"""The parts of a text, such as README.md, that are written from published results, so that no number in them is typed by hand.

A part stands between two comments, which stay:

    <!-- published: NAME -->
    ...
    <!-- end of published -->

`PARTS` has the names. All of them read one folder: a GPU's bench.json, and below it rows/bench.json, a benchmark over row
counts, and the folders of tuning runs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from codegen.dtypes import CLASS_ERRORS, OWN_CLASS
from codegen.variants import UNTRIED, UNTRIED_VALUES, VARIANTS
from reports.pictures import kind_of, over_rows, ratios
from reports.run import BEST_CU
from reports.words import LEVEL, plain, without_place
from tuner.bench.results import Entry, Results, Row, Standing
from tuner.bench.sheet import JSON as BENCH_JSON
from tuner.bench.sheet import read_results
from tuner.errors import InputError
from tuner.records import write_text

ROWS = "rows"
"""The folder of the benchmark over row counts."""

RATIOS_SVG, ROWS_SVG = "ratios.svg", "rows.svg"

ROWS_COMMAND = ("python -m tuner bench --tune --tune-seconds 10 --samples 12 --shapes "
                + ",".join(f"1x{4 ** power}x768x2304" for power in range(9)))
"""What measures the benchmark over row counts, but for where to write it."""

BEGIN = re.compile(r"<!-- published: (\w+)(?: (\S+))? -->\n")
END = "<!-- end of published -->\n"
NOTHING = "–"

OTHERWISE: tuple[Standing, ...] = ("level", "slower")
"""How ours may stand where it is not faster."""


def write_pictures(root: Path) -> list[Path]:
    """Draws the pictures of a GPU's results beside them.

    Raises:
        InputError: there are no results.
        OSError: the folder cannot be written.
    """
    written, results = [root / RATIOS_SVG], _results(root)
    write_text(written[0], ratios(results.rows, results.parts[0].device))
    over = _read(root / ROWS / BENCH_JSON)
    if over is not None:
        written.append(root / ROWS_SVG)
        write_text(written[1], over_rows(over.rows, over.parts[0].device))
    return written


def rewritten(text: str, root: Path, folder: str) -> str:
    """The text with every part as the results in `root` have it.

    Args:
        folder: that of the results as links in the text name it.

    Raises:
        InputError: there are no results, a part has a name that is none, or an end is missing.
    """
    pieces, at = [], 0
    for begin in BEGIN.finditer(text):
        end = text.find(END, begin.end())
        if end < 0:
            raise InputError(f"no line {END.strip()!r} follows {begin[0].strip()!r}; add it")
        if begin[1] not in PARTS:
            raise InputError(f"there is no part {begin[1]!r}; choose from {', '.join(PARTS)}")
        pieces += [text[at:begin.end()], PARTS[begin[1]](root, folder, begin[2] or "").strip("\n"), "\n"]
        at = end
    return "".join([*pieces, text[at:]])


def _results(root: Path) -> Results:
    found = _read(root / BENCH_JSON)
    if found is None or not found.rows:
        raise InputError(f"there is no {BENCH_JSON} in {root}; name a folder of results with --root")
    return found


def _read(path: Path) -> Results | None:
    """A benchmark; None where there is none."""
    try:
        return read_results(path)
    except InputError as error:
        raise InputError(f"{path} is no benchmark of this program; put it right, or measure it again") from error


def _of_kind(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows with a time of ours, by data type and class."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.ours.warm is not None:
            found.setdefault(kind_of(row), []).append(row)
    return found


def _headline(root: Path, folder: str, which: str) -> str:
    """How much faster than PyTorch, data type by data type, with the picture."""
    results = _results(root)
    clauses = [_standings(kind, rows) for kind, rows in _of_kind(results.rows).items()]
    sentence = (f"On one {results.parts[0].device} the kernels are faster than both PyTorch's autograd and torch.compile "
                f"{', and '.join(filter(None, clauses))}.")
    return f"![{sentence}]({folder}/{RATIOS_SVG})\n\n{sentence}"


def _standings(kind: str, rows: Sequence[Row]) -> str:
    """Of one data type: on how many shapes ours is faster, level and slower; empty where there is nothing beside it."""
    found = sorted(row.ratio for row in rows if row.ratio is not None)
    if not found:
        return ""
    counts = Counter(row.standing for row in rows)
    others = " and ".join(f"{standing} on {counts[standing]}" for standing in OTHERWISE if counts[standing])
    return (f"in {kind} on {counts['faster']} of {len(found)} shapes{f', {others}' if others else ''} "
            f"({found[0]:.2f} to {found[-1]:.2f} times as fast)")


def _setting(root: Path, folder: str, which: str) -> str:
    """What the results were measured with, as a sentence."""
    parts = _results(root).parts
    versions = parts[0].versions
    named = [f"{label} {versions[name]}" for label, name in (("driver", "driver"), ("nvcc", "nvcc"), ("PyTorch", "PyTorch"))
             if name in versions]
    dates = list(dict.fromkeys(part.date[:10] for part in (parts[0], parts[-1])))
    return f"One {parts[0].device}, {', '.join(named)}; {' to '.join(dates)}, revision {parts[0].version}."


def _tables(root: Path, folder: str, which: str) -> str:
    """A table for each data type and class."""
    lines = []
    for rows in _of_kind(_results(root).rows).values():
        problem = rows[0].case.problem
        lines += ["", f"{problem.dtype}, class {problem.accuracy}:", "",
                  "| shape | B,S,H,O | ours, us | autograd | compile | gemms | times as fast | floor / ours | error | "
                  "autograd's error | winner |", "|" + "---|" * 11]
        for row in rows:
            peers = [_warm(row.peers.get(name)) for name in ("eager", "compile", "gemms")]
            errors = [_error(row.ours), _error(row.peers.get("eager"))]
            ratio = NOTHING if row.ratio is None else f"{row.ratio:.2f}" + " (level)" * (row.standing == "level")
            winner = (row.config or "").partition(":")[0]
            lines.append("| " + " | ".join([
                row.case.name, str(row.case.shape), _warm(row.ours), *peers, ratio, f"{row.share or 0:.0%}", *errors,
                f"`{winner}`"]) + " |")
    return "\n".join(lines)


def _honest(root: Path, folder: str, which: str) -> str:
    """Where PyTorch, or its two products alone, are faster, how exact the kernels are, and what was not measured."""
    results = _results(root)
    rows = [row for group in _of_kind(results.rows).values() for row in group]
    level, slower = (_by_kind((kind_of(row), f"`{row.case.name}` ({row.ratio:.2f})") for row in rows if row.standing == standing)
                     for standing in OTHERWISE)
    behind = _by_kind((kind_of(row), f"`{row.case.name}`") for row in rows if _products_faster(row))
    exact = [row.ours.worst_error or 0.0 for row in rows if row.case.problem.accuracy == "fp32"]
    compared = [row for row in rows if "eager" in row.peers and row.peers["eager"].worst_error and row.ours.worst_error]
    better = sum((row.ours.worst_error or 0.0) <= (row.peers["eager"].worst_error or 0.0) for row in compared)
    lines = [f"* PyTorch is faster {slower}." if slower else "* PyTorch is faster at none of these shapes.",
             *([f"* Level with PyTorch {level}: {LEVEL}."] if level else []),
             f"* Its two matrix products alone, which compute less, take less time {behind}." if behind else
             "* Its two matrix products alone, which compute less, take longer at every one of these shapes."]
    if exact:
        worst = math.ceil(1e8 * max(exact)) / 1e8
        lines.append(f"* In class fp32 no gradient's error is above {worst:.1e}; it may be {CLASS_ERRORS['fp32']:g}.")
    lines.append(f"* The largest error of the five gradients is at most autograd's in {better} of {len(compared)} rows.")
    unfinished = [row.case.title for row in results.rows if row.ours.warm is None]
    if missing := _by_kind(map(_parted, [*unfinished, *results.missing])):
        lines.append(f"* Nothing is known {missing}: the run did not come to it, or found no kernel.")
    return "\n".join(lines)


def _over_rows(root: Path, folder: str, which: str) -> str:
    """The picture over row counts, or how to measure it."""
    command = f"{ROWS_COMMAND} --out {folder}/{ROWS}"
    results = _read(root / ROWS / BENCH_JSON)
    if results is None:
        return f"Not measured yet; this does it:\n\n    {command}"
    return (f"![Microseconds a call over the number of rows, beside PyTorch]({folder}/{ROWS_SVG})\n\n"
            f"Each point is tuned for its own number of rows. {_slower_rows(results.rows)} Measured on one "
            f"{results.parts[0].device} by\n\n    "
            + "\n    ".join(without_place(part.command) for part in results.parts))


def _slower_rows(rows: Sequence[Row]) -> str:
    """At which numbers of rows PyTorch is faster."""
    found = _by_kind((f"{kind_of(row)} with H = {row.case.shape.hidden}, O = {row.case.shape.out}",
                      f"{row.case.shape.rows} rows ({row.ratio:.2f})") for row in rows if row.standing == "slower")
    return f"PyTorch is faster {found}." if found else "PyTorch is faster at none of them."


def _banner(root: Path, folder: str, which: str) -> str:
    """How a published best.cu opens, up to the line that is about its making."""
    path = root / which / BEST_CU
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); name a folder of {root} in the part") from error
    last = next((number for number, line in enumerate(lines) if line.startswith("// Made by")), 0)
    return "\n".join(["```cpp", *lines[:last + 1], "```"])


def _variants(root: Path, folder: str, which: str) -> str:
    """The variants that there are, as they describe themselves, and which of them no GPU has run."""
    lines = ["| variant | what it does, and what it changes over the simpler ones |", "|---|---|"]
    lines += [f"| `{name}` | {variant.summary.removeprefix(f'{name}: ')} |" for name, variant in VARIANTS.items()]
    untried = []
    if names := [f"`{name}`" for name in VARIANTS if name in UNTRIED]:
        untried.append(f"{_listed(names)}, which take part only where `--variants` names them")
    owners: dict[str, list[str]] = {}
    for (name, parameter), values in UNTRIED_VALUES.items():
        for value in values:
            owners.setdefault(f"`{parameter}={value}`", []).append(f"`{name}`")
    untried += [f"{value} of {_listed(of)}, which no search takes" for value, of in owners.items()]
    if untried:
        lines += ["", "Not run on a GPU yet:", "", *(f"* {text}" for text in untried)]
    return "\n".join(lines)


def _products_faster(row: Row) -> bool:
    gemms = row.peers.get("gemms")
    return gemms is not None and gemms.warm is not None and row.ours.warm is not None and (
        gemms.warm.median < row.ours.warm.median)


def _parted(title: str) -> tuple[str, str]:
    """The kind and the name that a row's title has, "gpt2 float32, class fp32"."""
    name, _, kind = title.partition(" ")
    dtype, _, accuracy = kind.partition(", class ")
    return dtype if OWN_CLASS.get(dtype) == accuracy else kind, f"`{name}`"


def _by_kind(named: Iterable[tuple[str, str]]) -> str:
    """Names of rows with their kinds as words: "in float32 at `a` and `b`, and in bfloat16 at `c`"; empty where there is none."""
    kinds: dict[str, list[str]] = {}
    for kind, name in named:
        kinds.setdefault(kind, []).append(name)
    return ", and ".join(f"in {kind} at {_listed(names)}" for kind, names in kinds.items())


def _listed(texts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def _warm(entry: Entry | None) -> str:
    return NOTHING if entry is None or entry.warm is None else plain(entry.warm.median)


def _error(entry: Entry | None) -> str:
    return NOTHING if entry is None or entry.worst_error is None else f"{entry.worst_error:.1e}"


PARTS: dict[str, Callable[[Path, str, str], str]] = {
    "headline": _headline, "setting": _setting, "tables": _tables, "honest": _honest, "rows": _over_rows, "banner": _banner,
    "variants": _variants}
"""Writes a part, of the folder of results, what links call it, and the word behind the part's name."""
