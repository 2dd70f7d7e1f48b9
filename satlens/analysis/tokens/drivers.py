"""What drives a gate: how much of its variance over tokens simple facts about them predict.

Factors: the token's id, the id before it, its category, its position band, and all four together
with effects that add up. Each effect is fitted on other documents (:mod:`satlens.analysis.
reference`), so a factor that says nothing explains nothing, whatever its number of levels.

Shapes: B rows, T positions, N tokens, F factors, L levels of all factors, C cells, M fits,
G document groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from satlens.analysis.engine.accumulators import Accumulator, GroupSums
from satlens.analysis.engine.coding import Coding, position_bands
from satlens.analysis.engine.descriptive import Inputs
from satlens.analysis.engine.inputs import (
    documents_in,
    interval_columns,
    interval_protocol,
    interval_summary,
)
from satlens.analysis.engine.reference import Reference
from satlens.analysis.engine.stream import Observed, run
from satlens.analysis.result import flag_column
from satlens.analysis.stats import ratio_interval
from satlens.analysis.tokens.effects import (
    joint_effects,
    level_counts,
    shrunk_effects,
    variance_ratio,
    without_rounding,
)
from satlens.analysis.tokens.sums import SiteValues, digest, kept_inputs
from satlens.data.tags import Tags
from satlens.data.windows import Windows
from satlens.models.sites import AccessSite

FACTORS = ("token", "previous_token", "category", "position")
DRIVERS = (*FACTORS, "all")
DRIVER_NOTES = (
    "r2 is the share of a cell's variance over tokens that a driver predicts out of sample: 1 - "
    "its squared error by that of the fitted mean. Below 0 it does worse than the mean.",
    "The driver all adds up the effects of the others. Effects of levels with few tokens are "
    "shrunk as the variances within and between levels say; ids not fitted on get the mean.",
    "Drivers overlap: a token's id settles most of its category, so shares do not add up.",
)
_CHUNK = 2**18
"""Tokens counted at a time."""


class Levels:
    """The levels of every factor, numbered through; token ids are those of the fitted documents.

    The last level of the two factors of token ids is that of ids which were not seen there.
    """

    def __init__(self, reference: Reference, d_vocab: int) -> None:
        windows, kept = reference.windows, kept_inputs(reference.windows)
        places = [
            (d.tokens, np.flatnonzero(m)) for d, m in zip(windows.documents, kept, strict=True)
        ]
        seen = np.unique(np.concatenate([ids[at - back] for ids, at in places for back in (0, 1)]))
        self._number = np.full(d_vocab, len(seen), dtype=np.int64)
        self._number[seen] = np.arange(len(seen))
        n_bands = len(position_bands(windows).names)
        n_ids, n_categories = len(seen) + 1, len(reference.tags.categories.names)
        self.counts = (n_ids, n_ids, n_categories, n_bands)
        self.starts = np.concatenate([[0], np.cumsum(self.counts)])
        self.n = int(self.starts[-1])

    def of_factor(self, factor: int) -> slice:
        """Where the levels of a factor are among those of all."""
        return slice(int(self.starts[factor]), int(self.starts[factor + 1]))

    def codings(self, windows: Windows, tags: Tags) -> list[Coding]:
        """The level of each token in each factor, numbered through."""
        ids = [self._number[d.tokens] for d in windows.documents]
        before = [np.append(self.counts[0] - 1, own[:-1]) for own in ids]
        codes = [ids, before, [d.category for d in tags.documents], position_bands(windows).codes]
        return [
            Coding((factor,), [start + np.asarray(own, dtype=np.int64) for own in each])
            for factor, start, each in zip(FACTORS, self.starts, codes, strict=False)
        ]


@dataclass(frozen=True, kw_only=True, eq=False)
class Fits:
    """Effects of each fit."""

    levels: Levels
    reference: Reference
    mean: np.ndarray
    """(M, C)."""
    single: np.ndarray
    """(M, L, C): effects of each factor alone."""
    joint: np.ndarray
    """(M, L, C): effects of all factors together."""
    tokens: np.ndarray
    """(M, L): tokens of each level."""


# -- fitting ---------------------------------------------------------------------------------------


class LevelSums:
    """Sums of the values of each cell by level, for each fit."""

    needs_nll = False

    def __init__(self, sites: Sequence[AccessSite], levels: Levels, reference: Reference) -> None:
        self.values = SiteValues(sites)
        self.hooks = self.values.hooks
        self.levels, self.fit_of = levels, reference.fit_of
        self.codings = levels.codings(reference.windows, reference.tags)
        self.kept = kept_inputs(reference.windows)
        n_fits, n_cells = reference.n_fits, self.values.n_cells
        self.sums = GroupSums(n_fits * levels.n, {"total": (n_cells,)})
        self.squares = GroupSums(n_fits, {"squares": (n_cells,)})
        self.accumulators: Mapping[str, Accumulator] = {"sums": self.sums, "squares": self.squares}
        self.identity: dict[str, Any] = {
            "reducer": "driver levels",
            "hooks": list(self.hooks),
            "codes": [digest(coding) for coding in self.codings],
            "fits": self.fit_of.tolist(),
        }

    def update(self, seen: Observed) -> None:
        """Add one batch.

        Raises:
            AnalysisError: a gate or weight that is not finite.
        """
        values, kept = self.values.of(seen)
        fit = self.fit_of[seen.batch.document.cpu().numpy()]
        self.squares.add(fit, squares=values.square().sum(1))
        code = torch.stack([coding.of(seen.batch) for coding in self.codings], dim=-1)
        offset = torch.from_numpy(fit * self.levels.n).to(code.device)[:, None, None]
        place = (code + offset)[kept].cpu()  # (N, F)
        own = values[kept].cpu()
        found, which = place.unique(return_inverse=True)
        total = own.new_zeros(len(found), own.shape[1])
        for factor in which.unbind(1):
            total.index_add_(0, factor, own)
        self.sums.add(found.numpy(), total=total)


def fit_drivers(inputs: Inputs, sites: Sequence[AccessSite], reference: Reference) -> Fits:
    """Effects of every level, from a pass over the documents to fit on.

    Raises:
        AnalysisError: a gate or weight that is not finite.
    """
    model = inputs.model
    levels = Levels(reference, model.cfg.d_vocab)
    reducer = LevelSums(sites, levels, reference)
    run(model, reference.windows, [reducer], label="categories-drivers", **inputs.passes)
    n_fits = reference.n_fits
    totals = reducer.sums["total"].reshape(n_fits, levels.n, -1)
    squares = reducer.squares["squares"]
    fitted = [_fit(reducer, fit, totals[fit], squares[fit]) for fit in range(n_fits)]
    mean, single, joint, tokens = (np.stack(each) for each in zip(*fitted, strict=True))
    return Fits(
        levels=levels, reference=reference, mean=mean, single=single, joint=joint, tokens=tokens
    )


def _fit(
    reducer: LevelSums, fit: int, total: np.ndarray, squares: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Mean, effects of single factors and of all together, and tokens by level."""
    levels = reducer.levels
    counts = level_counts(_chunks(reducer, fit), levels.n)
    n = counts.diagonal()
    own = levels.of_factor(0)
    size = max(n[own].sum(), 1.0)
    mean = total[own].sum(axis=0) / size
    centred = total - n[:, None] * mean
    about = without_rounding((squares - size * mean**2)[None], squares[None])[0]
    ratio, single = np.zeros(total.shape), np.zeros(total.shape)
    for factor in range(len(FACTORS)):
        at = levels.of_factor(factor)
        ratio[at] = variance_ratio(centred[at], n[at], about)
        single[at] = shrunk_effects(centred[at], n[at], ratio[at])
    return mean, single, joint_effects(counts, centred, ratio), n


