"""What a variant is, and the small functions its rules are written with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from codegen.config import Value
from codegen.limits import Limits
from codegen.plan import Plan
from codegen.problem import Problem

Params = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Clash:
    """A rule that looks at some of the parameters only, so that one answer settles every combination of the others.

    Attributes:
        names: the parameters it looks at; it is given no others.
        refuses: as Variant.refuses, of those parameters.
    """

    names: tuple[str, ...]
    refuses: Callable[[Problem, Params, Limits], str | None]


@dataclass(frozen=True, slots=True)
class Outdone:
    """Where a variant need not be tried, since another one is faster there. It takes part there only where it is named, or where
    the other one can run nothing.

    Attributes:
        by: the name of the other one.
        why: why it is faster at such a problem on such a GPU, as a clause; None: it may not be.
    """

    by: str
    why: Callable[[Problem, Limits], str | None]


@dataclass(frozen=True, slots=True)
class Variant:
    """One family of kernels. Every variant has the parameter `reduction` (see codegen/reduction.py).

    Attributes:
        name: also the name of its kernel and its template.
        summary: one line: what it does, and what it changes over the simpler ones.
        choices: the values of each parameter, in the order of config strings.
        defaults: a config that is valid for ordinary sizes.
        refuses: why a problem cannot be run with these values on a GPU with these limits, at any row count; None: it can.
        inexact: why these values would lose the accuracy of the data type at the problem's row count; None: they do not.
        wasteful: why these values, though right, are not worth trying at the problem's row count; None: they are.
        constants: the named integers of the rendered source, each explained in `meanings` or in codegen/glossary.py.
        plan: the steps and scratch buffers.
        clashes: rules of the same meaning as `refuses`, which need not repeat them: parameters are chosen in the order of
            `choices`, and each rule is asked as soon as those it looks at are. A variant of more than some 10,000 combinations
            should have them, about parameters that stand first in `choices`; `refuses` is asked of what they leave.
        meanings: what those constants mean that no other variant has: the comment behind each.
        outdone: where it is slower than another variant; None: nowhere that is known.
    """

    name: str
    summary: str
    choices: Mapping[str, tuple[Value, ...]]
    defaults: Params
    refuses: Callable[[Problem, Params, Limits], str | None]
    inexact: Callable[[Problem, Params], str | None]
    wasteful: Callable[[Problem, Params], str | None]
    constants: Callable[[Problem, Params], dict[str, int]]
    plan: Callable[[Problem, Params], Plan]
    clashes: tuple[Clash, ...] = ()
    meanings: Mapping[str, str] = field(default_factory=dict)
    outdone: Outdone | None = None

    @property
    def template(self) -> str:
        """File name of the template."""
        return f"{self.name}.cu.j2"


def number(params: Params, name: str) -> int:
    """An integer parameter."""
    return int(params[name])


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


def too_much_shared(needed: int, limits: Limits) -> str | None:
    """Why a block cannot have so many bytes of shared memory; None where it can."""
    if needed <= limits.shared_per_block:
        return None
    return f"needs {needed} bytes of shared memory; a block of {limits.name} has {limits.shared_per_block}"
