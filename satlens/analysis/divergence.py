"""How far two routes over the same sources differ: Jensen-Shannon divergence.

Between two roles of one read (queries and keys against values), or between the same site of two
checkpoints of equal shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from satlens.analysis.accumulators import Accumulator, GroupSums
from satlens.analysis.inputs import (
    concatenated,
    documents_in,
    initial_model,
    interval_columns,
    interval_protocol,
    interval_summary,
    open_windows,
    opened,
    provenance_of,
    sites_of,
    split_notes,
    tokenizer_of,
)
from satlens.analysis.reducers import membership
from satlens.analysis.result import Result, flag_column, join_marks
from satlens.analysis.stats import (
    N_RESAMPLES,
    function_interval,
    jensen_shannon,
    ratio_interval,
)
from satlens.analysis.stream import (
    Observed,
    Progress,
    Transform,
    fold,
    kept_tokens,
    measuring,
    n_groups,
    observe,
    refuse_foreign_hooks,
    run,
    weights_sha256,
)
from satlens.data.windows import Windows
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite


class Pair(NamedTuple):
    """Two sites whose weights run over the same sources."""

    first: AccessSite
    second: AccessSite

    @property
    def roles(self) -> str:
        """The roles compared: ``qk|v``, or one for the same role of two checkpoints."""
        roles = dict.fromkeys((self.first.role, self.second.role))
        return "|".join(roles)


def divergence(
    model: Decoder,
    data: Any,
    *,
    other: Decoder | None = None,
    base: float | None = None,
    split: str = "test",
    baseline: bool = True,
    batch_size: int = 8,
    max_documents: int | None = None,
    max_tokens_per_document: int | None = None,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    progress: Progress | None = None,
    resume_dir: str | Path | None = None,
) -> Result:
    """Jensen-Shannon divergence between the routes of each read, in nats unless ``base`` is given.

    Args:
        data: a token tensor, a text, documents, a path or a prepared dataset.
        other: a second checkpoint of equal shape: the same site of both is compared, instead of
            two roles of one read.
        base: of the logarithm; None is e.
        split: of prepared data.
        baseline: repeat the pass on the untrained model, for the columns ``<stat>_init``.
        n_resamples, seed: of the bootstrap over documents.
        resume_dir: where a killed analysis continues from.

    Returns:
        ``divergence``: a row a read with ``js_token`` (mean over tokens) and ``js_mean`` (of the
        token-averaged routes).

    Raises:
        AnalysisError: no two routes over the same sources; checkpoints of different shapes.
    """
    pairs = _pairs(model, other)
    data = opened(data)
    windows = open_windows(
        model,
        data,
        split=split,
        batch_size=batch_size,
        max_documents=max_documents,
        max_tokens_per_document=max_tokens_per_document,
    )
    passes: dict[str, Any] = {"progress": progress, "resume_dir": resume_dir}
    sums = _measure(model, other, windows, pairs, "divergence", passes)
    initial = None
    if baseline and other is None:
        fresh, _ = initial_model(model)
        initial = _measure(fresh, None, windows, pairs, "divergence-init", passes)
        del fresh
    options: dict[str, Any] = {"n_resamples": n_resamples, "seed": seed}
    facts: dict[str, Any] = (
        {}
        if other is None
        else {"other": {**other.provenance, "weights_sha256": weights_sha256(other)}}
    )
    return Result(
        "divergence",
        _table(pairs, sums, initial, base, windows.n_documents, options),
        provenance_of(model, windows, seed=seed, tokenizer=tokenizer_of(model, data), **facts),
        _summary(pairs, sums, base, windows.n_documents, options),
        [_bound(base), *_NOTES, *split_notes(windows)],
    )


_NOTES = (
    "js_token is the mean over tokens of the divergence, js_mean the divergence of the "
    "token-averaged routes: never larger, and biased upward on few tokens.",
    "Reads of a single source are 0 by definition and left out of the means in the summary.",
    "Special tokens and the first token of each context are excluded.",
)


def unit_of(base: float | None) -> str:
    """What a divergence is measured in: nats, bits, or the logarithm's base by number."""
    if base is None:
        return "nats"
    return "bits" if base == 2 else f"units of log base {base:g}"


def ceiling_of(base: float | None) -> float:
    """The largest Jensen-Shannon divergence: log 2 in the given base."""
    return math.log(2) * _per_nat(base)


