"""How far two routes differ: Jensen-Shannon divergence.

Between two roles of one read (queries and keys against values), between the same site of two
checkpoints of equal shape, or between any two reads by their effective routes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from satlens.analysis.depth.effective import windows_at_once
from satlens.analysis.depth.pairs import (
    OVER,
    ComponentSizes,
    Over,
    Pair,
    RoutePairs,
    SourceWeights,
    pairs_over_sources,
    pairs_over_sublayers,
)
from satlens.analysis.engine.descriptive import Descriptive, Inputs, inputs_of, measure
from satlens.analysis.engine.inputs import (
    documents_in,
    interval_columns,
    interval_protocol,
    interval_summary,
    split_notes,
)
from satlens.analysis.engine.stream import (
    Observed,
    Progress,
    Reducer,
    fold,
    measuring,
    observe,
    refuse_foreign_hooks,
    weights_sha256,
)
from satlens.analysis.result import Result, flag_column, join_marks
from satlens.analysis.stats import (
    N_RESAMPLES,
    divide,
    function_interval,
    jensen_shannon,
    ratio_interval,
)
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite


def divergence(
    model: Decoder,
    data: Any,
    *,
    other: Decoder | None = None,
    over: Over = "sources",
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
        over: ``sources``: routes over the same sources; ``sublayers``: effective routes, by which
            reads of different sources compare: attention and MLP, consecutive layers, checkpoints
            with other blocks or streams.
        base: of the logarithm; None is e.
        split: of prepared data.
        baseline: repeat the pass on the untrained model, for the columns ``<stat>_init``.
        batch_size: the most windows in a batch; over sublayers, see :func:`satlens.routes`.
        n_resamples, seed: of the bootstrap over documents.
        resume_dir: where a killed analysis continues from.

    Returns:
        ``divergence``: a row a pair of routes with ``js_token`` (mean over tokens) and ``js_mean``
        (of the token-averaged routes). The flag ``norm_rectified`` marks pairs of signed weights or
        of components, which are compared by norms.

    Raises:
        AnalysisError: no two routes over the same sources; checkpoints of different shapes.
    """
    analysis = Divergence(over=over, base=base)
    if other is not None:
        return _between(
            analysis,
            model,
            other,
            data,
            split=split,
            batch_size=batch_size,
            max_documents=max_documents,
            max_tokens_per_document=max_tokens_per_document,
            n_resamples=n_resamples,
            seed=seed,
            progress=progress,
            resume_dir=resume_dir,
        )
    (result,) = measure(
        model,
        data,
        [analysis],
        label="divergence",
        split=split,
        baseline=baseline,
        batch_size=batch_size,
        max_documents=max_documents,
        max_tokens_per_document=max_tokens_per_document,
        n_resamples=n_resamples,
        seed=seed,
        progress=progress,
        resume_dir=resume_dir,
    )
    return result


class Divergence(Descriptive):
    """:func:`divergence` of the roles or reads of one model, as a part of a pass."""

    name = "divergence"

    def __init__(self, over: Over = "sources", base: float | None = None) -> None:
        self.over, self.base = over, base

    def pairs(self, model: Decoder, other: Decoder | None = None) -> list[Pair]:
        """The pairs of routes that are compared.

        Raises:
            AnalysisError: none; an unknown ``over``; checkpoints of different shapes.
        """
        if self.over not in OVER:
            raise AnalysisError(f"divergence: over: {self.over!r} is not one of {', '.join(OVER)}")
        of = pairs_over_sources if self.over == "sources" else pairs_over_sublayers
        return of(model, other)

    def at_once(self, model: Decoder, batch_size: int, max_tokens: int | None) -> int:
        fewer = windows_at_once(model, batch_size, max_tokens)
        return batch_size if self.over == "sources" else fewer

    def check(self, model: Decoder) -> None:
        self.pairs(model)

    def reducers(self, model: Decoder, inputs: Inputs) -> list[Reducer]:
        # The untrained model has the pairs of the checkpoint.
        pairs = self.pairs(inputs.model)
        return [_reducer(model, None, pairs, self.over, inputs.n_groups)]

    def result(
        self, inputs: Inputs, trained: Sequence[Reducer], initial: Sequence[Reducer] | None
    ) -> Result:
        before = None if initial is None else _of(initial)
        return self.compared(inputs, self.pairs(inputs.model), _of(trained), before)

    def compared(
        self,
        inputs: Inputs,
        pairs: Sequence[Pair],
        measured: RoutePairs,
        initial: RoutePairs | None,
        **facts: Any,
    ) -> Result:
        """The table of some pairs; ``facts`` join its provenance."""
        n_documents, options = inputs.windows.n_documents, inputs.options
        return Result(
            self.name,
            _table(pairs, measured, initial, self.base, n_documents, options),
            inputs.provenance(**facts),
            {"over": self.over, **_summary(pairs, measured, self.base, n_documents, options)},
            [
                _bound(self.base),
                *_NOTES,
                *_rectified_notes(pairs),
                *split_notes(inputs.windows),
            ],
        )


