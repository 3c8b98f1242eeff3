"""How results are put into words, on the console and in the report alike."""

from __future__ import annotations

from collections.abc import Sequence

from codegen.dtypes import OWN_CLASS, dtype_words
from tuner.outcome import TuneResult
from tuner.records import Record, RunInfo


def time_text(record: Record) -> str:
    """A record's time for people, never without saying what it is: "2.31 us measured"."""
    return f"{record.best_us:.2f} us {record.time_kind}"


def gpu_name(result: TuneResult) -> str:
    """The GPU the times belong to."""
    return result.info.device if result.info.measures else result.limits.name


def gpu_text(result: TuneResult) -> str:
    """The GPU the times belong to, and whether it was there."""
    return gpu_name(result) if result.info.measures else (
        f"{gpu_name(result)} ({result.info.target}), predicted without the GPU")


def problem_text(info: RunInfo) -> str:
    """What was asked for: shape, data types, and the accuracy class where it is not that of the data."""
    text = f"{info.shape}, {dtype_words(info.dtype, info.param_dtype)}"
    return text if info.accuracy == OWN_CLASS[info.dtype] else f"{text}, accuracy class {info.accuracy}"


def share_of_floor(result: TuneResult, record: Record) -> float:
    """The floor as a share of the record's time: 1 would be as fast as the memory or the launch allows."""
    return result.floor_us / record.best_us


def rows_text(record: Record) -> str:
    """The row counts a record was validated at: "at 1, 61 and 64 rows, and by the gate, on other data, at 13 and 33"."""
    searched = f"at {_listed(record.rows)} rows"
    return f"{searched}, and by the gate, on other data, at {_listed(record.gate_rows)}" if record.gate_rows else searched


def _listed(numbers: Sequence[int]) -> str:
    texts = [str(number) for number in numbers]
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1]))) if texts else "no"


def capitalised(clause: str) -> str:
    """The clause with a capital letter at its beginning."""
    return clause[:1].upper() + clause[1:]
