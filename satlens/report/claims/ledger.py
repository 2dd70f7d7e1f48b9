"""The claims ledger: what papers say, beside what one or several studies show of it.

    claims of every study -> one table, its Markdown, and its summary in plain words

Nothing in it is typed: verdicts, numbers and reasons follow from the tables of the studies.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from satlens.analysis.result import Result
from satlens.report.claims.claimed import CLAIMS
from satlens.report.claims.table import (
    COLUMNS,
    NOT_RUN,
    NOTES,
    claim_row,
    claims,
    ends,
    find,
    number,
    why,
)
from satlens.report.claims.verdicts import TOO_FEW, Claim
from satlens.report.collect import Run
from satlens.report.effects import Finding, Frame, Kind, capital, count, listed

_PLURALS = {
    "holds here": "hold here",
    "does not hold here": "do not hold here",
    "undecided": "are undecided",
    NOT_RUN: "were not run",
}
_KINDS: dict[str, Kind] = {
    "holds here": "found",
    "does not hold here": "found",
    "undecided": "open",
    NOT_RUN: "missing",
}
VERDICTS = tuple(_KINDS)
_HEADS = ("claim", "published", "measured here", "interval", "seeds", "verdict")


def ledger(runs: Sequence[Run]) -> Result:
    """The claims of all studies in one table, every claim in it at least once.

    Of a claim that several studies speak about each measured row stands; what none of them
    measures stands once, with the reason.

    Returns:
        ``ledger``: the columns of :func:`satlens.report.claims.table.claims` and ``study``.
    """
    found = []
    for run in runs:
        table: Frame = claims(run).table
        found += [{"study": run.name, **dict(row)} for _, row in table.iterrows()]
    rows: list[dict[str, object]] = []
    for claim in CLAIMS:
        mine = [row for row in found if find(row) is claim]
        measured = [row for row in mine if row["verdict"] != NOT_RUN]
        rows += measured or _not_run(claim, mine)
    table = pd.DataFrame(rows, columns=["study", *COLUMNS])
    return Result("ledger", table, notes=list(NOTES), keys=("n_seeds",))


def _not_run(claim: Claim, mine: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """The row of a claim that no study measures."""
    if mine and claim.measure is not None:
        return [mine[0]]
    return [{"study": "", **claim_row(claim, None, "")}]


# -- as Markdown -----------------------------------------------------------------------------------


def markdown(result: Result, heading: str = "###") -> str:
    """The ledger as Markdown, a table a paper."""
    table: Frame = result.table
    parts = []
    for source, rows in table.groupby("source", sort=False):
        paper = find(rows.iloc[0]).paper
        trained = f"\n\nTrained there: {paper.trained}." if paper.trained else ""
        lines = ["| " + " | ".join(_HEADS) + " |", "|" + "---|" * len(_HEADS)]
        lines += [_line(row) for _, row in rows.iterrows()]
        parts.append(f"{heading} {source}{trained}\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _line(row: Frame) -> str:
    scale = row["scale_there"]
    same = scale in ("", find(row).paper.trained)
    there = row["published"] if same else f"{row['published']} ({scale})"
    measured, interval, seeds = row["quantity"], "", ""
    if row["verdict"] != NOT_RUN:
        measured = f"{row['quantity']}, study {row['study']}: **{number(row)}**"
        interval = ends(row)
        seeds = str(row["n_seeds"]) if row["n_seeds"] else ""
    judged = f"**{row['verdict']}**: {why(row)}"
    if row["beside_published"]:
        judged += f"; {row['beside_published']}"
    cells = [capital(row["claim"]), there, measured, interval, seeds, judged]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# -- in words --------------------------------------------------------------------------------------


def counted(result: Result) -> Finding:
    """How many claims there are, and how many of their rows have which verdict."""
    table: Frame = result.table
    counts = table["verdict"].value_counts()
    n = [(verdict, int(counts.get(verdict, 0))) for verdict in VERDICTS]
    each = [
        f"{number} {_PLURALS[verdict] if number != 1 else _one(verdict)}" for verdict, number in n
    ]
    claims, rows = table.drop_duplicates(["claim", "source"]), len(table)
    whole = count(len(claims), "claim") + " of the papers"
    if rows > len(claims):
        several = "some are measured in several models, or in several ways"
        return Finding(f"{capital(whole)} have {rows} verdicts ({several}): {listed(each)}.")
    return Finding(f"Of {whole} {listed(each)}.")


def _one(verdict: str) -> str:
    return {"undecided": "is undecided", NOT_RUN: "was not run"}.get(verdict, verdict)


def summary(result: Result) -> dict[str, list[Finding]]:
    """Verdict -> a sentence a claim with its number, in the order of the papers."""
    table: Frame = result.table
    several = table.groupby(["claim", "source", "quantity"])["study"].transform("nunique") > 1
    said: dict[str, list[Finding]] = {}
    for verdict, kind in _KINDS.items():
        rows = table[table["verdict"] == verdict]
        if len(rows):
            said[verdict] = [Finding(_short(row, several[k]), kind) for k, row in rows.iterrows()]
    return said


def _short(row: Frame, several: bool) -> str:
    """A claim with its number, in one sentence; with its study where several measure the same."""
    paper = find(row).paper.name
    if row["verdict"] == NOT_RUN:
        return f"{paper}: {row['claim']} ({row['reason']})."
    seeds = f", {count(int(row['n_seeds']), 'seed')}" if row["n_seeds"] else ""
    where = f" (study `{row['study']}`)" if several else ""
    text = f"{paper}: {row['claim']}{where}: {number(row)} {find(row).unit}, {ends(row)}{seeds}"
    if row["verdict"] == "undecided" and row["flags"] == TOO_FEW:
        text += ", too few to decide"
        return text + "."
    said = row["context"] if row["verdict"] == "holds here" else why(row)
    return f"{text}; {said}." if said else f"{text}."
