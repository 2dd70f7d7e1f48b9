"""Controls of chance: tests on nothing, and intervals over data of known means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from satlens.analysis.categories import categories
from satlens.analysis.controls.checks import Check, rate_check
from satlens.analysis.controls.planted import documents, gated, tags_from
from satlens.analysis.statistics.calibration import coverage, false_positives
from satlens.analysis.stats import LEVEL

SHUFFLED = "shuffled labels"
ALPHA = 0.1
PATTERNS = 199
"""Sign patterns of a draw: with 199 drawn ones p below or at 0.1 has exactly that chance."""
COVERED = ("zero_share", "gate", "rare_gate")
COVERAGE_TOLERANCE = 0.02
"""How far from 0.95 the coverage of an interval may be."""
LENGTHS = (60,) * 12


def shuffled_labels(draws: int) -> Iterator[Check]:
    """Token classes drawn without a look at the tokens: p <= 0.1 in one draw of ten.

    The gate is the planted one, so the values tested are as far from normal as those of gates are.
    """
    docs, model = documents(LENGTHS), gated()
    rng = np.random.default_rng(3)
    raw = controlled = 0
    for draw in range(draws):
        sides = [rng.integers(0, 2, len(d.tokens)) for d in docs]
        options: dict[str, Any] = {"n_resamples": PATTERNS, "seed": draw, "drivers": False}
        found = categories(model, docs, tags=tags_from(docs, sides), **options)
        table = found.part("categories_contrasts").table.set_index("head")
        raw += float(table["p"].loc[0]) <= ALPHA
        controlled += float(table["p_controlled"].loc[0]) <= ALPHA
    for name, hits in (("raw", raw), ("controlled", controlled)):
        quantity = f"share of p <= {ALPHA:g}, {name}"
        yield rate_check("categories", SHUFFLED, quantity, ALPHA, hits, draws)


def interval_coverage(repetitions: int) -> Iterator[Check]:
    """95 % intervals of ratios hold the truth 93 to 97 times in 100, at 50 documents.

    From even lengths to lengths that vary as much as their mean, also where most documents have
    nothing but zeros.
    """
    for population in COVERED:
        for spread, lengths in ((0.0, "equal lengths"), (1.0, "lengths of CV 1")):
            found = coverage(population, length_cv=spread, repetitions=repetitions)
            yield rate_check(
                "intervals",
                f"simulated {population.replace('_', ' ')}",
                f"coverage, {lengths}",
                LEVEL,
                found.count,
                found.repetitions,
                tolerance=COVERAGE_TOLERANCE,
            )


def grid_of_nulls(repetitions: int) -> Iterator[Check]:
    """The adjusted test of a grid of heads without any effect calls one of them at its level."""
    found = false_positives(repetitions=repetitions)
    yield rate_check(
        "sign-flip test",
        "grid of 12 null cells",
        f"share with an adjusted p <= {found.nominal:g}",
        found.nominal,
        found.count,
        found.repetitions,
    )
