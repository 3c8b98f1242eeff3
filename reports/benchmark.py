"""What is read of a benchmark: bench.json, if its figures are figures."""

from __future__ import annotations

import math
from pathlib import Path

from tuner.bench.measure import Spread
from tuner.bench.results import Entry, Results, Row
from tuner.bench.sheet import read_results
from tuner.errors import InputError
from tuner.records import LONGEST_US


def read_benchmark(path: Path) -> Results | None:
    """The results in a file; None where there is none.

    Raises:
        InputError: it is no result of this program's version, or damaged.
    """
    advice = "move it away, or run python -m tuner bench again"
    try:
        results = read_results(path)
    except (InputError, RecursionError) as error:
        raise InputError(f"{path} is no benchmark of this program; {advice}") from error
    if results is not None and not results.rows:
        raise InputError(f"{path} has no row; {advice}")
    if results is not None and not all(_is_sound(row, len(results.parts)) for row in results.rows):
        raise InputError(f"{path} has a row with a figure or a text missing; {advice}")
    if results is not None and not all(
            _is_time(part.rates.copy_tbps) and _is_time(part.rates.launch_us) and (
                part.rates.matrix_tflops is None or _is_time(part.rates.matrix_tflops)) and isinstance(part.versions, dict)
            and isinstance(part.device, str) for part in results.parts):
        raise InputError(f"{path} does not say under what it was measured; {advice}")
    return results


def _is_sound(row: Row, parts: int) -> bool:
    entries = (row.ours, *row.peers.values())
    floors = [row.floor.bytes_us, row.floor.launch_us, *(() if row.floor.matrix_us is None else (row.floor.matrix_us,))]
    texts = (row.config, row.reason)
    return (all(map(_is_time, floors)) and all(map(_is_spread, (spread for one in entries for spread in (one.warm, one.cold))))
            and all(isinstance(text, str | None) for text in texts) and isinstance(row.case.name, str)
            and all(map(_has_errors, entries)) and isinstance(row.part, int) and 0 <= row.part < parts)


def _is_spread(spread: Spread | None) -> bool:
    return spread is None or (_is_time(spread.median) and isinstance(spread.noise, int | float) and 0 <= spread.noise < math.inf)


def _has_errors(entry: Entry) -> bool:
    """NaN stands for those that were not finite."""
    return isinstance(entry.errors, dict) and all(isinstance(error, int | float) for error in entry.errors.values())


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < LONGEST_US
