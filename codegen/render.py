"""From a problem and a config to CUDA text and its plan. The only module that knows Jinja."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from codegen.arithmetic import PLANES, WHOLE
from codegen.config import Config
from codegen.dtypes import CXX_TYPES, dtype_words
from codegen.glossary import MEANINGS
from codegen.params import declaration, short_types
from codegen.plan import Plan
from codegen.problem import GRADIENTS, Problem
from codegen.prune import prune
from codegen.reduction import sections
from codegen.space import variant_of
from codegen.variants import constants

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"


@dataclass(frozen=True, slots=True)
class Source:
    """A rendered kernel source: plain CUDA that includes nothing and has no host code, and how to run it.

    Every kernel is `extern "C" __global__` and takes one `const __grid_constant__ Params`.
    """

    problem: Problem
    config: Config
    text: str
    plan: Plan


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )


def render_template(name: str, **context: Any) -> str:
    """Renders one file of templates/ with these names defined; a name it uses that is not among them is an error."""
    return _environment().get_template(name).render(**context)


def render(problem: Problem, config: Config) -> Source:
    """Renders the config for the problem. The text does not depend on the problem's row count.

    Validity is the caller's affair (`codegen.space.why_refused`).

    Raises:
        InvalidConfig: the config's variant does not exist.
    """
    variant = variant_of(config.variant)
    params = config.as_dict()
    plan = variant.plan(problem, params)
    named = constants(problem, variant, params)
    text = prune(render_template(
        variant.template, variant=variant, problem=problem, config=config, gradients=GRADIENTS, constants=named,
        meanings={**MEANINGS, **variant.meanings}, sections=sections(problem), cxx_types=CXX_TYPES, planes=PLANES,
        whole_values=WHOLE,
        dtype_words=dtype_words(problem.dtype, problem.param_dtype), short_types=short_types(problem, plan),
        params_declaration=declaration(plan), overlapping=plan.overlapping, followed=plan.followed,
        reduction=params["reduction"], identity=named.get("IDENTITY", 0),
    ))
    return Source(problem, config, text, plan)
