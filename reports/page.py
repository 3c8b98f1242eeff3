"""From records to HTML. The only module here that knows Jinja."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CudaLexer

from codegen.dtypes import CLASS_ERRORS
from codegen.problem import GRADIENTS
from reports import charts
from reports.analysis import families, improvements, reasons
from reports.importance import METHOD, importance
from reports.roofline import ceilings, points, spent
from reports.run import Run
from reports.words import micro, plain, without_place
from reports.worth import is_ablation, worth
from tuner.costmodel import TERMS
from tuner.provenance import version
from tuner.timing.regimes import deciding_first
from tuner.wording import capitalised, problem_text, rows_text

FORMATS = {"us": micro, "ratio": plain, "times": "{:.2f}".format, "percent": "{:.0%}".format, "bound": plain,
           "error": "{:.2e}".format}
"""How kinds of numbers are written; others as `plain` writes them, and whole ones with all digits."""

FASTER = 0.98
"""A kernel that takes a smaller part of the winner's time in every round is worth a word."""

MOST_CODE = 150_000
"""Characters of best.cu that a page shows; the files are shorter, as far as is known."""


def number(value: float, kind: str = "") -> Markup:
    """A number for people that a program can read exactly: an HTML `data` element."""
    text = f"{value:,}" if isinstance(value, int) else FORMATS.get(kind, plain)(value)
    return Markup('<data value="{}">{}</data>').format(repr(value), text)


def breakable(config: object) -> Markup:
    """A config that a narrow page may break behind each parameter."""
    return Markup("<wbr>").join(f"{part}," for part in str(config).split(","))[:-1]


def share_width(share: float) -> str:
    """The length of a bar in CSS, whole where the share is 1 or more."""
    return f"{100 * min(max(share, 0.0), 1.0):.1f}%"


def short(text: str, most: int = 500) -> str:
    """A text of others, compilers' for example, which may be as long as it likes."""
    return text if len(text) <= most else f"{text[:most]} … and {len(text) - most:,} more characters"


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("reports", "."), undefined=jinja2.StrictUndefined, autoescape=True, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"num": number, "capitalised": capitalised, "breakable": breakable, "short": short,
                            "without_place": without_place}
    environment.globals["share_width"] = share_width
    return environment


def fill(template: str, **context: Any) -> str:
    """A page from one template of this package, its styles inside. `version`, where it is given, is the one that it shows."""
    style = Markup(files("reports").joinpath("style.css").read_text(encoding="utf-8"))
    page = _environment().get_template(template).render({"style": style, "version": version(), **context})
    return page.encode(errors="replace").decode()  # JSON may hold halves of characters, which no file can


def run_page(run: Run) -> str:
    """The page of one tuning run."""
    winner = run.winner
    found, steps, worths, important = families(run), improvements(run), worth(run), importance(run)
    context: dict[str, Any] = {"charts": {}, "errors": (), "spent": None, "ceilings": (), "rows_text": "", "worst": 0.0}
    drawn = context["charts"]
    if any(family.valid or family.predicted_us for family in found):
        drawn["families"] = Markup(charts.family_times(run, found))
    if steps:
        drawn["history"] = Markup(charts.search_history(run, found, steps))
    if winner is not None:
        over, lie, goes = ceilings(run), points(run), spent(run, winner)
        if lie:
            drawn["roofline"] = Markup(charts.roofline(run, lie, over))
        if goes is not None:
            drawn["spent"] = Markup(charts.time_spent(run, goes))
        drawn["worth"] = Markup(charts.change_one(worths))
        context |= {"errors": [(name, winner.errors[name]) for name in GRADIENTS if name in winner.errors], "spent": goes,
                    "ceilings": over, "rows_text": rows_text(winner), "worst": winner.worst_bound_ratio}
    if important is not None:
        drawn["importance"] = Markup(charts.parameter_importance(important))
    finalists = sorted((record for record in run.valid if record.times),
                       key=lambda record: (record is not winner, record.best_us))
    return fill(
        "run.html.j2", run=run, problem=problem_text(run.info), families=found, steps=steps, worths=worths, importance=important,
        method=METHOD, reasons=reasons(run.tried), finalists=finalists, regimes=deciding_first(run.info.regime), terms=TERMS,
        limit=CLASS_ERRORS[run.info.accuracy], provenance=_provenance(run), code=Markup(_code(run)),
        cut=len(run.code) > MOST_CODE, sections=_sections(run, bool(steps)), ablation=is_ablation(run),
        faster=sum(max(other.ratios, default=1.0) < FASTER for one in worths for other in one.alternatives), **context)


def _sections(run: Run, searched: bool) -> list[tuple[str, str]]:
    """Anchors and names of the sections there are."""
    named = [("families", "Families", bool(run.tried or run.untried)), ("search", "Search", searched),
             *((anchor, name, run.winner is not None) for anchor, name in (
                 ("roofline", "Roofline"), ("spent", "Time"), ("parameters", "Parameters"), ("errors", "Errors"))),
             ("rejected", "Rejected", True), ("candidates", "All", True), ("provenance", "Provenance", True),
             ("code", "best.cu", bool(run.code))]
    return [(anchor, name) for anchor, name, there in named if there]


def _provenance(run: Run) -> list[tuple[str, str]]:
    """What the run was made under, name by name."""
    info = run.info
    timeout = "none" if info.timeout_s is None else f"{info.timeout_s:g} s"
    return [
        ("Command", info.command), ("Date", info.date), ("Revision", info.version), ("Device", info.device),
        ("Target", info.target), ("Times", f"{run.kind}, {info.regime}" if info.measures else run.kind),
        ("Copy, launch", f"{plain(run.ceilings.limits.copy_tbps)} TB/s, {plain(run.ceilings.limits.launch_us)} us; "
                         f"{run.ceilings.origin}"),
        ("Seed", str(info.seed)), ("Trials at most", str(info.trials)), ("Time limit", timeout),
        ("Accuracy class", info.accuracy), ("Gradients", info.wants), ("eps", f"{info.eps:g}"),
        ("Deterministic only", "yes" if info.deterministic else "no"), ("Sources", info.sources or "not recorded"),
        ("Versions", ", ".join(f"{name} {text}" for name, text in info.versions.items()) or "not recorded")]


def _code(run: Run) -> str:
    """CUDA as spans with classes, of what a page shows of it; nothing for none."""
    code = run.code[:MOST_CODE]
    return highlight(code, CudaLexer(), HtmlFormatter(nowrap=True)) if code else ""
