"""One check: what was planted, what an analysis gave back, and by which rule they have to agree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import pandas as pd
from scipy import stats

from satlens.analysis.result import Result
from satlens.errors import AnalysisError

Rule = Literal["equal", "at least", "at most", "covers"]

ROUNDING = 1e-5
"""Tolerance relative to the planted number: models run in fp32. A planted zero is an exact zero."""
RATE_LEVEL = 0.99
"""Level of the intervals of rates: one wrong alarm in a hundred rates."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A row of the scorecard."""

    analysis: str
    """The public function that was asked."""
    control: str
    """What it was asked about."""
    quantity: str
    """Which of its numbers."""
    rule: Rule
    """equal: recovered is planted within the tolerance; at least, at most: planted is a bound, up
    to the tolerance; covers: the interval of the recovered rate has the planted one in it, or
    comes within the tolerance of it."""
    planted: float
    recovered: float
    low: float = math.nan
    """Ends of the analysis' own interval, or of the recovered rate."""
    high: float = math.nan
    tolerance: float = 0.0
    """Absolute."""
    n_documents: int = 0
    n_tokens: int = 0

    @property
    def passed(self) -> bool:
        """Whether the rule holds; never for a number that is not one."""
        gap = self.recovered - self.planted
        match self.rule:
            case "equal":
                return abs(gap) <= self.tolerance
            case "at least":
                return gap >= -self.tolerance
            case "at most":
                return gap <= self.tolerance
            case "covers":
                return self.low - self.tolerance <= self.planted <= self.high + self.tolerance


class Reader:
    """Makes checks from the table of one analysis of one control."""

    def __init__(self, analysis: str, control: str, table: pd.DataFrame | Result) -> None:
        self.analysis, self.control = analysis, control
        self.table = table.table if isinstance(table, Result) else table

    def row(self, **where: Any) -> Mapping[str, Any]:
        """The one row with these values.

        Raises:
            AnalysisError: none or several.
        """
        rows: Any = self.table
        for column, value in where.items():
            rows = rows[(rows[column] == value).fillna(False)]
        if len(rows) != 1:
            raise AnalysisError(f"controls: {self.analysis}: {len(rows)} rows at {where}, not one")
        return rows.iloc[0].to_dict()

    def check(
        self,
        quantity: str,
        planted: float,
        column: str,
        *,
        rule: Rule = "equal",
        tolerance: float | None = None,
        **where: Any,
    ) -> Check:
        """A check of one cell; without a tolerance it is ROUNDING of what was planted."""
        row = self.row(**where)
        return Check(
            analysis=self.analysis,
            control=self.control,
            quantity=quantity,
            rule=rule,
            planted=float(planted),
            recovered=_number(row[column]),
            low=_number(row.get(f"{column}_low")),
            high=_number(row.get(f"{column}_high")),
            tolerance=ROUNDING * abs(planted) if tolerance is None else tolerance,
            n_documents=int(row["n_documents"]),
            n_tokens=int(row["n_tokens"]),
        )


def _number(value: Any) -> float:
    """A cell as a number; what is missing is NaN."""
    return math.nan if value is None or pd.isna(value) else float(value)


def rate_check(
    analysis: str,
    control: str,
    quantity: str,
    planted: float,
    hits: int,
    draws: int,
    tolerance: float = 0.0,
) -> Check:
    """Whether ``hits`` of ``draws`` fit a planted rate (interval of Clopper and Pearson 1934)."""
    ends = stats.binomtest(int(hits), draws).proportion_ci(RATE_LEVEL, method="exact")
    return Check(
        analysis=analysis,
        control=control,
        quantity=f"{quantity}, {draws} draws",
        rule="covers",
        planted=planted,
        recovered=hits / draws,
        low=float(ends.low),
        high=float(ends.high),
        tolerance=tolerance,
    )


def table_of(checks: Iterable[Check]) -> pd.DataFrame:
    """A row a check, in the columns of a result."""
    rows = []
    for check in checks:
        row = asdict(check)
        row["recovered_low"], row["recovered_high"] = row.pop("low"), row.pop("high")
        rows.append({**row, "passed": check.passed, "flags": "" if check.passed else "failed"})
    return pd.DataFrame(rows)
