"""report.md and best.json: a finished run for people and for programs."""

from __future__ import annotations

import json
from typing import Any

from codegen.problem import GRADIENTS
from tuner.bounds import accuracy_class
from tuner.outcome import TuneResult
from tuner.records import SCHEMA, Record, Status
from tuner.wording import gpu_text, rows_text, share_of_floor, time_text


def best_json(result: TuneResult) -> str:
    """The winner, the best of each variant, and what they were found under."""
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "run": result.info.as_json(),
        "floor_us": result.floor_us,
        "winner": None if result.winner is None else result.winner.as_json(),
        "best_by_variant": {name: record.as_json() for name, record in result.best_by_variant().items()},
        "rejected": dict(result.rejections()),
    }
    return json.dumps(values, indent=2, allow_nan=False) + "\n"


def report_markdown(result: TuneResult, interrupted: bool = False) -> str:
    """The whole run as a page."""
    info, winner = result.info, result.winner
    lines = [
        f"# LayerNorm+Linear backward, {info.shape}, {info.dtype}", "",
        f"On {gpu_text(result)}; {info.date}; version {info.version}.", "",
        f"    {info.command}", "",
        f"Gradients: {info.wants}. Seed {info.seed}. Deterministic kernels only: {'yes' if info.deterministic else 'no'}.", ""]
    if interrupted:
        lines += ["**This run was interrupted; it has what was finished until then.**", ""]
    if winner is None:
        lines += ["No candidate was valid.", ""]
    else:
        lines += _winner(result, winner)
        lines += _variants(result)
    lines += _rejected(result)
    return "\n".join(lines)


def _winner(result: TuneResult, winner: Record) -> list[str]:
    limit = accuracy_class(result.info.accuracy).limit
    share = share_of_floor(result, winner)
    lines = [
        "## Winner", "", f"`{winner.config}`", "",
        f"{time_text(winner)}. The floor (the tensors at copy bandwidth, or one launch) is {result.floor_us:.2f} us, "
        f"{share:.0%} of that time."]
    if not winner.measured:
        known = "the device compiler's report" if winner.resources else "an estimate"
        lines += ["", "The time is predicted by the cost model, not measured; no GPU was used. Registers are from " + known + "."]
    lines += [
        "", f"Validated at {rows_text(winner)} rows. The relative Frobenius error of each gradient, where {limit:g} is allowed, "
        "and its largest error of an element in multiples of that element's bound, where 1 is allowed:", "",
        "| gradient | normwise | worst element / bound |", "|---|---|---|"]
    lines += [
        f"| {name} | {winner.errors[name].normwise:.2e} | {winner.errors[name].bound_ratio:.3f} |"
        for name in GRADIENTS if name in winner.errors]
    if winner.resources:
        lines += ["", "| kernel | registers | shared memory, bytes | spilled, bytes |", "|---|---|---|---|"]
        lines += [f"| {kernel} | {entry.registers} | {entry.shared_bytes} | {entry.spill_bytes} |"
                  for kernel, entry in winner.resources.items()]
    return [*lines, ""]


def _variants(result: TuneResult) -> list[str]:
    best = result.best_by_reduction()
    names = [name for name in GRADIENTS if name in result.problem.wants]
    lines = [
        "## Best of each variant and reduction", "",
        "Behind the time: the floor over it, the worst error of an element in multiples of its bound, and the relative Frobenius "
        "error of each gradient.", "",
        f"| config | {best[0].time_kind} us | floor / time | error / bound | " + " | ".join(names) + " |",
        "|---|" + "---|" * (3 + len(names))]
    for record in best:
        errors = " | ".join(f"{record.errors[name].normwise:.1e}" for name in names)
        lines.append(f"| `{record.config}` | {record.best_us:.2f} | {share_of_floor(result, record):.0%} | "
                     f"{record.worst_bound_ratio:.2f} | {errors} |")
    return [*lines, ""]


def _rejected(result: TuneResult) -> list[str]:
    info = result.info
    valid, not_run = len(result.valid()), sum(record.status is Status.NOT_RUN for record in result.records)
    lines = [
        "## Candidates", "",
        f"Of {info.combinations} combinations of parameters {info.valid} can run this shape and are worth trying; {valid} of "
        f"those passed every test, {not_run} were not run.", ""]
    rejected = result.rejections()
    if rejected:
        lines += ["| rejected | count | the first reason |", "|---|---|---|"]
        for status, count in rejected.most_common():
            reason = next(record.reason for record in result.records if record.status.value == status)
            lines.append(f"| {status} | {count} | {_cell(reason or '')} |")
        lines.append("")
    if info.refused:
        lines += ["Combinations that the rules refuse before anything is compiled:", "", "| reason | count |", "|---|---|"]
        lines += [f"| {_cell(reason)} | {count} |" for reason, count in info.refused.items()]
        lines.append("")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
