"""Sentences about token categories: which heads or reads tell them apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from satlens.report.effects import (
    ALPHA,
    Finding,
    Frame,
    by_seed,
    count,
    effect,
    interval,
    listed,
    signed,
)

_UNIT = {"gate": "head", "route": "read"}
_VALUE = {"gate": "a larger gate", "route": "more weight on the embedding"}
_LESS = {"gate": "a smaller one", "route": "less"}
_ONLY_LESS = {"gate": "a smaller gate", "route": "less weight on the embedding"}


def categories(contrasts: Frame, summary: Mapping[str, Any], who: str = "model") -> list[Finding]:
    """The contrast of two categories with frequency and position held fixed, beside the raw one.

    Args:
        contrasts: the part ``categories_contrasts``.
        summary: of the result ``categories``; its tagger is named.
    """
    findings = []
    for kind, rows in _free(contrasts).groupby("kind", sort=False):
        tested = rows[rows["p_controlled_adjusted"].notna()]
        first, _, second = str(rows["contrast"].iloc[0]).partition(" - ")
        findings.append(_controlled(tested, rows, str(kind), (first, second), who))
        findings += _against_raw(tested, str(kind))
    tagger = str(summary.get("tagger", ""))
    if tagger.startswith("wordlist"):
        findings.append(
            Finding(
                "No spaCy model was used: a list of closed-class words told functional tokens from "
                "the rest.",
                "caveat",
            )
        )
    return findings


def categories_across(arm: str, contrasts: Mapping[int, Frame]) -> list[Finding]:
    """How many heads or reads tell the categories apart in each seed.

    Counts only: a head of one seed is not the same head in another.
    """
    findings = []
    contrasts = {seed: _free(table) for seed, table in contrasts.items()}
    for kind in dict.fromkeys(k for table in contrasts.values() for k in table["kind"]):
        counts, said, names = [], [], ""
        for seed, table in contrasts.items():
            rows = table[table["kind"] == kind]
            chosen = _significant(rows, "p_controlled_adjusted")
            more = int((chosen["delta_document_controlled"].astype(float) > 0).sum())
            counts.append(len(chosen))
            said.append(f"{by_seed(seed)}{len(chosen)} of {len(rows)} ({more} upwards)")
            names = str(rows["contrast"].iloc[0]).replace(" - ", " from ")
        unit = _UNIT.get(str(kind), "cell") + "s"
        settled = "found" if all(counts) else "open"
        text = (
            f"{arm}: {unit} that tell {names} tokens with token frequency and position held fixed: "
            f"{'; '.join(said)}."
        )
        findings.append(Finding(text, settled))
    return findings


def _free(contrasts: Frame) -> Frame:
    """Without reads of a single source, whose weight is 1 for every token."""
    return contrasts[~contrasts["flags"].fillna("").str.contains("single_source")]


def _significant(rows: Frame, p: str) -> Frame:
    return rows[rows[p].astype(float) < ALPHA]


def _controlled(tested: Frame, rows: Frame, kind: str, names: tuple[str, str], who: str) -> Finding:
    unit = _UNIT.get(kind, "cell")
    chosen = _significant(tested, "p_controlled_adjusted")
    within = "with token frequency and position held fixed"
    if not len(chosen):
        least = float(tested["p_controlled_min"].min()) if len(tested) else 1.0
        why = f" With so few documents no p below {least:.2g} is possible." if least > ALPHA else ""
        text = (
            f"{who}: no {unit} of {len(rows)} is found to tell {names[0]} from {names[1]} tokens "
            f"{within} (adjusted p >= {ALPHA} everywhere).{why}"
        )
        return Finding(text, "open")
    effects = chosen["delta_document_controlled"].astype(float)
    more, less = int((effects > 0).sum()), int((effects < 0).sum())
    than = f"than {names[1]} ones"
    said = [f"{names[0]} tokens get {_VALUE[kind]} {than} in {more}"] if more else []
    if less:
        alone = f"{names[0]} tokens get {_ONLY_LESS[kind]} {than} in {less}"
        said.append(f"{_LESS[kind]} in {less}" if more else alone)
    row = chosen.loc[chosen["delta_controlled"].abs().idxmax()]
    largest, raw = effect(row, "delta_controlled"), effect(row, "delta")
    place = f"L{int(row['layer'])} head {int(row['head'])}" if kind == "gate" else row["site"]
    rest = len(rows) - len(chosen)
    others = f"; in the other {rest} nothing is established" if rest else ""
    text = (
        f"{who}: {listed(said)} of {count(len(rows), unit)}, {within} (adjusted p < {ALPHA})"
        f"{others}. Largest: {place}, "
        f"{signed(largest.value)}, {interval(largest)}; raw {signed(raw.value)}, {interval(raw)}, "
        "Cliff's "
        f"delta {signed(float(row['cliffs_delta']), 2)}."
    )
    return Finding(text)


def _against_raw(tested: Frame, kind: str) -> list[Finding]:
    """How many raw contrasts frequency and position leave, take away or reverse."""
    raw = _significant(tested, "p_adjusted")
    if not len(raw):
        return []
    still = raw["p_controlled_adjusted"].astype(float) < ALPHA
    signs = (
        np.sign(raw["delta_document"].astype(float)),
        np.sign(raw["delta_document_controlled"].astype(float)),
    )
    opposite = int((still & (signs[0] != signs[1])).sum())
    gone = int((~still).sum())
    unit = _UNIT.get(kind, "cell")
    if not gone and not opposite:
        return [
            Finding(
                f"The raw contrast is established in {count(len(raw), unit)}, and in each it "
                "remains "
                "with frequency and position held fixed."
            )
        ]
    said = [f"{gone} no longer {'shows' if gone == 1 else 'show'} it"] if gone else []
    if opposite:
        said.append(f"{opposite} {'has' if opposite == 1 else 'have'} the opposite sign")
    text = (
        f"The raw contrast is established in {count(len(raw), unit)}; with frequency and position "
        f"held fixed {listed(said)}."
    )
    return [Finding(text)]
