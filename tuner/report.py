"""report.md, best.json and what the header of trials.jsonl has: a finished run for people and for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from codegen.dtypes import CLASS_ERRORS
from codegen.problem import GRADIENTS
from tuner.costmodel import predict
from tuner.gate.checks import COMPANIONS, sentences
from tuner.outcome import TuneResult
from tuner.records import SCHEMA, Record
from tuner.timing.regimes import deciding_first
from tuner.timing.stats import Summary
from tuner.wisdom.source import source_digest
from tuner.wording import capitalised, gpu_text, problem_text, rows_text, share_of_floor, time_text


def best_json(result: TuneResult) -> str:
    """The winner, the best of each variant, and what they were found under."""
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "run": result.info.as_json(),
        "floor_us": result.floor_us,
        "limits": asdict(result.limits),
        "winner": None if result.winner is None else result.winner.as_json(),
        "source": "" if result.winner is None else source_digest(result.problem, result.winner.config),
        "best_by_variant": {name: record.as_json() for name, record in result.best_by_variant().items()},
        "rejected": dict(result.rejections()),
        "said": list(result.said),
        "gate": [check.as_json() for check in result.checks],
    }
    return json.dumps(values, indent=2, allow_nan=False) + "\n"


def run_end(result: TuneResult, interrupted: bool) -> dict[str, Any]:
    """What is known of a run beyond its records, as JSON values. Here it stands also where an earlier run's best.json stays."""
    return {
        "winner": None if result.winner is None else str(result.winner.config),
        "interrupted": interrupted,
        "lost": result.lost,
        "limits": asdict(result.limits),
        "said": list(result.said),
        "gate": [check.as_json() for check in result.checks],
        "ablation": [changed.as_json() for changed in result.ablation],
    }


def report_markdown(result: TuneResult, interrupted: bool = False, kept: str | None = None, no_page: str | None = None) -> str:
    """The whole run as a page; `kept` and `no_page` are the sentences that say why an earlier run's best.* stay, and why there is
    no report.html."""
    info, winner = result.info, result.winner
    lines = [
        f"# LayerNorm+Linear backward, {problem_text(info)}", "",
        f"On {gpu_text(result)}; {info.date}; version {info.version}.", "",
        f"    {info.command}", "",
        f"Gradients: {info.wants}. Accuracy class {info.accuracy}. Seed {info.seed}. Deterministic kernels only: "
        f"{'yes' if info.deterministic else 'no'}.", ""]
    if interrupted:
        lines += ["**This run was interrupted; it has what was finished until then.**", ""]
    if result.lost is not None:
        lines += [f"**{capitalised(result.lost)}. What follows is what was finished until then.**", ""]
    if kept is not None:
        lines += [f"**{kept}**", ""]
    if no_page is not None:
        lines += [f"{no_page}.", ""]
    if winner is None:
        lines += ["No candidate was valid.", ""]
    else:
        lines += _winner(result, winner)
        lines += _gate(result)
        lines += _finals(result)
        lines += _ablation(result, winner)
        lines += _variants(result)
    lines += _rejected(result)
    return "\n".join(lines)


def _winner(result: TuneResult, winner: Record) -> list[str]:
    limit = CLASS_ERRORS[result.info.accuracy]
    share = share_of_floor(result, winner)
    lines = [
        "## Winner", "", f"`{winner.config}`", "",
        f"{time_text(winner)}. The floor (the tensors at copy bandwidth, or one launch) is {result.floor_us:.2f} us, "
        f"{share:.0%} of that time. {_rates(result)}"]
    if not winner.measured:
        lines += _prediction(result, winner)
    lines += [
        "", f"Validated {rows_text(winner)}. The relative Frobenius error of each gradient, where {limit:g} is allowed, "
        "and its largest error of an element in multiples of that element's bound, where 1 is allowed:", "",
        "| gradient | normwise | worst element / bound |", "|---|---|---|"]
    lines += [
        f"| {name} | {winner.errors[name].normwise:.2e} | {winner.errors[name].bound_ratio:.3f} |"
        for name in GRADIENTS if name in winner.errors]
    if winner.resources:
        lines += ["", "| kernel | registers | shared memory, bytes | spilled, bytes |", "|---|---|---|---|"]
        lines += [f"| {kernel} | {entry.registers}{' (estimate)' * entry.estimated} | {entry.shared_bytes} | "
                  f"{'unknown' if entry.estimated else entry.spill_bytes} |" for kernel, entry in winner.resources.items()]
    return [*lines, ""]


