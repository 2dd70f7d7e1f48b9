"""Scores of tasks and paired differences between models, resampled by passage.

Questions about one passage are not independent: what is resampled, and what changes its sign in a
test, is a passage with all of its questions (a group of passages beyond 1024 of them). A mean over
tasks resamples within each task.

Shapes: Q questions of a task, G groups of passages, A arms (models, with or without
interventions), M metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from satlens.analysis.scoring.answers import Answers, Metric
from satlens.analysis.stats import (
    Adjustment,
    Interval,
    SignFlip,
    function_interval,
    group_of,
    mean_interval,
    ratio_interval,
    sign_flip_test,
    stratified_interval,
)

OTHER_PASSAGES = "these checkpoints and tasks, other passages"

ADJUSTMENT: Adjustment = "max_t"

Pair = tuple[str, str]
"""A model and its baseline, by label."""


class Sums(NamedTuple):
    """Sums over the questions of each group of passages, (G,) each."""

    values: np.ndarray
    """Weight times value, or times a difference of values."""
    weights: np.ndarray


@dataclass(frozen=True, eq=False)
class Scored:
    """The answers of every arm to one task."""

    task: str
    passages: Sequence[str]
    """Of each question, (Q,)."""
    answers: Mapping[str, Answers]
    """By arm."""
    chance: Mapping[str, float] = field(default_factory=dict)
    """Score of guessing by metric, where there is one."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Version, data and the like, for the protocol."""

    @cached_property
    def groups(self) -> np.ndarray:
        """(Q,) group of each question's passage."""
        _, number = np.unique(np.asarray(self.passages, dtype=str), return_inverse=True)
        return group_of(number, self.n_passages)

    @cached_property
    def n_passages(self) -> int:
        return len(set(self.passages))

    @property
    def prompt_hash(self) -> str:
        """Of all requests; every arm has the same."""
        return next(iter(self.answers.values())).prompt_hash

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of its metrics."""
        return tuple(metric.name for metric in next(iter(self.answers.values())).metrics)

    @property
    def linear(self) -> tuple[str, ...]:
        """Those whose score is a mean itself."""
        metrics = next(iter(self.answers.values())).metrics
        return tuple(metric.name for metric in metrics if metric.scale == "mean")

    def metric(self, arm: str, name: str) -> Metric:
        """Answers of an arm by one metric."""
        return next(metric for metric in self.answers[arm].metrics if metric.name == name)

    def sums(self, arm: str, name: str, asked: np.ndarray | None = None) -> Sums:
        """Of one arm and metric over the questions it answered, or over those ``asked``."""
        metric = self.metric(arm, name)
        return self._summed(
            metric.values, metric.weights, metric.answered if asked is None else asked
        )

    def shared(self, pair: Pair, name: str) -> np.ndarray:
        """(Q,) questions that both of a pair answered."""
        first, second = (self.metric(arm, name).answered for arm in pair)
        return first & second

    def differences(self, pair: Pair, name: str) -> Sums:
        """Of the first minus the second, over the questions that both answered."""
        first, second = (self.metric(arm, name) for arm in pair)
        return self._summed(first.values - second.values, first.weights, self.shared(pair, name))

    def passages_in(self, asked: np.ndarray) -> int:
        """Passages that some questions, (Q,) bool, are about."""
        return len({name for name, one in zip(self.passages, asked, strict=True) if one})

    def _summed(self, values: np.ndarray, weights: np.ndarray, asked: np.ndarray) -> Sums:
        n = self.groups.max() + 1
        groups, weights = self.groups[asked], weights[asked]
        return Sums(
            np.bincount(groups, weights * values[asked], minlength=n),
            np.bincount(groups, weights, minlength=n),
        )


# -- intervals -------------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """One number with its interval."""

    value: float
    low: float
    high: float
    flags: str


Estimates = dict[tuple[Any, str], Estimate]
"""By arm or pair, and metric."""


def score_estimates(scored: Scored, options: Mapping[str, int]) -> tuple[Estimates, Interval]:
    """The score of every arm by every metric, and the interval that holds them all."""
    cells = [(arm, name) for arm in scored.answers for name in scored.metrics]
    sums = [scored.sums(*cell) for cell in cells]
    interval = ratio_interval(*_side_by_side(sums), covers=OTHER_PASSAGES, **options)
    # exp is monotone: the ends of a perplexity are those of its logarithm.
    found = {
        cell: _at(interval, column, scored.metric(*cell).score) for column, cell in enumerate(cells)
    }
    return found, interval


def difference_estimates(
    scored: Scored, pairs: Sequence[Pair], options: Mapping[str, int]
) -> Estimates:
    """First minus second score of every pair by every metric, paired by question."""
    every = [(pair, name) for pair in pairs for name in scored.metrics]
    linear = [cell for cell in every if scored.metric(cell[0][0], cell[1]).scale == "mean"]
    found: Estimates = {}
    if linear:
        sums = [scored.differences(*cell) for cell in linear]
        interval = mean_interval(*_side_by_side(sums), covers=OTHER_PASSAGES, **options)
        found = {cell: _at(interval, column) for column, cell in enumerate(linear)}
    for pair, name in (cell for cell in every if cell not in found):
        asked = scored.shared(pair, name)
        first, second = (scored.sums(arm, name, asked) for arm in pair)
        interval = function_interval(
            _exp_difference,
            first.values,
            second.values,
            first.weights,
            weights=first.weights,
            covers=OTHER_PASSAGES,
            **options,
        )
        found[pair, name] = _at(interval, ())
    return {cell: found[cell] for cell in every}


def mean_over_tasks(parts: Sequence[Sums], options: Mapping[str, int]) -> Estimate:
    """Unweighted mean over tasks of scores or differences, passages resampled within each."""
    return _at(stratified_interval(parts, covers=OTHER_PASSAGES, **options), ())


def _side_by_side(sums: Sequence[Sums]) -> tuple[np.ndarray, np.ndarray]:
    values, weights = (np.stack(columns, axis=1) for columns in zip(*sums, strict=True))
    return values, weights


def _exp_difference(first: np.ndarray, second: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.exp(first / weights) - np.exp(second / weights)


def _at(
    interval: Interval, cell: Any, score: Callable[[np.ndarray], np.ndarray] = lambda mean: mean
) -> Estimate:
    ends = (score(values[cell]) for values in (interval.estimate, interval.low, interval.high))
    return Estimate(*(float(end) for end in ends), flags=str(interval.flags[cell]))


# -- tests -----------------------------------------------------------------------------------------


def sign_flips(
    cells: Sequence[Mapping[str, Sums]], tasks: Sequence[Scored], options: Mapping[str, int]
) -> SignFlip:
    """Tests of all differences of one pair, adjusted together (max-T).

    Args:
        cells: each the differences of the tasks that it is a mean of, by task: one task, or those
            of a mean over tasks.
        tasks: all of them, whose passages are the units.
    """
    starts, n_units = {}, 0
    for scored in tasks:
        starts[scored.task] = n_units
        n_units += int(scored.groups.max()) + 1
    units = np.full((n_units, len(cells)), np.nan)
    for column, parts in enumerate(cells):
        for task, sums in parts.items():
            there = np.flatnonzero(sums.weights)
            # Passages count to a mean as they do to the score of their task.
            share = sums.values[there] / (sums.weights.sum() * len(parts))
            units[starts[task] + there, column] = share
    return sign_flip_test(units, adjustment=ADJUSTMENT, **options)
