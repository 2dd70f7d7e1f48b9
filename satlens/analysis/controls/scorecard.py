"""Positive controls: whether the analyses return what was planted, as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from satlens.analysis.controls import circuits, gates, nulls, prices, routes, trained
from satlens.analysis.controls.checks import RATE_LEVEL, Check, table_of
from satlens.analysis.engine.stream import Progress
from satlens.analysis.result import Result
from satlens.provenance import provenance

N_RESAMPLES = 1999
"""Of intervals; also enough to list all sign patterns of the ten planted documents."""

Control = Callable[[], Iterator[Check]]


def controls(*, full: bool = False, progress: Progress | None = None) -> Result:
    """Run every analysis on models whose numbers are known, and compare.

    Planted models have their weights set by hand, so that every number is a closed form; trained
    ones learnt a synthetic language, where it is known what must be found; nulls have nothing to
    find. It needs no checkpoint and no data, and takes about a minute on one core.

    Args:
        full: several minutes: more draws of the nulls, and models that have to learn recall and
            induction.
        progress: called with ("controls", controls done, controls in all).

    Returns:
        ``controls``: a row a check with ``planted``, ``recovered``, ``tolerance`` and ``passed``;
        the summary counts them and names those that failed.
    """
    every = _controls(full)
    report = progress or (lambda label, done, total: None)
    checks: list[Check] = []
    report("controls", 0, len(every))
    threads = torch.get_num_threads()
    # These models are too small to share; and sums in one order are the same on any machine.
    torch.set_num_threads(1)
    try:
        for done, control in enumerate(every, start=1):
            checks += control()
            report("controls", done, len(every))
    finally:
        torch.set_num_threads(threads)
    return scorecard(checks, full=full)


def _controls(full: bool) -> list[Control]:
    options: dict[str, Any] = {"n_resamples": N_RESAMPLES}
    described = [
        gates.sparsity_checks,
        gates.categories_checks,
        gates.evaluation_checks,
        routes.sparsity_checks,
        routes.divergence_checks,
        routes.effective_checks,
        prices.ablation_checks,
        prices.route_ablation_checks,
        prices.intervention_checks,
        prices.attribution_checks,
        prices.route_attribution_checks,
        circuits.circuits_checks,
    ]
    found: list[Control] = [partial(control, **options) for control in described]
    found += [
        circuits.patching_checks,
        partial(nulls.shuffled_labels, 1000 if full else 100),
        partial(nulls.grid_of_nulls, 5000 if full else 1000),
        partial(nulls.interval_coverage, 10_000 if full else 1000),
        partial(trained.memory_checks, 600 if full else 300, **options),
    ]
    if full:
        found.append(partial(trained.retrieval_checks, **options))
    return found


def scorecard(checks: list[Check], *, full: bool) -> Result:
    """The result of some checks."""
    table = table_of(checks)
    failed = [f"{c.analysis}: {c.control}: {c.quantity}" for c in checks if not c.passed]
    by_analysis = {
        name: {
            "passed": sum(c.passed for c in checks if c.analysis == name),
            "checks": sum(c.analysis == name for c in checks),
        }
        for name in dict.fromkeys(c.analysis for c in checks)
    }
    summary = {
        "full": full,
        "n_checks": len(checks),
        "n_passed": len(checks) - len(failed),
        "failed": failed,
        "by_analysis": by_analysis,
        "rate_level": RATE_LEVEL,
    }
    source = provenance(
        checkpoint=None,
        data={"kind": "planted"},
        tokenizer=None,
        seed=0,
        n_documents=sum(_most(checks, "n_documents").values()),
        n_tokens=sum(_most(checks, "n_tokens").values()),
    )
    count = f"{summary['n_passed']} of {len(checks)} checks passed."
    return Result("controls", table, source, summary, [count, *_NOTES])


def _most(checks: list[Check], name: str) -> dict[tuple[str, str], int]:
    """Documents or tokens that each analysis of each control saw."""
    most: dict[tuple[str, str], int] = {}
    for check in checks:
        key = check.analysis, check.control
        most[key] = max(most.get(key, 0), getattr(check, name))
    return most


_NOTES = (
    "equal: recovered is planted up to the tolerance, 1e-5 of it where models compute in fp32 and "
    "nothing else is said; a planted zero is an exact zero.",
    "covers: the rate found over random draws, whose 99 % interval (Clopper-Pearson) has to hold "
    "the planted one, for coverage give or take the tolerance. One such check in a hundred fails "
    "by chance, and then always, since seeds are fixed.",
    "at least, at most: bounds that hold for any model that learnt the language; intervals are "
    "over documents.",
    "What is planted here is clean: that these numbers come back does not say how noisy a real "
    "model's are.",
)
