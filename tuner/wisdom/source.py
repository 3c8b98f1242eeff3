"""Which kernels are still what they were when their times were taken."""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import replace

from codegen.config import Config
from codegen.errors import InvalidConfig
from codegen.limits import Limits, target
from codegen.problem import Problem
from codegen.render import Source, render
from codegen.space import why_refused
from tuner.wisdom.points import Key, Point

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def source_digest(problem: Problem, config: Config) -> str:
    """A digest of all that decides how fast a config is: its rendered source, but for comments and layout, and its plan.

    It is of what templates and generator make for this very problem and config, so that a change elsewhere leaves it alone.
    """
    return _digest(replace(problem, rows=1), config)


@functools.lru_cache(maxsize=4096)
def _digest(problem: Problem, config: Config) -> str:
    return digest(render(problem, config))


def digest(source: Source) -> str:
    """As source_digest, of a source that has been rendered, for whatever row count."""
    words = " ".join(_COMMENT.sub(" ", source.text).split())
    return hashlib.sha256(f"{words}\n{source.plan!r}".encode()).hexdigest()[:16]


def is_current(key: Key, point: Point, limits: Limits | None = None) -> bool:
    """Whether the point's time is that of the kernel which this program would make of its config today.

    `limits` are those of the key's GPU; None: those of the table of targets for its architecture.
    """
    config = point.parsed
    if config is None or not point.source:
        return False
    try:
        gpu = target(key.arch) if limits is None else limits
    except InvalidConfig:
        return False
    problem = key.problem(point.rows)
    return why_refused(problem, config, gpu) is None and source_digest(problem, config) == point.source
