"""The rows for programs and for people: the text of bench.json and bench.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from codegen.dtypes import CLASS_ERRORS
from codegen.problem import GRADIENTS
from tuner.bench.results import Entry, Results, Row, Setting
from tuner.timing.measure import FLUSH_L2S, MIN_SAMPLE_US

NOTHING = "–"


def bench_json(results: Results) -> str:
    """All that was measured."""
    return json.dumps(results.as_json(), indent=1, allow_nan=False) + "\n"


def bench_markdown(results: Results) -> str:
    """The same as a page; where rows are missing, it says so."""
    first, rows = results.parts[0], results.rows
    dates = list(dict.fromkeys((first.date, results.parts[-1].date)))
    lines = [
        f"# LayerNorm+Linear backward beside PyTorch, {first.device}", "",
        f"{' to '.join(dates)}; sources {first.version}; "
        + ", ".join(f"{name} {version}" for name, version in first.versions.items()) + ".", "",
        *(f"    {part.command}" for part in results.parts), ""]
    if missing := results.missing:
        lines += [f"**{len(rows)} of {len(rows) + len(missing)} rows are finished.** Missing: {'; '.join(missing)}.", ""]
    lines += _method(results.parts)
    for (dtype, accuracy), group in groupby(rows, lambda row: (row.case.problem.dtype, row.case.problem.accuracy)):
        lines += _section(f"{dtype}, class {accuracy}", accuracy, list(group), first.peers)
    return "\n".join(lines)


def _method(parts: Sequence[Setting]) -> list[str]:
    setting = parts[0]
    matrix_rates = [part.rates.matrix_tflops for part in parts if part.rates.matrix_tflops is not None]
    matrix = (f"{_range(matrix_rates, 0)} TFLOP/s in a bfloat16 matrix product" if matrix_rates
              else "no rate of matrix products, since there was no PyTorch to measure it")
    copy, launch = _range([part.rates.copy_tbps for part in parts], 2), _range([part.rates.launch_us for part in parts], 2)
    lines = [
        "Times are microseconds of the backward pass alone, all five gradients: the median of two measurements of up to "
        f"{setting.samples} samples each, taken in turns. *Warm*: calls replayed back to back from a CUDA graph of as many as "
        f"last {MIN_SAMPLE_US:.0f} us, ours and the peers' alike. *Cold*: one call replayed from a graph after a buffer of "
        f"{FLUSH_L2S} times the L2 cache was written. In brackets the distance between the quartiles; *noise* is how far the two "
        "measurements' medians lie apart.", "",
        "*ours* is the tuned kernel, *eager* PyTorch's autograd through `layer_norm` and `linear`, *compile* the same under "
        "`torch.compile`, *gemms* the two matrix products alone. The best peer is the faster of *eager* and *compile*. PyTorch "
        "uses tf32 for float32 data in every class but fp32.", "",
        f"Floors, from rates measured in this process: the tensors at the rate of a copy ({copy} TB/s, read plus "
        f"written), the 4·M·H·O operations at that of bfloat16 products ({matrix}), one launch ({launch} us). "
        "float32 accuracy takes three such products or more, so in class fp32 the second stays out of reach.", "",
        "Errors are relative Frobenius errors against float64 on the timed data, the largest of the five gradients; a † marks "
        f"those of the validator's data. Seed {setting.seed}.", ""]
    if setting.absent is not None:
        lines += [f"**No peers: {setting.absent}.**", ""]
    return lines


def _section(title: str, accuracy: str, rows: Sequence[Row], peers: Sequence[str]) -> list[str]:
    named = [(name, lambda row, name=name: _warm(row.peers.get(name))) for name in peers]
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("shape", lambda row: row.case.name), ("B,S,H,O", lambda row: str(row.case.shape)),
        ("ours", lambda row: _warm(row.ours, spread=True)), ("best peer", lambda row: row.best_peer or NOTHING),
        ("times as fast", lambda row: NOTHING if row.ratio is None else f"{row.ratio:.2f}"), *named,
        ("floor: bytes", lambda row: _us(row.floor.bytes_us)),
        ("floor: products", lambda row: NOTHING if row.floor.matrix_us is None else _us(row.floor.matrix_us)),
        ("floor / ours", lambda row: NOTHING if row.share is None else f"{row.share:.0%}"),
        ("error: ours", lambda row: _error(row.ours.worst_error) + "†" * (row.judge == "validation")),
        ("error: eager", lambda row: _error(row.peers["eager"].worst_error if "eager" in row.peers else None))]
    lines = [f"## {title}", "", f"Warm; the class allows an error of {CLASS_ERRORS[accuracy]:g}.", "", *_table(columns, rows), ""]
    lines += _notes(rows)
    lines += ["Cold:", "", *_table(_details(peers, cold=True), rows), ""]
    lines += ["Noise of the warm times, and how many samples of ours there are:", "",
              *_table(_details(peers, cold=False), rows), ""]
    return lines + _gaps(rows) + _errors(rows) + _configs(rows)


def _details(peers: Sequence[str], cold: bool) -> list[tuple[str, Callable[[Row], str]]]:
    """Columns for one number a contestant."""
    show = _cold if cold else _noise
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("shape", lambda row: row.case.name), ("ours", lambda row: show(row.ours))]
    columns += [(name, lambda row, name=name: show(row.peers.get(name))) for name in peers]  # type: ignore[misc]
    if not cold:
        columns.append(("samples", lambda row: NOTHING if row.ours.warm is None else str(row.ours.warm.samples)))
    return columns


def _notes(rows: Iterable[Row]) -> list[str]:
    """Why something is missing in the table."""
    lines = []
    for row in rows:
        if row.reason is not None:
            lines.append(f"* {row.case.name}: {row.reason}")
        lines += [f"* {row.case.name}, {name}: {entry.note}" for name, entry in row.peers.items() if entry.note is not None]
    return [*lines, ""] if lines else []


def _gaps(rows: Iterable[Row]) -> list[str]:
    lines = [f"* {row.case.name}: {row.gap}" for row in rows if row.gap]
    return ["The largest known part of what lies between the floor and ours:", "", *lines, ""] if lines else []


def _errors(rows: Sequence[Row]) -> list[str]:
    lines = [f"| error of | shape | {' | '.join(GRADIENTS)} |", "|---|---|" + "---|" * len(GRADIENTS)]
    for row in rows:
        for name, entry in (("ours", row.ours), *row.peers.items()):
            if entry.errors:
                values = " | ".join(_error(entry.errors.get(gradient)) for gradient in GRADIENTS)
                lines.append(f"| {name} | {row.case.name} | {values} |")
    return ["Errors of each gradient:", "", *lines, ""] if len(lines) > 2 else []


def _configs(rows: Sequence[Row]) -> list[str]:
    lines = [f"* {row.case.name} ({row.origin}): `{row.config}`" for row in rows if row.config is not None]
    return ["Configs, each validated in this run:", "", *lines, ""] if lines else []


def _table(columns: Sequence[tuple[str, Callable[[Row], str]]], rows: Iterable[Row]) -> list[str]:
    lines = ["| " + " | ".join(name for name, _ in columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(show(row) for _, show in columns) + " |" for row in rows]


def _range(values: Sequence[float], digits: int) -> str:
    """The values of all parts: one, or the least and the largest."""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def _us(value: float) -> str:
    """Four digits: enough for any noise, and no false ones."""
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _warm(entry: Entry | None, spread: bool = False) -> str:
    if entry is None or entry.warm is None:
        return NOTHING
    return _us(entry.warm.median) + f" ({_us(entry.warm.iqr)})" * spread


def _cold(entry: Entry | None) -> str:
    return NOTHING if entry is None or entry.cold is None else f"{_us(entry.cold.median)} ({_us(entry.cold.iqr)})"


def _noise(entry: Entry | None) -> str:
    return NOTHING if entry is None or entry.warm is None else f"{entry.warm.noise:.1%}"


def _error(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1e}"


def row_text(row: Row) -> str:
    """One row in one line, for the console."""
    title = f"{row.case.title}: "
    if row.ours.warm is None:
        return title + (row.reason or "not measured")
    text = title + f"{_us(row.ours.warm.median)} us"
    if row.best_peer is not None:
        text += f", {row.best_peer} {_warm(row.peers[row.best_peer])} us, {row.ratio:.2f} times as fast"
    return text + f", error {_error(row.ours.worst_error)} ({row.config})"


def incomplete(rows: Sequence[Row]) -> str | None:
    """A sentence where kernels of ours are missing; None where all were measured."""
    missing: Mapping[str, str | None] = {row.case.title: row.reason for row in rows if row.ours.warm is None}
    if not missing:
        return None
    title, reason = next(iter(missing.items()))
    return f"{len(missing)} of {len(rows)} rows have no time of ours, the first {title}: {reason}"
