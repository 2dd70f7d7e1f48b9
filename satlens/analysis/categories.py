"""Which tokens access earlier depths: gates and routes by token category.

For gates the value of a token is its gate, per layer and KV head; for routes that are distributions
it is the weight that a read puts on the embedding. The contrast compares two categories within
documents, raw and with token frequency and position held fixed, because the three are confounded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from satlens.analysis.accumulators import Accumulator, GroupSums, HistogramSum
from satlens.analysis.coding import (
    Coding,
    coding,
    crossed,
    frequency_bands,
    occurrences,
    position_bands,
    subwords,
)
from satlens.analysis.contrasts import contrast_table
from satlens.analysis.inputs import (
    gate_cells,
    interval_columns,
    interval_protocol,
    open_windows,
    opened,
    provenance_of,
    route_cells,
    sites_of,
    split_notes,
    tokenizer_of,
)
from satlens.analysis.result import Result, flag_column, join_marks
from satlens.analysis.stats import N_RESAMPLES, ratio_interval
from satlens.analysis.stream import Observed, Progress, Transform, kept_tokens, n_groups, run
from satlens.data.categories import Categories
from satlens.data.tags import Tags, tag_documents
from satlens.data.windows import Windows
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder
from satlens.models.sites import EMBEDDING, AccessSite

CONTRAST = ("semantic", "functional")


def categories(
    model: Decoder,
    data: Any,
    *,
    split: str = "test",
    by: str = "category",
    contrast: tuple[str, str] = CONTRAST,
    tagger: str = "auto",
    groups: Categories | None = None,
    tags: Tags | None = None,
    cache_dir: str | Path | None = None,
    batch_size: int = 8,
    max_documents: int | None = None,
    max_tokens_per_document: int | None = None,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    progress: Progress | None = None,
    resume_dir: str | Path | None = None,
) -> Result:
    """Mean and open fraction of every gate (mean embedding weight of every route) by category.

    Args:
        data: documents with texts, or anything that gives texts through the model's tokenizer.
        by: ``category``, or ``upos, tag, dep, entity, subword, frequency, position``.
        contrast: the two names whose difference is tested, first minus second.
        tagger: ``auto``, a spaCy pipeline, or ``wordlist``.
        groups: division of universal tags into categories; None is semantic, functional and
            structural.
        tags: tags already made for the same slice of documents, instead of a tagger.
        cache_dir: where tags are kept; None is the user's cache.
        n_resamples, seed: of the bootstrap over documents and of the sign flips.
        resume_dir: where a killed analysis continues from.

    Returns:
        ``categories``: a row a (layer, head, category); its part ``categories_contrasts``: a row a
        (layer, head) with the contrast, when both names of ``contrast`` exist.

    Raises:
        AnalysisError: a model without gates and without such routes; an unknown breakdown; tags of
            other documents.
        DataError: no tagger model, documents without text.
    """
    sites = _sites(model)
    data = opened(data)
    windows = open_windows(
        model,
        data,
        split=split,
        batch_size=batch_size,
        max_documents=max_documents,
        max_tokens_per_document=max_tokens_per_document,
    )
    tokenizer = tokenizer_of(model, data)
    if tags is None:
        if tokenizer is None:
            raise AnalysisError("categories: tokenizer: needed to align tags with tokens")
        tags = tag_documents(
            windows.documents,
            tokenizer,
            tagger=tagger,
            entities=by == "entity",
            categories=groups,
            cache_dir=cache_dir,
            progress=progress,
        )
    _check_tags(tags, windows)
    rows = coding(by, windows, tags)
    pair = [rows.names.index(name) for name in contrast if name in rows.names]
    codings = Codings(
        rows, subwords(tags), crossed(frequency_bands(windows), position_bands(windows))
    )
    reducer = CategorySums(sites, n_groups(windows), codings, pair if len(pair) == 2 else None)
    run(model, windows, [reducer], progress=progress, resume_dir=resume_dir, label="categories")

    options: dict[str, Any] = {"n_resamples": n_resamples, "seed": seed}
    source = provenance_of(model, windows, seed=seed, tokenizer=tokenizer, tagger=tags.tagger)
    cells, has = _cells(sites), occurrences(rows, windows)
    parts: list[Result] = []
    summary: dict[str, Any] = {"by": by, "tagger": tags.tagger, "tokens": _token_counts(reducer)}
    if reducer.contrast is not None:
        both = int(has[:, pair].all(axis=1).sum())
        table, facts = contrast_table(
            reducer.contrast, cells, contrast, both, windows.n_documents, **options
        )
        single = np.array(["single_source" if alone else "" for alone in _alone(sites)])
        table["flags"] = join_marks(single, table["flags"].to_numpy())
        summary["contrast"] = facts
        parts.append(Result("categories_contrasts", table, source, facts, list(_CONTRAST_NOTES)))
    table, protocol = _table(reducer, cells, has.sum(axis=0), windows.n_documents, options)
    summary["interval"] = protocol
    notes = [*_NOTES, *_left_out(model, sites), *split_notes(windows)]
    return Result("categories", table, source, summary, notes, parts=tuple(parts))


_NOTES = (
    "Special tokens and the first token of each context are excluded.",
    "For routes the value of a token is the weight of the embedding in the read; an open fraction "
    "exists for gates alone.",
)
_CONTRAST_NOTES = (
    "delta is the difference of the token-weighted means, delta_document the mean over documents "
    "of the difference within each; the sign-flip test is on the latter, p_adjusted by max-T.",
    "Columns ending in _controlled hold token frequency and position fixed: the difference is "
    "taken within bands and averaged with overlap weights n1 n2 / (n1 + n2).",
    "Cliff's delta comes from a fixed histogram of all tokens, so values in one bin count as ties; "
    "it is raw and has no interval.",
    "Reads of a single source (flag single_source) have weight 1 for every token and no contrast.",
)


def with_categories(sites: Sequence[AccessSite]) -> list[AccessSite]:
    """Sites with one number a token: gates, and distributions over sources with the embedding."""
    return [
        site
        for site in sites
        if site.kind == "gate" or (site.support == "simplex" and site.sources[0] == EMBEDDING)
    ]


def _sites(model: Decoder) -> list[AccessSite]:
    chosen = with_categories(sites_of(model, analysis="categories"))
    if not chosen:
        raise AnalysisError(
            f"categories: this model ({model.cfg.variant}) has no gates, and its routes are no "
            "distributions over sources with the embedding"
        )
    return chosen


def _left_out(model: Decoder, sites: list[AccessSite]) -> list[str]:
    n = len(model.sites) - len(sites)
    return [f"{n} routes are no distributions and were left out."] if n else []


def _check_tags(tags: Tags, windows: Windows) -> None:
    if [(d.id, len(d.upos)) for d in tags.documents] != [
        (d.id, len(d.tokens)) for d in windows.documents
    ]:
        raise AnalysisError("categories: tags: they belong to other documents than the data")


def _cells(sites: list[AccessSite]) -> pd.DataFrame:
    """Gate cells, then route cells: the columns of the values that the reducer sees."""
    gates = [site for site in sites if site.kind == "gate"]
    routes = [site for site in sites if site.kind == "route"]
    tables = [gate_cells(gates)] * bool(gates) + [route_cells(routes)] * bool(routes)
    return pd.concat(tables, ignore_index=True)


def _alone(sites: list[AccessSite]) -> list[bool]:
    """For each cell, whether it is a read of one source, whose weight is 1 whatever the token."""
    gates = [False] * sum(site.n_heads for site in sites if site.kind == "gate")
    return gates + [len(site.sources) == 1 for site in sites if site.kind == "route"]


class Codings:
    """The codings that the categories analysis reads at each batch."""

    def __init__(self, rows: Coding, subword: Coding, strata: Coding) -> None:
        self.rows, self.subword, self.strata = rows, subword, strata


class ContrastSums:
    """Two categories by frequency and position band: sums, counts and histograms.

    ``sums["total"]`` (G, 2, strata, C) and ``sums["n"]`` (G, 2, strata).
    """

    def __init__(self, n_groups: int, n_strata: int, n_cells: int) -> None:
        self.n_strata = n_strata
        shapes = {"total": (2 * n_strata, n_cells), "n": (2 * n_strata,)}
        self.sums = GroupSums(n_groups, shapes)
        self.values = (HistogramSum((n_cells,)), HistogramSum((n_cells,)))

    def add(
        self, groups: np.ndarray, values: Tensor, side: Tensor, strata: Tensor, kept: Tensor
    ) -> None:
        """Add a batch: values (B, T, C); side (B, T) 0, 1 or -1 for neither."""
        chosen = kept & (side >= 0)
        code = side.clamp_min(0) * self.n_strata + strata
        hot = one_hot(code, chosen, 2 * self.n_strata)
        self.sums.add(groups, total=hot.mT @ values, n=hot.sum(1))
        for index, histogram in enumerate(self.values):
            histogram.add(values[chosen & (side == index)])


class CategorySums:
    """Sums of the values of each cell by category, and what the contrast needs."""

    needs_nll = False

    def __init__(
        self,
        sites: list[AccessSite],
        n_groups: int,
        codings: Codings,
        pair: list[int] | None,
    ) -> None:
        self.codings, self.pair = codings, pair
        self.gates = [site.hook for site in sites if site.kind == "gate"]
        self.routes = [site.hook for site in sites if site.kind == "route"]
        self.hooks: dict[str, Transform | None] = {
            **dict.fromkeys(self.gates),
            **dict.fromkeys(self.routes, _embedding_weight),
        }
        self.n_gates = sum(site.n_heads for site in sites if site.kind == "gate")
        n_cells = self.n_gates + len(self.routes)
        names = len(codings.rows.names)
        self.sums = GroupSums(
            n_groups,
            {
                "total": (names, n_cells),
                "open": (names, n_cells),
                "n": (names,),
                "first": (names,),
                "continuation": (names,),
            },
        )
        strata = len(codings.strata.names)
        self.contrast = None if pair is None else ContrastSums(n_groups, strata, n_cells)
        accumulators: dict[str, Accumulator] = {"sums": self.sums}
        if self.contrast is not None:
            accumulators["contrast"] = self.contrast.sums
            for index, histogram in enumerate(self.contrast.values):
                accumulators[f"values{index}"] = histogram
        self.accumulators: Mapping[str, Accumulator] = accumulators
        self.identity: dict[str, Any] = {
            "reducer": "categories",
            "hooks": [*self.gates, *self.routes],
            "codes": [_digest(c) for c in (codings.rows, codings.subword, codings.strata)],
            "pair": pair,
            "groups": n_groups,
        }

    def update(self, seen: Observed) -> None:
        """Add one batch.

        Raises:
            AnalysisError: a gate or weight that is not finite.
        """
        hooks = [*self.gates, *self.routes]
        values = torch.cat([seen.captured[hook] for hook in hooks], dim=-1).double()
        kept = kept_tokens(seen.batch)
        values = values.masked_fill(~kept[..., None], 0.0)
        if not values.isfinite().all():
            raise AnalysisError("categories: a gate or route weight of this model is not finite")
        code = self.codings.rows.of(seen.batch)
        subword = self.codings.subword.of(seen.batch)
        hot = one_hot(code, kept, len(self.codings.rows.names))
        self.sums.add(
            seen.groups,
            total=hot.mT @ values,
            open=hot.mT @ (values != 0).double(),
            n=hot.sum(1),
            first=(hot * (subword == 0)[..., None]).sum(1),
            continuation=(hot * (subword == 1)[..., None]).sum(1),
        )
        if self.contrast is not None and self.pair is not None:
            side = torch.full_like(code, -1)
            side = side.masked_fill(code == self.pair[0], 0).masked_fill(code == self.pair[1], 1)
            strata = self.codings.strata.of(seen.batch)
            self.contrast.add(seen.groups, values, side, strata, kept)


def _embedding_weight(route: Tensor) -> Tensor:
    """(B, T, n) -> (B, T, 1): the embedding is the first source of every read."""
    return route[..., :1]


def one_hot(code: Tensor, chosen: Tensor, n: int) -> Tensor:
    """(B, T, n) fp64: 1 at the code of each chosen token."""
    out = torch.zeros(*code.shape, n, dtype=torch.float64, device=code.device)
    return out.scatter_(2, code[..., None], chosen[..., None].double())


def _digest(codes: Coding) -> str:
    digest = hashlib.sha256("\n".join(codes.names).encode())
    for array in codes.codes:
        digest.update(np.asarray(array).astype("<i8").tobytes())
    return digest.hexdigest()


def _token_counts(reducer: CategorySums) -> dict[str, dict[str, int]]:
    """Tokens of each category, and how many start or continue a word."""
    counts = {name: reducer.sums[name].sum(axis=0) for name in ("n", "first", "continuation")}
    return {
        name: {key: int(values[index]) for key, values in counts.items()}
        for index, name in enumerate(reducer.codings.rows.names)
    }


def _table(
    reducer: CategorySums,
    cells: pd.DataFrame,
    documents: np.ndarray,
    n_documents: int,
    options: dict[str, Any],
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A row a (cell, category), categories within cells, and how its intervals were made.

    Categories without a token are left out; ``documents`` (names,) have each.
    """
    present = reducer.sums["n"].any(axis=0)
    names = np.array(reducer.codings.rows.names, dtype=object)[present]
    sums = {name: reducer.sums[name][:, present] for name in ("n", "first", "continuation")}
    pairs = [reducer.sums[name][:, present].swapaxes(1, 2) for name in ("total", "open")]
    tokens = np.broadcast_to(sums["n"][:, None, :], pairs[0].shape)
    top, bottom = np.stack(pairs, axis=1), np.stack([tokens, tokens], axis=1)
    interval = ratio_interval(top, bottom, **options)
    columns: dict[str, Any] = {"category": np.tile(names, len(cells))}
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