def _chunks(reducer: LevelSums, fit: int) -> Iterator[np.ndarray]:
    """Levels (N, F) of the tokens that enter a fit, some documents at a time."""
    waiting, n_waiting = [], 0
    for k, kept in enumerate(reducer.kept):
        if reducer.fit_of[k] != fit:
            continue
        codes = np.stack([coding.codes[k][kept] for coding in reducer.codings], axis=1)
        waiting.append(codes)
        n_waiting += len(codes)
        if n_waiting >= _CHUNK:
            yield np.concatenate(waiting)
            waiting, n_waiting = [], 0
    if waiting:
        yield np.concatenate(waiting)


# -- scoring ---------------------------------------------------------------------------------------


class DriverSums:
    """Squared errors of the predictions of each driver, and of the mean alone."""

    needs_nll = False

    def __init__(
        self, sites: Sequence[AccessSite], n_groups: int, fits: Fits, windows: Windows, tags: Tags
    ) -> None:
        self.values = SiteValues(sites)
        self.hooks = self.values.hooks
        self.fits = fits
        self.codings = fits.levels.codings(windows, tags)
        self.unseen = _unseen_shares(fits, self.codings, kept_inputs(windows))
        cells = self.values.n_cells
        shapes = {"residual": (len(DRIVERS), cells), "null": (cells,), "squares": (cells,), "n": ()}
        self.sums = GroupSums(n_groups, shapes)
        self.accumulators: Mapping[str, Accumulator] = {"sums": self.sums}
        self.identity: dict[str, Any] = {
            "reducer": "drivers",
            "hooks": list(self.hooks),
            "fitted_on": fits.reference.windows.sha256,
            "codes": [digest(coding) for coding in self.codings],
            "fits": fits.reference.predicted_by.tolist(),
            "groups": n_groups,
        }

    def update(self, seen: Observed) -> None:
        """Add one batch.

        Raises:
            AnalysisError: a gate or weight that is not finite.
        """
        values, kept = self.values.of(seen)
        fit = self.fits.reference.predicted_by[seen.batch.document.cpu().numpy()]
        which = torch.from_numpy(fit).to(values.device)
        mean, single, joint = (
            torch.from_numpy(table).to(values.device)
            for table in (self.fits.mean, self.fits.single, self.fits.joint)
        )
        error = values - mean[which][:, None]
        left, together = [], error
        for coding in self.codings:
            code = coding.of(seen.batch)
            left.append(_square_sum(error - single[which[:, None], code], kept))
            together = together - joint[which[:, None], code]
        self.sums.add(
            seen.groups,
            residual=torch.stack([*left, _square_sum(together, kept)], dim=1),
            null=_square_sum(error, kept),
            squares=values.square().sum(1),
            n=kept.sum(1),
        )


