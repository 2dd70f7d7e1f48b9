"""What the statistics promise, measured by simulation: coverage and false positives.

Populations with known truths are drawn many times, as documents of unequal lengths, and handed to
the functions that every analysis uses. Imports no torch.

Letters: G documents, R repetitions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import stats

from satlens.analysis.statistics.correlation import spearman
from satlens.analysis.statistics.resampling import LEVEL
from satlens.analysis.statistics.sign_flips import Adjustment, sign_flip_test
from satlens.analysis.stats import mean_interval, rank_correlation_interval, ratio_interval
from satlens.errors import AnalysisError

MEAN_LENGTH = 400
"""Tokens of a simulated document, on average."""

SHARED = 20
"""Repetitions that share their resamples, or the cells whose ranks are compared."""


class Rate(NamedTuple):
    """How often something happened in repetitions, with its exact binomial interval."""

    share: float
    low: float
    high: float
    """Clopper-Pearson, 95 %."""
    nominal: float
    """The share that was promised."""
    count: int
    repetitions: int

    @property
    def holds(self) -> bool:
        """Whether the promise lies within the interval."""
        return self.low <= self.nominal <= self.high


class Population(NamedTuple):
    """Sums over a document's tokens as draws from a distribution with a known ratio."""

    draw: Callable[[np.random.Generator, np.ndarray], np.ndarray]
    """From the tokens of each document, of any shape, to the sums, of that shape."""
    truth: float
    """Token-weighted ratio of the population."""
    description: str


def _zero_share(rng: np.random.Generator, n: np.ndarray) -> np.ndarray:
    return rng.binomial(n.astype(np.int64), rng.beta(8, 12, n.shape)).astype(np.float64)


def _gate(rng: np.random.Generator, n: np.ndarray) -> np.ndarray:
    return np.where(rng.random(n.shape) < 0.5, 0.0, rng.gamma(2, 0.5, n.shape)) * n


def _rare_gate(rng: np.random.Generator, n: np.ndarray) -> np.ndarray:
    return np.where(rng.random(n.shape) < 0.8, 0.0, rng.gamma(2, 0.5, n.shape)) * n


def _open_share(rng: np.random.Generator, n: np.ndarray) -> np.ndarray:
    return rng.binomial(n.astype(np.int64), rng.beta(0.3, 2.7, n.shape)).astype(np.float64)


def _difference(rng: np.random.Generator, n: np.ndarray) -> np.ndarray:
    return rng.normal(0.02, 0.1, n.shape) * n


POPULATIONS = {
    "zero_share": Population(_zero_share, 0.4, "share of gates at zero, 0.4 on average"),
    "open_share": Population(_open_share, 0.1, "share of gates open, near 0 in most documents"),
    "gate": Population(_gate, 0.5, "mean gate, closed all through half of the documents"),
    "rare_gate": Population(_rare_gate, 0.2, "mean gate, closed all through 80 % of documents"),
    "difference": Population(_difference, 0.02, "paired difference in loss, normal"),
}


def coverage(
    population: str = "gate",
    *,
    length_cv: float = 0.5,
    n_documents: int = 50,
    repetitions: int = 1000,
    n_resamples: int = 999,
    seed: int = 0,
) -> Rate:
    """How often the interval of a ratio holds the truth of a population of ``POPULATIONS``.

    ``length_cv`` is the spread of (log-normal) document lengths by their mean; 0 makes them equal.
    Repetitions without an interval (no document with an open gate) do not count.

    Raises:
        AnalysisError: an unknown population.
    """
    if population not in POPULATIONS:
        known = ", ".join(POPULATIONS)
        raise AnalysisError(f"coverage: no population {population!r} ({known})")
    drawn = POPULATIONS[population]
    rng = np.random.default_rng(seed)
    held, shown = 0, 0
    # Cells of one call share their resamples; repetitions that all did would not be independent.
    for start in range(0, repetitions, SHARED):
        n_tokens = _lengths(rng, length_cv, (n_documents, min(SHARED, repetitions - start)))
        sums = drawn.draw(rng, n_tokens)
        found = ratio_interval(sums, n_tokens, n_resamples=n_resamples, seed=seed + start)
        has = np.isfinite(found.low) & (found.low < found.high)
        shown += int(has.sum())
        held += int((has & (found.low <= drawn.truth) & (drawn.truth <= found.high)).sum())
    return _rate(held, shown, LEVEL)


