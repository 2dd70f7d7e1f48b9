"""Tables of the categories analysis, from what its reducers added up.

Shapes: C cells (gates head by head, then routes), G document groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from satlens.analysis.engine.coding import occurrences
from satlens.analysis.engine.descriptive import Inputs
from satlens.analysis.engine.inputs import (
    documents_in,
    gate_cells,
    interval_columns,
    interval_protocol,
    route_cells,
)
from satlens.analysis.result import Result, flag_column, join_marks
from satlens.analysis.stats import Adjustment, ratio_interval
from satlens.analysis.tokens.contrasts import contrast_table
from satlens.analysis.tokens.sums import CategorySums, CodedLabels, category_sites
from satlens.data.windows import Windows
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite

_NOTES = (
    "Special tokens and the first token of each context are excluded.",
    "For routes the value of a token is the weight of the embedding in the read; an open fraction "
    "exists for gates alone.",
)
_CONTRAST_NOTES = (
    "delta is the difference of the token-weighted means, delta_document the mean over documents "
    "of the difference within each; the sign-flip test is on the latter.",
    "Columns ending in _controlled hold token frequency and position fixed: the difference is "
    "taken within bands and averaged with overlap weights n1 n2 / (n1 + n2).",
    "Cliff's delta comes from a fixed histogram of all tokens, so values in one bin count as ties; "
    "it is raw and has no interval.",
    "Reads of a single source (flag single_source) have weight 1 for every token and no contrast.",
)


def category_notes(model: Decoder) -> list[str]:
    """What a reader of the tables must know."""
    n = len(model.sites) - len(category_sites(model))
    left_out = [f"{n} routes are no distributions and were left out."] if n else []
    return [*_NOTES, *left_out]


def cells_of(sites: Sequence[AccessSite]) -> pd.DataFrame:
    """Gate cells, then route cells: the columns of the values that the reducers see."""
    gates = [site for site in sites if site.kind == "gate"]
    routes = [site for site in sites if site.kind == "route"]
    tables = [gate_cells(gates)] * bool(gates) + [route_cells(routes)] * bool(routes)
    return pd.concat(tables, ignore_index=True)


def token_counts(reducer: CategorySums) -> dict[str, dict[str, int]]:
    """Tokens of each category, and how many start or continue a word."""
    counts = {name: reducer.sums[name].sum(axis=0) for name in ("n", "first", "continuation")}
    return {
        name: {key: int(values[index]) for key, values in counts.items()}
        for index, name in enumerate(reducer.labels.names)
    }


def category_table(
    reducer: CategorySums, cells: pd.DataFrame, inputs: Inputs
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A row a (cell, category), categories within cells, and how its intervals were made.

    Categories without a token are left out.
    """
    n_documents = inputs.windows.n_documents
    present = reducer.sums["n"].any(axis=0)
    names = np.array(reducer.labels.names, dtype=object)[present]
    sums = {name: reducer.sums[name][:, present] for name in ("n", "first", "continuation")}
    pairs = [reducer.sums[name][:, present].swapaxes(1, 2) for name in ("total", "open")]
    tokens = np.broadcast_to(sums["n"][:, None, :], pairs[0].shape)
    top, bottom = np.stack(pairs, axis=1), np.stack([tokens, tokens], axis=1)
    interval = ratio_interval(top, bottom, **inputs.options)
    columns: dict[str, Any] = {
        "by": np.full(len(cells) * len(names), reducer.by, dtype=object),
        "category": np.tile(names, len(cells)),
    }
    gate = (cells["kind"] == "gate").to_numpy()[:, None]
    columns |= {
        key: value.ravel() for key, value in interval_columns("mean", interval, 0).items()
    } | {
        key: np.where(gate, value, np.nan).ravel()
        for key, value in interval_columns("open_fraction", interval, 1).items()
    }
    mean_flags, open_flags = interval.flags
    flags = {"mean": mean_flags.ravel()}
    flags["open_fraction"] = np.where(gate, open_flags, mean_flags).ravel()
    documents, _ = _documents_with(reducer, inputs.windows)
    counts = {
        "n_first": sums["first"].sum(axis=0).astype(int),
        "n_continuation": sums["continuation"].sum(axis=0).astype(int),
        "n_documents": documents[present],
        "n_tokens": sums["n"].sum(axis=0),
    }
    table = (
        cells.loc[cells.index.repeat(len(names))]
        .reset_index(drop=True)
        .assign(
            **columns,
            **{name: np.tile(values, len(cells)) for name, values in counts.items()},
            flags=flag_column(flags),
        )
    )
    return table, interval_protocol(interval, n_documents)


def contrast_result(
    name: str,
    reducer: CategorySums,
    inputs: Inputs,
    source: dict[str, Any],
    adjustment: Adjustment,
) -> Result:
    """The difference of the two categories of a reducer that has a contrast, a row a cell."""
    assert reducer.contrast is not None and reducer.pair is not None
    sites, names = category_sites(inputs.model), reducer.labels.names
    _, both = _documents_with(reducer, inputs.windows)
    table, facts = contrast_table(
        reducer.contrast,
        cells_of(sites),
        (names[reducer.pair[0]], names[reducer.pair[1]]),
        both,
        inputs.windows.n_documents,
        adjustment=adjustment,
        **inputs.options,
    )
    single = np.array(["single_source" if alone else "" for alone in _alone(sites)])
    table["flags"] = join_marks(single, table["flags"].to_numpy())
    notes = [*_CONTRAST_NOTES, f"p_adjusted is adjusted by {facts['adjustment']}."]
    return Result(name, table, source, facts, notes)


def _alone(sites: Sequence[AccessSite]) -> list[bool]:
    """For each cell, whether it is a read of one source, whose weight is 1 whatever the token."""
    gates = [False] * sum(site.n_heads for site in sites if site.kind == "gate")
    return gates + [len(site.sources) == 1 for site in sites if site.kind == "route"]


def _documents_with(reducer: CategorySums, windows: Windows) -> tuple[np.ndarray, int]:
    """Documents with each category, (names,), and with both sides of the contrast.

    Of labels that only a pass gives, documents are told apart as far as their groups are.
    """
    if isinstance(reducer.labels, CodedLabels):
        has = occurrences(reducer.labels.coding, windows)
        documents = has.sum(axis=0)
    else:
        n = reducer.sums["n"]
        has, documents = n > 0, documents_in(n, windows.n_documents)
    both = 0 if reducer.pair is None else int(has[:, reducer.pair].all(axis=1).sum())
    return documents, both