def _square_sum(error: Tensor, kept: Tensor) -> Tensor:
    """(B, T, C) -> (B, C) over the tokens that count."""
    return error.masked_fill(~kept[..., None], 0.0).square().sum(1)


def _unseen_shares(
    fits: Fits, codings: Sequence[Coding], kept: Sequence[np.ndarray]
) -> dict[str, float]:
    """Share of the measured tokens whose level has no token in the fit, by factor."""
    shares = {}
    for factor, coding in zip(FACTORS, codings, strict=True):
        unseen = total = 0
        for codes, mask, fit in zip(coding.codes, kept, fits.reference.predicted_by, strict=True):
            unseen += int((fits.tokens[fit][codes[mask]] == 0).sum())
            total += int(mask.sum())
        shares[factor] = unseen / max(total, 1)
    return shares


def driver_table(
    reducer: DriverSums, cells: pd.DataFrame, n_documents: int, options: Mapping[str, Any]
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A row a (cell, driver) with the share of variance explained, and the headline numbers."""
    sums = {name: reducer.sums[name] for name in ("residual", "null", "squares", "n")}
    null = without_rounding(sums["null"], sums["squares"])[:, None]
    gained = np.where(null.sum(axis=0) > 0, null - sums["residual"], 0.0)
    interval = ratio_interval(gained, np.broadcast_to(null, gained.shape), **options)
    shape = (len(cells), len(DRIVERS))
    columns = {
        name: values.T.ravel() for name, values in interval_columns("r2", interval, ...).items()
    }
    table = (
        cells.loc[cells.index.repeat(len(DRIVERS))]
        .reset_index(drop=True)
        .assign(
            driver=np.tile(np.array(DRIVERS, dtype=object), len(cells)),
            **columns,
            n_documents=np.broadcast_to(documents_in(sums["n"], n_documents), shape).ravel(),
            n_tokens=sums["n"].sum(),
            flags=flag_column({"r2": interval.flags.T.ravel()}),
        )
    )
    facts = {
        **reducer.fits.reference.facts,
        "unseen": reducer.unseen,
        "pooled": _pooled(gained, null, cells, options),
        "interval": interval_protocol(interval, n_documents),
    }
    return table, facts


def _pooled(
    gained: np.ndarray, null: np.ndarray, cells: pd.DataFrame, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Share of the variance within all cells of a kind together, by driver."""
    found = {}
    for kind in dict.fromkeys(cells["kind"]):
        chosen = (cells["kind"] == kind).to_numpy()
        top = gained[..., chosen].sum(axis=-1)
        bottom = np.broadcast_to(null[..., chosen].sum(axis=-1), top.shape)
        interval = ratio_interval(top, bottom, **options)
        found[str(kind)] = {
            driver: interval_summary(interval, k) for k, driver in enumerate(DRIVERS)
        }
    return found