def rank_coverage(
    *,
    correlation: float = 0.5,
    noise: float = 1.0,
    n_cells: int = 32,
    n_documents: int = 50,
    length_cv: float = 0.5,
    repetitions: int = 200,
    n_resamples: int = 399,
    seed: int = 0,
) -> Rate:
    """How often the interval of a rank correlation holds what as many other documents would give.

    Cells are normal with that ``correlation`` between the two quantities; each document adds normal
    noise to every cell, ``noise`` times their spread. The truth is the mean over 1000 other draws
    for the same cells, which are new every 20 repetitions.
    """
    rng = np.random.default_rng(seed)
    held = 0
    for start in range(0, repetitions, SHARED):
        first, other = rng.normal(size=(2, n_cells))
        cells = np.stack([first, correlation * first + np.sqrt(1 - correlation**2) * other])

        def draw(cells: np.ndarray = cells) -> tuple[np.ndarray, np.ndarray]:
            """Sums (2, G, cells) and tokens (G,) of one set of documents."""
            n_tokens = _lengths(rng, length_cv, (n_documents,))
            noises = noise * rng.normal(size=(2, n_documents, n_cells))
            return (cells[:, None] + noises) * n_tokens[:, None], n_tokens

        ratios = np.stack([sums.sum(1) / n.sum() for sums, n in (draw() for _ in range(1000))])
        truth = spearman(ratios[:, 0], ratios[:, 1]).mean()
        for index in range(start, min(start + SHARED, repetitions)):
            (x, y), n_tokens = draw()
            found = rank_correlation_interval(
                (x, n_tokens), (y, n_tokens), n_resamples=n_resamples, seed=index
            )
            held += bool(found.low <= truth <= found.high)
    return _rate(held, repetitions, LEVEL)


def false_positives(
    *,
    adjustment: Adjustment = "max_t",
    alpha: float = 0.05,
    n_cells: int = 12,
    n_documents: int = 20,
    repetitions: int = 400,
    n_resamples: int = 399,
    seed: int = 0,
) -> Rate:
    """How often the sign-flip test finds any effect in a grid where there is none.

    Differences are symmetric with heavy tails (Student t, 3 degrees of freedom); half of their
    variance is shared by the cells of a document, as heads of a layer share it.
    """
    rng = np.random.default_rng(seed)
    wrong = 0
    for index in range(repetitions):
        shared = rng.standard_t(3, (n_documents, 1))
        differences = shared + rng.standard_t(3, (n_documents, n_cells))
        test = sign_flip_test(
            differences, adjustment=adjustment, n_resamples=n_resamples, seed=index
        )
        wrong += bool((test.p_adjusted <= alpha).any())
    return _rate(wrong, repetitions, alpha)


class Passages(NamedTuple):
    """Questions about passages, answered right or wrong by two models."""

    passage: np.ndarray
    """Of each question, (questions,)."""
    first: np.ndarray
    """Answers of one model, 0 or 1."""
    second: np.ndarray
    """Answers of the other."""


PREFERENCES = (0.35, 0.25)
"""Shares of passages that suit the first and the second model of :func:`answered_passages`."""

SUITED, UNSUITED = 0.9, 0.3
"""Chance of a right answer where a passage suits a model, and where it suits the other one."""


def answered_passages(
    rng: np.random.Generator,
    n_passages: int,
    *,
    questions: float = 5.0,
    preferences: tuple[float, float] = PREFERENCES,
) -> Passages:
    """Two models that read passages with several questions each.

    A passage suits one model, the other or both alike (then both answer as often), for all of its
    questions, so that differences within a passage are alike. Their mean over questions is
    (SUITED - UNSUITED) times the difference of the ``preferences``.

    Args:
        questions: a passage has on average; one and a Poisson number of others.
        preferences: shares of passages that suit the first and the second model.
    """
    suits = rng.choice(3, n_passages, p=(*preferences, 1 - sum(preferences)))
    passage = np.repeat(np.arange(n_passages), 1 + rng.poisson(questions - 1, n_passages))
    alike = (SUITED + UNSUITED) / 2
    chances = np.array([[SUITED, UNSUITED], [UNSUITED, SUITED], [alike, alike]])[suits[passage]]
    answers = (rng.random(chances.shape) < chances).astype(np.float64)
    return Passages(passage, answers[:, 0], answers[:, 1])


def paired_coverage(
    *,
    clustered: bool = True,
    n_passages: int = 50,
    questions: float = 5.0,
    repetitions: int = 500,
    n_resamples: int = 499,
    seed: int = 0,
) -> Rate:
    """How often the interval of a paired difference in accuracy holds the truth.

    The models and passages are those of :func:`answered_passages`. With ``clustered`` passages are
    resampled, as :func:`satlens.evaluate_tasks` does; without it single questions, as if they were
    independent.
    """
    rng = np.random.default_rng(seed)
    truth = (SUITED - UNSUITED) * (PREFERENCES[0] - PREFERENCES[1])
    held = 0
    for index in range(repetitions):
        drawn = answered_passages(rng, n_passages, questions=questions)
        unit = drawn.passage if clustered else np.arange(len(drawn.passage))
        difference = np.bincount(unit, drawn.first - drawn.second)
        found = mean_interval(
            difference, np.bincount(unit), n_resamples=n_resamples, seed=seed + index
        )
        held += bool(found.low <= truth <= found.high)
    return _rate(held, repetitions, LEVEL)


def _lengths(rng: np.random.Generator, cv: float, shape: tuple[int, ...]) -> np.ndarray:
    """Whole numbers of tokens, log-normal with that coefficient of variation."""
    spread = np.log1p(cv**2)
    return np.ceil(MEAN_LENGTH * np.exp(rng.normal(-spread / 2, np.sqrt(spread), shape)))


def _rate(count: int, repetitions: int, nominal: float) -> Rate:
    ends = stats.binomtest(count, repetitions).proportion_ci(LEVEL, method="exact")
    return Rate(
        share=count / repetitions,
        low=float(ends.low),
        high=float(ends.high),
        nominal=nominal,
        count=count,
        repetitions=repetitions,
    )