def _per_nat(base: float | None) -> float:
    return 1.0 if base is None else 1.0 / math.log(base)


def _bound(base: float | None) -> str:
    return (
        f"The divergence itself, not its square root; at most log 2 = {ceiling_of(base):.3f} "
        f"{unit_of(base)}."
    )


def _pairs(model: Decoder, other: Decoder | None) -> list[Pair]:
    sites = sites_of(model, kind="route", analysis="divergence")
    if other is not None:
        places = {(s.hook, s.sources): s for s in other.sites if s.kind == "route"}
        theirs = {(s.hook, s.sources): s for s in sites}
        if places.keys() != theirs.keys():
            raise AnalysisError("divergence: other: its routes differ in place or sources")
        if (model.cfg.d_vocab, model.cfg.n_ctx) != (other.cfg.d_vocab, other.cfg.n_ctx):
            raise AnalysisError("divergence: other: its d_vocab or n_ctx differs")
        return [Pair(site, places[site.hook, site.sources]) for site in sites]
    pairs = [
        Pair(first, second)
        for index, first in enumerate(sites)
        for second in sites[index + 1 :]
        if (first.layer, first.sublayer, first.sources)
        == (second.layer, second.sublayer, second.sources)
    ]
    if not pairs:
        raise AnalysisError(
            f"divergence: no read of this model ({model.cfg.variant}) has two routes over the "
            "same sources; give a second checkpoint as other"
        )
    return pairs


class RoutePairs:
    """Divergences of pairs of routes and the sums of both, where both are distributions."""

    needs_nll = False

    def __init__(self, pairs: Sequence[Pair], n_groups: int) -> None:
        self.first = [pair.first.hook for pair in pairs]
        self.second = [pair.second.hook for pair in pairs]
        self.hooks: dict[str, Transform | None] = dict.fromkeys((*self.first, *self.second))
        widths = [len(pair.first.sources) for pair in pairs]
        self.site_of = np.repeat(np.arange(len(pairs)), widths)
        shapes: dict[str, tuple[int, ...]] = {
            name: (len(pairs),) for name in ("n", "undefined", "js")
        }
        shapes |= {name: (sum(widths),) for name in ("first", "second")}
        self.sums = GroupSums(n_groups, shapes)
        self.accumulators: Mapping[str, Accumulator] = {"sums": self.sums}
        self.identity: dict[str, Any] = {
            "reducer": "route pairs",
            "hooks": [self.first, self.second],
            "groups": n_groups,
        }

    def update(self, seen: Observed) -> None:
        """Add one batch of one model."""
        self.compare(seen, seen.captured)

    def compare(self, seen: Observed, theirs: Mapping[str, Tensor]) -> None:
        """Add one batch: the first routes of ``seen``, the second ones of ``theirs``."""
        p, q = concatenated(seen.captured, self.first), concatenated(theirs, self.second)
        member = torch.from_numpy(membership(self.site_of)).to(p)
        column = torch.from_numpy(self.site_of).to(p.device)
        kept = kept_tokens(seen.batch)[..., None]
        sums = [r.nan_to_num(0.0, 0.0, 0.0) @ member for r in (p, q)]
        proper = ((p >= 0) & (q >= 0) & p.isfinite() & q.isfinite()).double() @ member
        defined = (proper == member.sum(0)) & (sums[0] > 0) & (sums[1] > 0)
        counted = defined & kept
        here = counted[..., column]
        p, q = (
            torch.where(here, r / total[..., column], 0.0)
            for r, total in zip((p, q), sums, strict=True)
        )
        self.sums.add(
            seen.groups,
            n=counted.sum(1),
            undefined=(kept & ~defined).sum(1),
            js=(_divergence_terms(p, q) @ member).clamp(0.0, math.log(2)).sum(1),
            first=p.sum(1),
            second=q.sum(1),
        )


def _divergence_terms(p: Tensor, q: Tensor) -> Tensor:
    """What each source adds to the divergence in nats; 0 where neither route has weight."""
    middle = ((p + q) / 2).clamp_min(torch.finfo(torch.float64).tiny)
    return (torch.xlogy(p, p / middle) + torch.xlogy(q, q / middle)) / 2


