"""The tables of an ablation: what each case changes, with intervals and adjusted tests.

Shapes: G document groups, N cases, C categories.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from satlens.analysis.engine.accumulators import GroupSums
from satlens.analysis.engine.inputs import (
    documents_in,
    interval_columns,
    interval_protocol,
    interval_summary,
)
from satlens.analysis.result import flag_column, join_marks
from satlens.analysis.stats import Adjustment, mean_interval, sign_flip_test
from satlens.analysis.sweeps.measure import Case

STATS = {"dnll": "dnll", "kl": "kl", "top1_change": "top1"}
"""Column -> what a pass adds up for it."""
ADJUSTED: dict[Adjustment, str] = {"max_t": "max-T", "benjamini_hochberg": "Benjamini-Hochberg"}
"""Adjustments of tests by their usual names."""


def ablation_table(
    cases: Sequence[Case],
    sums: GroupSums,
    n_documents: int,
    adjustment: Adjustment,
    options: dict[str, Any],
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A row a case, and the headline numbers.

    Args:
        sums: of :func:`satlens.analysis.sweeps.measure.measure`.
        adjustment: of tests, within each kind and scope.
        options: of intervals and tests.
    """
    n, tokens = sums["n"], sums["n"].sum()
    intervals = {name: mean_interval(sums[key], n, **options) for name, key in STATS.items()}
    change = intervals["dnll"]
    clean = sums["nll"].sum() / tokens
    columns = _labels(cases)
    columns |= {"nll_clean": clean, "nll": clean + change.estimate}
    for name, interval in intervals.items():
        columns |= interval_columns(name, interval)
    ratio = interval_columns("ppl_ratio", change)
    columns |= {name: np.exp(values) for name, values in ratio.items()}
    tests, test_flags, facts = _tests(cases, sums["dnll"], n, adjustment, options)
    columns |= tests
    marks = join_marks(_marks(cases), flag_column({k: v.flags for k, v in intervals.items()}))
    table = pd.DataFrame(
        {
            **columns,
            "n_documents": int(documents_in(n, n_documents)),
            "n_tokens": int(tokens),
            "flags": join_marks(marks, test_flags),
        }
    )
    summary = {
        "nll_clean": float(clean),
        "overall": _overall(cases, intervals),
        "interval": interval_protocol(change, n_documents),
        **facts,
    }
    return table, summary


def category_table(
    cases: Sequence[Case],
    sums: GroupSums,
    names: Sequence[str],
    n_documents: int,
    options: dict[str, Any],
) -> pd.DataFrame:
    """A row a (case, category): dNLL of the targets of a category; those without any left out."""
    present = sums["n_by"].any(axis=0)
    n = sums["n_by"][:, present]
    change = sums["dnll_by"][:, :, present]
    interval = mean_interval(change, np.broadcast_to(n[:, None], change.shape), **options)
    kept = np.array(names, dtype=object)[present]
    labels = {name: np.repeat(values, len(kept)) for name, values in _labels(cases).items()}
    return pd.DataFrame(
        {
            **labels,
            "category": np.tile(kept, len(cases)),
            **{name: v.ravel() for name, v in interval_columns("dnll", interval).items()},
            "n_documents": np.tile(documents_in(n, n_documents), len(cases)),
            "n_tokens": np.tile(n.sum(axis=0), len(cases)),
            "flags": join_marks(np.repeat(_marks(cases), len(kept)), interval.flags.ravel()),
        }
    )


def _labels(cases: Sequence[Case]) -> dict[str, Any]:
    """What each row is about."""
    whole = {
        name: pd.array([getattr(case, name) for case in cases], dtype="Int64")
        for name in ("layer", "head")
    }
    text = ("site", "sublayer", "role", "kind", "target", "scope", "source", "component")
    return {**whole, **{name: np.array([getattr(c, name) for c in cases]) for name in text}}


def _marks(cases: Sequence[Case]) -> np.ndarray:
    """(N,) what to know about a row."""
    static = np.array(["static" if case.static else "" for case in cases])
    causal = np.array(["" if case.intervention.causal else "not_causal" for case in cases])
    return join_marks(static, causal)


def _overall(cases: Sequence[Case], intervals: dict[str, Any]) -> dict[str, Any]:
    """Whole-model cases: dNLL with its interval, KL and the share of changed predictions."""
    found = {}
    for index, case in enumerate(cases):
        if case.scope == "model":
            of = f" {case.source}" if case.source else ""
            found[f"{case.target}.{case.kind}{of}"] = {
                **interval_summary(intervals["dnll"], index),
                "kl": float(intervals["kl"].estimate[index]),
                "top1_change": float(intervals["top1_change"].estimate[index]),
            }
    return found


def _tests(
    cases: Sequence[Case],
    change: np.ndarray,
    n: np.ndarray,
    adjustment: Adjustment,
    options: dict[str, Any],
) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, Any]]:
    """Sign-flip tests of the mean change per document, adjusted within each kind and scope."""
    with np.errstate(invalid="ignore", divide="ignore"):
        within = change / n[:, None]
    columns = {name: np.full(len(cases), np.nan) for name in ("p", "p_adjusted", "p_min")}
    flags = np.full(len(cases), "", dtype=object)
    family = [(c.target, c.kind, c.scope) for c in cases]
    exact = True
    for name in dict.fromkeys(family):
        members = np.array([index for index, other in enumerate(family) if other == name])
        test = sign_flip_test(within[:, members], adjustment=adjustment, **options)
        for column, values in columns.items():
            values[members] = getattr(test, column)
        flags[members] = test.flags
        exact = exact and test.exact
    within_what = f"{ADJUSTED[adjustment]} within a kind and scope"
    return columns, flags, {"adjustment": within_what, "exact_p": exact}