def _gate(result: TuneResult) -> list[str]:
    """What the winner has passed beyond what all have, and what was not run of it and of those that stand beside it."""
    return ["Safety gate:", "", *(f"* {sentence}." for sentence in sentences((*result.checks, COMPANIONS))), ""]


def _rates(result: TuneResult) -> str:
    """Where the floor's bandwidth and launch time are from."""
    if result.info.rates == "measured":
        return "Copy bandwidth and launch time were measured on this GPU when the run began."
    return f"Copy bandwidth and launch time are those of the table of targets for {result.limits.name}."


def _prediction(result: TuneResult, winner: Record) -> list[str]:
    """How the cost model comes to the winner's time."""
    prediction = predict(result.problem, winner.config, result.limits, winner.resources)
    guessed = [kernel for kernel, entry in prediction.resources.items() if entry.estimated]
    registers = f"Registers of {', '.join(guessed)} are estimates" if guessed else "Registers are the device compiler's report"
    lines = [
        "", f"The time is predicted by the cost model, not measured; no GPU was used. {registers}.", "",
        "| step | predicted us | limited by | blocks on an SM |", "|---|---|---|---|"]
    return lines + [
        f"| {step.name} | {step.time_us:.2f} | {step.limited_by} | {step.blocks_per_sm or ''} |" for step in prediction.steps]


def _finals(result: TuneResult) -> list[str]:
    """The finalists in both regimes, the winner first, and what is to be known of their times."""
    finalists = sorted((record for record in result.valid() if record.times),
                       key=lambda record: (record is not result.winner, record.best_us))
    if not finalists and not result.said:
        return []
    regimes = deciding_first(result.info.regime)
    lines = ["## Times", ""]
    if finalists:
        lines += [
            f"The fastest were timed again in turns, in both regimes; {regimes[0]} times decide. *Warm*: calls replayed back to "
            "back from a CUDA graph. *Cold*: single calls, each after the L2 cache was written over. Microseconds: the median of "
            "the rounds, in brackets the distance between the quartiles of all samples, and the interval that the median is in, "
            "by order statistics of the rounds.", "",
            "| finalist | " + " | ".join(f"{regime} | interval" for regime in regimes) + " |",
            "|---|" + "---|" * (2 * len(regimes))]
        lines += [f"| `{record.config}` | " + " | ".join(_times(record.times.get(regime)) for regime in regimes) + " |"
                  for record in finalists]
        lines.append("")
    lines += [f"* {capitalised(clause)}." for clause in result.said]
    return [*lines, ""] if result.said else lines


def _times(times: Summary | None) -> str:
    if times is None:
        return "– | –"
    return f"{times.median:.2f} ({times.iqr:.2f}) | {times.low:.2f} to {times.high:.2f}, {times.level:.0%}"


def _ablation(result: TuneResult, winner: Record) -> list[str]:
    """The values instead of the winner's that have a time."""
    timed = [(one, one.times) for one in result.ablation if one.times is not None]
    if not timed:
        return []
    how = "timed in turns with it" if result.info.measures else "by the cost model"
    return [
        "## Change one", "",
        f"For other values of the winner's parameters, the candidate with that value that is most like it, {how}:", "",
        "| parameter | winner's | instead | what else changes | times as long |", "|---|---|---|---|---|",
        *(f"| {one.parameter} | {winner.config[one.parameter]} | {one.value} | {one.tied(winner.config)} | {times:.2f} |"
          for one, times in timed), ""]


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
    valid, rejected = len(result.valid()), result.rejections()
    not_run = info.valid - valid - rejected.total()
    lines = [
        "## Candidates", "",
        f"Of {info.combinations} combinations of parameters {info.valid} can run this shape and are worth trying; {valid} of "
        f"those passed every test, {not_run} were not run.", ""]
    if rejected:
        lines += ["| rejected | count | the first reason |", "|---|---|---|"]
        for status, count in rejected.most_common():
            reason = next(record.reason for record in result.records if record.status.value == status)
            lines.append(f"| {status} | {count} | {_cell(reason or '')} |")
        lines.append("")
    if info.refused:
        lines += ["Combinations that the rules refuse before anything is compiled:", "",
                  "| reason, with the figures of the first such combination | count |", "|---|---|"]
        lines += [f"| {_cell(reason)} | {count} |" for reason, count in info.refused.items()]
        lines.append("")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
