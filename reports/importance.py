"""Which parameters matter, by Optuna."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import optuna

from reports.run import Run
from tuner.records import Record

LEAST = 20
"""Of fewer valid candidates of a family nothing is said."""

METHOD = "PED-ANOVA (Watanabe, Bansal and Hutter, IJCAI 2023), as Optuna computes it"


@dataclass(frozen=True, slots=True)
class Importance:
    """Of the parameters of one family.

    Attributes:
        family: the variant.
        candidates: how many it is taken from; those too that were not run, where times are predicted.
        shares: by parameter, largest first; they add up to 1.
    """

    family: str
    candidates: int
    shares: tuple[tuple[str, float], ...]


def importance(run: Run) -> Importance | None:
    """How much each parameter of the winner's family tells the fastest tenth of its candidates from all of them.

    Returns:
        None where the family has fewer than LEAST such candidates, or they all agree in every parameter.
    """
    if run.winner is None:
        return None
    family = run.winner.config.variant
    known = run.valid if run.info.measures else (*run.valid, *run.untried)
    records = [record for record in known if record.config.variant == family and record.time_us is not None]
    values = {name: sorted({record.config[name] for record in records}, key=str) for name in run.winner.config.as_dict()}
    varied = {name: choices for name, choices in values.items() if len(choices) > 1}
    if len(records) < LEAST or not varied:
        return None
    shares = optuna.importance.get_param_importances(_study(records, varied), normalize=True)
    return Importance(family, len(records), tuple(sorted(shares.items(), key=lambda share: -share[1])))


def _study(records: Sequence[Record], choices: dict[str, list[int | str]]) -> optuna.Study:
    """The records as finished trials; their values are logarithms of times, since a search is after ratios."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study()
        kinds = {name: optuna.distributions.CategoricalDistribution(those) for name, those in choices.items()}
        study.add_trials([
            optuna.create_trial(params={name: record.config[name] for name in kinds}, distributions=dict(kinds),
                                value=math.log(record.time_us or math.nan))
            for record in records])
    finally:
        optuna.logging.set_verbosity(before)
    return study