def _measure(
    model: Decoder,
    other: Decoder | None,
    windows: Windows,
    pairs: Sequence[Pair],
    label: str,
    passes: dict[str, Any],
) -> RoutePairs:
    reducer = RoutePairs(pairs, n_groups(windows))
    if other is None:
        run(model, windows, [reducer], label=label, **passes)
        return reducer
    if passes["resume_dir"] is not None:
        refuse_foreign_hooks(other)

    def step_over(batch: Any, groups: np.ndarray) -> None:
        mine = observe(model, batch, reducer.first)
        theirs = observe(other, batch, reducer.second)
        reducer.compare(Observed(mine, batch, groups, None), theirs)

    fold(
        model,
        windows,
        reducer.accumulators,
        step_over,
        identity=[reducer.identity, weights_sha256(other)],
        inside=lambda: measuring(other),
        label=label,
        **passes,
    )
    return reducer


def _js_of_means(site_of: np.ndarray, base: float | None) -> Any:
    """JS of summed routes (..., n), (..., n) -> (..., reads)."""
    columns = [np.flatnonzero(site_of == site) for site in range(site_of.max() + 1)]

    def of(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        values = [jensen_shannon(first[..., c], second[..., c], base) for c in columns]
        return np.stack(values, axis=-1)

    return of


def _table(
    pairs: Sequence[Pair],
    measured: RoutePairs,
    initial: RoutePairs | None,
    base: float | None,
    n_documents: int,
    options: dict[str, Any],
) -> pd.DataFrame:
    unit = _per_nat(base)
    sums, of_means = measured.sums, _js_of_means(measured.site_of, base)
    token = ratio_interval(sums["js"] * unit, sums["n"], **options)
    averaged = function_interval(
        of_means, sums["first"], sums["second"], weights=sums["n"], **options
    )
    columns: dict[str, Any] = interval_columns("js_token", token)
    columns |= interval_columns("js_mean", averaged)
    if initial is not None:
        before = initial.sums
        columns["js_token_init"] = before["js"].sum(0) * unit / before["n"].sum(0)
        columns["js_mean_init"] = of_means(before["first"].sum(0), before["second"].sum(0))
    single = np.array(["single_source" if len(p.first.sources) == 1 else "" for p in pairs])
    return pd.DataFrame(
        {
            "site": [_read_name(pair) for pair in pairs],
            "layer": [pair.first.layer for pair in pairs],
            "sublayer": [pair.first.sublayer for pair in pairs],
            "role": [pair.roles for pair in pairs],
            "measure": "jensen_shannon_divergence",
            "base": "e" if base is None else f"{base:g}",
            **columns,
            "n_sources": [len(pair.first.sources) for pair in pairs],
            "n_undefined": sums["undefined"].sum(axis=0).astype(int),
            "n_documents": documents_in(sums["n"], n_documents),
            "n_tokens": sums["n"].sum(axis=0),
            "flags": join_marks(
                single, flag_column({"js_token": token.flags, "js_mean": averaged.flags})
            ),
        }
    )


def _read_name(pair: Pair) -> str:
    """``L3.attn``: the read that both routes belong to; a site's own name if they are one."""
    site = pair.first
    return site.name if site.role == pair.second.role else f"L{site.layer}.{site.sublayer}"


def _summary(
    pairs: Sequence[Pair],
    measured: RoutePairs,
    base: float | None,
    n_documents: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    several = np.array([len(pair.first.sources) > 1 for pair in pairs])
    unit = _per_nat(base)
    sums = measured.sums
    summary: dict[str, Any] = {
        "measure": "Jensen-Shannon divergence",
        "unit": unit_of(base),
        "ceiling": ceiling_of(base),
        "n_reads": len(pairs),
        "n_single_source": int((~several).sum()),
        "n_undefined": int(sums["undefined"].sum()),
    }
    if several.any():
        n = sums["n"][:, several].sum(axis=1)
        token = ratio_interval(sums["js"][:, several].sum(axis=1) * unit, n, **options)
        of_means = _js_of_means(measured.site_of, base)

        def mean_of_reads(first: np.ndarray, second: np.ndarray) -> np.ndarray:
            return of_means(first, second)[..., several].mean(axis=-1)

        averaged = function_interval(
            mean_of_reads, sums["first"], sums["second"], weights=n, **options
        )
        summary |= {
            "js_token": interval_summary(token),
            "js_mean": interval_summary(averaged),
            "interval": interval_protocol(token, n_documents),
        }
    return summary