def _of(reducers: Sequence[Reducer]) -> RoutePairs:
    (reducer,) = reducers
    assert isinstance(reducer, RoutePairs)
    return reducer


def _between(
    analysis: Divergence, model: Decoder, other: Decoder, data: Any, **options: Any
) -> Result:
    """Two checkpoints on the same batches; ``options`` as of :func:`divergence`."""
    pairs = analysis.pairs(model, other)
    inputs = inputs_of(model, data, [analysis], **options)
    reducer = _reducer(model, other, pairs, analysis.over, inputs.n_groups)
    if inputs.resume_dir is not None:
        refuse_foreign_hooks(other)

    def step_over(batch: Any, groups: np.ndarray) -> None:
        mine, theirs = (
            Observed(observe(each, batch, measure.hooks), batch, groups, None, {})
            for each, measure in zip((model, other), reducer.measures, strict=True)
        )
        reducer.compare(mine, theirs)

    fold(
        model,
        inputs.windows,
        reducer.accumulators,
        step_over,
        identity=[reducer.identity, weights_sha256(other)],
        inside=lambda: measuring(other),
        label=analysis.name,
        **inputs.passes,
    )
    facts = {**other.provenance, "weights_sha256": weights_sha256(other)}
    return analysis.compared(inputs, pairs, reducer, None, other=facts)


_NOTES = (
    "js_token is the mean over tokens of the divergence, js_mean the divergence of the "
    "token-averaged routes: never larger, and biased upward on few tokens.",
    "Reads of a single source are 0 by definition and left out of the means in the summary.",
    "Special tokens and the first token of each context are excluded.",
)


def _rectified_notes(pairs: Sequence[Pair]) -> list[str]:
    if not any(pair.rectified for pair in pairs):
        return []
    return [
        "Flag norm_rectified: compared by |w| ||X|| over the sources X (or the components) of a "
        "token, normalised; the sign of weights is lost."
    ]


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


def _reducer(
    model: Decoder, other: Decoder | None, pairs: Sequence[Pair], over: str, n_groups: int
) -> RoutePairs:
    """What adds up the divergences of the pairs in a pass over one model, or over two."""
    if over == "sublayers":
        first = ComponentSizes(model)
        second = first if other is None else ComponentSizes(other)
        width = 1 + 2 * model.cfg.n_layers
        return RoutePairs(pairs, first, second, [width] * len(pairs), n_groups)
    sides = [[side for side in pair[:2] if isinstance(side, AccessSite)] for pair in pairs]
    widths = [len(site.sources) for site, _ in sides]
    if other is None:
        weights = SourceWeights(model, [site for pair in sides for site in pair])
        return RoutePairs(pairs, weights, weights, widths, n_groups)
    mine, theirs = (SourceWeights(m, [p[k] for p in sides]) for k, m in enumerate((model, other)))
    return RoutePairs(pairs, mine, theirs, widths, n_groups)


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
        columns["js_token_init"] = divide(before["js"].sum(0) * unit, before["n"].sum(0))
        columns["js_mean_init"] = of_means(before["first"].sum(0), before["second"].sum(0))
    single = np.where([pair.n_weights == 1 for pair in pairs], "single_source", "")
    by_norm = np.where([pair.rectified for pair in pairs], "norm_rectified", "")
    return pd.DataFrame(
        {
            "site": [pair.site for pair in pairs],
            "layer": [pair.first.layer for pair in pairs],
            "sublayer": [pair.sublayers for pair in pairs],
            "role": [pair.roles for pair in pairs],
            "comparison": [pair.comparison for pair in pairs],
            "measure": "jensen_shannon_divergence",
            "base": "e" if base is None else f"{base:g}",
            **columns,
            "n_sources": [pair.n_weights for pair in pairs],
            "n_undefined": sums["undefined"].sum(axis=0).astype(int),
            "n_documents": documents_in(sums["n"], n_documents),
            "n_tokens": sums["n"].sum(axis=0),
            "flags": join_marks(
                join_marks(single, by_norm),
                flag_column({"js_token": token.flags, "js_mean": averaged.flags}),
            ),
        }
    )


def _summary(
    pairs: Sequence[Pair],
    measured: RoutePairs,
    base: float | None,
    n_documents: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    several = np.array([pair.n_weights > 1 for pair in pairs])
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
