"""The configs of a problem: defaults, parsing, and the ones that are valid and worth trying."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import combinations, product

from codegen.config import Config, Value, split_text
from codegen.errors import InvalidConfig
from codegen.limits import Limits
from codegen.problem import Problem
from codegen.variant import Variant
from codegen.variants import VARIANTS, default_names, tried
from codegen.walk import Values, Walk, remembered


def variant_of(name: str) -> Variant:
    """The variant of that name.

    Raises:
        InvalidConfig: there is none.
    """
    if name not in VARIANTS:
        raise InvalidConfig(f"there is no variant {name!r}; choose from {', '.join(VARIANTS)}")
    return VARIANTS[name]


def make_config(variant_name: str, values: Mapping[str, Value | str] | None = None) -> Config:
    """The variant's default config with some parameters set; text values are read as the parameter's own type.

    Raises:
        InvalidConfig: no such variant, parameter or choice.
    """
    variant = variant_of(variant_name)
    chosen = dict(variant.defaults)
    for name, value in (values or {}).items():
        if name not in variant.choices:
            raise InvalidConfig(f"{variant_name} has no parameter {name!r}; it has {', '.join(variant.choices)}")
        found = [choice for choice in variant.choices[name] if str(choice) == str(value)]
        if not found:
            options = ", ".join(str(choice) for choice in variant.choices[name])
            raise InvalidConfig(f"{name}={value} is no choice of {variant_name}; choose from {options}")
        chosen[name] = found[0]
    return Config(variant_name, tuple((name, chosen[name]) for name in variant.choices))


def parse_config(text: str) -> Config:
    """Reads a config string; parameters it leaves out have their default. `parse_config(str(c)) == c`.

    Raises:
        InvalidConfig: the text names no config.
    """
    return make_config(*split_text(text))


def why_refused(problem: Problem, config: Config, limits: Limits) -> str | None:
    """Why this config cannot run the problem on such a GPU, in one clause; None where it can."""
    variant, params = variant_of(config.variant), config.as_dict()
    for clash in variant.clashes:
        if reason := clash.refuses(problem, {name: params[name] for name in clash.names}, limits):
            return reason
    return variant.refuses(problem, params, limits)


def why_inexact(problem: Problem, config: Config) -> str | None:
    """Why this config would lose the accuracy of the data type at the problem's row count; None where it does not."""
    return variant_of(config.variant).inexact(problem, config.as_dict())


def why_wasteful(problem: Problem, config: Config) -> str | None:
    """Why this config, though right, is not worth trying at the problem's row count; None where it is."""
    return variant_of(config.variant).wasteful(problem, config.as_dict())


def why_unfit(problem: Problem, config: Config, limits: Limits) -> str | None:
    """Why this config must not be taken for the problem: refused, or inexact at its row count; None where it may."""
    return why_refused(problem, config, limits) or why_inexact(problem, config)


def why_not(problem: Problem, config: Config, limits: Limits) -> str | None:
    """Why this config is no candidate for the problem: unfit, or not worth trying; None where it is one."""
    return why_unfit(problem, config, limits) or why_wasteful(problem, config)


def all_configs(names: Iterable[str] | None = None) -> Iterator[Config]:
    """The whole product of choices, valid or not, variant by variant."""
    for name in VARIANTS if names is None else names:
        choices = variant_of(name).choices
        for values in product(*choices.values()):
            yield Config(name, tuple(zip(choices, values, strict=True)))


def valid_configs(problem: Problem, limits: Limits, names: Iterable[str] | None = None,
                  on_refused: Callable[[str, int], None] = lambda reason, count: None) -> list[Config]:
    """Every config that can run the problem and is worth trying, in a fixed order; none with a value that no GPU has run.

    Args:
        problem: what is to be computed.
        limits: the GPU.
        names: of the variants; None: all that have been tried on a GPU and are not outdone there (Variant.outdone).
        on_refused: told of the others: a reason, and how many combinations of a variant fall to it.

    Raises:
        InvalidConfig: there is no variant of one of those names.
    """
    @cache
    def walk(name: str) -> Walk:
        return Walk(problem, limits, tried(variant_of(name)))

    found: list[Config] = []
    for name in default_names() if names is None else names:
        variant = variant_of(name)
        outdone = variant.outdone if names is None else None
        if outdone is not None and (why := outdone.why(problem, limits)) is not None and walk(outdone.by).valid:
            on_refused(why, math.prod(map(len, tried(variant).choices.values())))
            continue
        found += walk(name).valid
        for reason, count in walk(name).refused.items():
            on_refused(reason, count)
    return found


REACH = 3
"""The most parameters in which nearest_runnable changes a config."""


def nearest_runnable(problem: Problem, config: Config, limits: Limits, kept: Iterable[str] = ()) -> Config | None:
    """The config itself where it can run the problem; else the first that can and is like it; None: there is none within REACH.

    Args:
        problem: what is to be computed.
        config: where the search begins. What differs from it in one parameter comes before what differs in two, and a
            neighbouring choice before a distant one.
        limits: the GPU.
        kept: parameters that stay as they are.
    """
    stay, variant = set(kept), variant_of(config.variant)
    names = tuple(variant.choices)
    clashes = [(set(clash.names), remembered(problem, limits, clash, names)) for clash in variant.clashes]
    chosen = tuple(value for _, value in config.params)
    if any(looked_at <= stay and refuses(chosen) for looked_at, refuses in clashes):
        return None  # no change of the others mends it
    # A clash may be asked where none before it refuses. One change at least must be of what the first that does looks at.
    first = next((looked_at for looked_at, refuses in clashes if refuses(chosen)), None)
    for values in _outwards(variant, chosen, stay, first):
        params = dict(zip(names, values, strict=True))
        if not any(refuses(values) for _, refuses in clashes) and variant.refuses(problem, params, limits) is None:
            return Config(variant.name, tuple(params.items()))
    return None


def _outwards(variant: Variant, chosen: Values, kept: set[str], changed_in: set[str] | None) -> Iterator[Values]:
    """The values and those around them; given `changed_in`, those that differ in one of these parameters at least."""
    changes: dict[str, list[tuple[int, Value]]] = {}
    for place, (name, choices) in enumerate(variant.choices.items()):
        at = choices.index(chosen[place])
        others = sorted(range(len(choices)), key=lambda other, at=at: abs(other - at))  # type: ignore[misc]
        if name not in kept:
            changes[name] = [(place, choices[other]) for other in others[1:]]
    for count in range(REACH + 1):
        for names in combinations(changes, count):
            if changed_in is not None and changed_in.isdisjoint(names):
                continue
            for changed in product(*(changes[name] for name in names)):
                values = list(chosen)
                for place, value in changed:
                    values[place] = value
                yield tuple(values)
