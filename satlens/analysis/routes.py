"""Effective routes: what of each sublayer's own output every read receives.

Raw weights and use are different things: some streams weigh states that are mixtures themselves.
Every stream is linear in the sublayer outputs once its weights are fixed, so a read is a sum of
components (the embedding, each earlier sublayer's output) with exact coefficients, token by token.
Here they are averaged over a corpus, beside the size of what they bring and the same figures of the
untrained model.

Shapes: G document groups, R reads, C cells (read by read, component by component).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from satlens.analysis.depth.effective import EffectiveRoutes, windows_at_once
from satlens.analysis.engine.descriptive import Descriptive, Inputs, measure
from satlens.analysis.engine.inputs import (
    documents_in,
    initial_notes,
    interval_columns,
    interval_protocol,
    interval_summary,
    split_notes,
)
from satlens.analysis.engine.stream import Progress, Reducer
from satlens.analysis.result import Result, flag_column, join_marks
from satlens.analysis.statistics.bootstrap import ROUNDING
from satlens.analysis.stats import N_RESAMPLES, divide, ratio_interval
from satlens.models.decoder import Decoder

_STATS = ("coefficient", "share", "signed_share")


def routes(
    model: Decoder,
    data: Any,
    *,
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
    """Coefficient and share of every component in every read, of any model.

    Args:
        data: a token tensor, a text, documents, a path or a prepared dataset.
        split: of prepared data.
        baseline: repeat the pass on the untrained model, for the columns ``<stat>_init``.
        batch_size: the most windows in a batch; fewer where their components and reads, which are
            all captured, would take more than 2 GiB
            (:func:`satlens.analysis.depth.effective.windows_at_once`).
        n_resamples, seed: of the bootstrap over documents.
        resume_dir: where a killed analysis continues from.

    Returns:
        ``routes``: a row a (read, component) with ``coefficient`` (mean over tokens), ``share``
        (of ||c_m delta_m|| in the sum over components), ``signed_share`` (with the sign of c_m),
        ``coefficient_absolute`` and ``token_variance``. Its part ``routes_reads`` has a row a read:
        the effective number of components, what share has negative coefficients, and how exactly
        the components add up to the read.

    Raises:
        AnalysisError: components that do not add up to a read, as when a hook edits reads.
        DataError: bad data, or data of another tokenizer.
    """
    (result,) = measure(
        model,
        data,
        [EffectiveRouting()],
        label="routes",
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


class EffectiveRouting(Descriptive):
    """:func:`routes` as a part of a pass."""

    name = "routes"

    def at_once(self, model: Decoder, batch_size: int, max_tokens: int | None) -> int:
        return windows_at_once(model, batch_size, max_tokens)

    def reducers(self, model: Decoder, inputs: Inputs) -> list[Reducer]:
        return [EffectiveRoutes(model, inputs.n_groups)]

    def result(
        self, inputs: Inputs, trained: Sequence[Reducer], initial: Sequence[Reducer] | None
    ) -> Result:
        now = _of(trained)
        before = None if initial is None else _of(initial)
        options, n_documents = inputs.options, inputs.windows.n_documents
        source = inputs.provenance()
        reads = Result(
            "routes_reads",
            _read_table(now, before, n_documents, options),
            source,
            notes=list(_READ_NOTES),
        )
        notes = [*_NOTES, *_channels(now), *_precision(inputs.model), *split_notes(inputs.windows)]
        if initial is not None:
            notes += [_INIT_NOTE, *initial_notes(inputs.model)]
        seed = {"initial_seed": inputs.initial_seed}
        return Result(
            self.name,
            _table(now, before, n_documents, options),
            source,
            seed | _summary(now, before, n_documents, options),
            notes,
            keys=("component_index",),
            parts=(reads,),
        )


def _of(reducers: Sequence[Reducer]) -> EffectiveRoutes:
    (reducer,) = reducers
    assert isinstance(reducer, EffectiveRoutes)
    return reducer


_NOTES = (
    "A component is the embedding or one sublayer's own output; coefficients times components add "
    "up to what the read delivers, before its norm.",
    "share is ||c delta|| of a component over the sum of it over all components, per token; "
    "signed_share has the sign of the coefficient. Components can cancel: shares are of sizes, not "
    "of what is left.",
    "Special tokens are excluded; the first token of each context has no history and is in the "
    "summary only.",
)
_INIT_NOTE = "Columns ending in _init are the untrained model on the same tokens."
_CHANNEL_NOTE = (
    "Where norms act inside a read (flag channel_mean), coefficients differ between channels: the "
    "column has their mean, shares come from all of them."
)
_READ_NOTES = (
    "effective_components is exp(entropy) of the shares of a token, averaged over tokens; "
    "negative_share the share of components with a negative coefficient.",
    "identity_error is the largest distance of a token's read from the sum of its components, by "
    "the root mean square of the read's norm.",
)


def _channels(unfolded: EffectiveRoutes) -> list[str]:
    return [_CHANNEL_NOTE] if unfolded.per_channel.any() else []


def _precision(model: Decoder) -> list[str]:
    if model.dtype.itemsize > 2:
        return []
    return [
        f"Weights in {str(model.dtype).removeprefix('torch.')}: sums are exact to its rounding."
    ]


# -- components of reads ---------------------------------------------------------------------------


def _cells(unfolded: EffectiveRoutes) -> pd.DataFrame:
    reads = [unfolded.reads[index] for index in unfolded.read_of]
    return pd.DataFrame(
        {
            "site": [read.name for read in reads],
            "layer": [read.layer for read in reads],
            "sublayer": [read.sublayer for read in reads],
            "role": [read.role for read in reads],
            "component": [unfolded.names[m] for m in unfolded.component_of],
            "component_index": unfolded.component_of,
        }
    )


def _points(unfolded: EffectiveRoutes) -> dict[str, np.ndarray]:
    """Every statistic without its interval, (C,) each."""
    n = unfolded.sums["n"].sum(axis=0)[unfolded.read_of]
    mean = {name: divide(unfolded.sums[name].sum(axis=0), n) for name in _STATS}
    absolute, squares = (divide(unfolded.moments[k][0], n) for k in ("absolute", "squares"))
    variance = squares - mean["coefficient"] ** 2
    variance = np.where(variance <= ROUNDING * squares, 0.0, variance)
    variance = np.where(np.isfinite(squares), variance, np.nan)
    return {**mean, "coefficient_absolute": absolute, "token_variance": variance}


def _table(
    trained: EffectiveRoutes,
    initial: EffectiveRoutes | None,
    n_documents: int,
    options: dict[str, Any],
) -> pd.DataFrame:
    sums, place = trained.sums, trained.read_of
    n = sums["n"][:, place]
    points = _points(trained)
    columns: dict[str, Any] = {}
    flags = {}
    for name in _STATS:
        interval = ratio_interval(sums[name], n, **options)
        columns |= interval_columns(name, interval)
        flags[name] = interval.flags
    columns |= {name: points[name] for name in ("coefficient_absolute", "token_variance")}
    if initial is not None:
        columns |= {f"{name}_init": value for name, value in _points(initial).items()}
    return _cells(trained).assign(
        **columns,
        n_documents=documents_in(n, n_documents),
        n_tokens=n.sum(axis=0),
        flags=join_marks(_marks(trained)[place], flag_column(flags)),
    )


def _marks(unfolded: EffectiveRoutes) -> np.ndarray:
    """(R,) what to know about a read."""
    alone = np.array([read.n_components == 1 for read in unfolded.reads])
    channels = np.where(unfolded.per_channel, "channel_mean", "")
    marks = join_marks(np.where(alone, "single_component", ""), channels)
    return join_marks(np.full(len(alone), "static" if _is_static(unfolded) else ""), marks)


def _is_static(unfolded: EffectiveRoutes) -> bool:
    """Whether coefficients are the same for every token."""
    return not any(site.per_token for site in unfolded.model.sites if site.kind == "route")


# -- reads -----------------------------------------------------------------------------------------

_READ_STATS = {"effective_components": "effective", "negative_share": "negative"}


def _read_table(
    trained: EffectiveRoutes,
    initial: EffectiveRoutes | None,
    n_documents: int,
    options: dict[str, Any],
) -> pd.DataFrame:
    n = trained.sums["n"]
    columns: dict[str, Any] = {"n_components": [read.n_components for read in trained.reads]}
    flags = {}
    for name, key in _READ_STATS.items():
        interval = ratio_interval(trained.sums[key], n, **options)
        columns |= interval_columns(name, interval)
        flags[name] = interval.flags
    columns["identity_error"] = trained.identity_errors()
    if initial is not None:
        before = initial.sums
        for name, key in _READ_STATS.items():
            columns[f"{name}_init"] = divide(before[key].sum(axis=0), before["n"].sum(axis=0))
    return pd.DataFrame(
        {
            "site": [read.name for read in trained.reads],
            "layer": [read.layer for read in trained.reads],
            "sublayer": [read.sublayer for read in trained.reads],
            "role": [read.role for read in trained.reads],
            **columns,
            "n_undefined": trained.sums["undefined"].sum(axis=0).astype(int),
            "n_documents": documents_in(n, n_documents),
            "n_tokens": n.sum(axis=0),
            "flags": join_marks(_marks(trained), flag_column(flags)),
        }
    )


def _summary(
    trained: EffectiveRoutes,
    initial: EffectiveRoutes | None,
    n_documents: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Means over reads of several components, and the identity."""
    several = np.array([read.n_components > 1 for read in trained.reads])
    stats = {**_READ_STATS, "embedding_share": "embedding"}

    def sums(unfolded: EffectiveRoutes, key: str) -> np.ndarray:
        return unfolded.sums[key][:, several].sum(axis=1)

    intervals = {
        name: ratio_interval(sums(trained, key), sums(trained, "n"), **options)
        for name, key in stats.items()
    }
    first = {name: trained.first[name][0, several].sum() for name in ("n", "embedding")}
    errors = trained.identity_errors()
    summary: dict[str, Any] = {
        "overall": {name: interval_summary(interval) for name, interval in intervals.items()},
        "n_reads": len(trained.reads),
        "n_undefined": int(trained.sums["undefined"].sum()),
        "static": _is_static(trained),
        "per_channel": bool(trained.per_channel.any()),
        "signed": bool((trained.sums["negative"] > 0).any()),
        "identity": {
            "max_error": None if np.isnan(errors).all() else float(np.nanmax(errors)),
            "tolerance": trained.tolerance,
        },
        "first_token": {
            "n": int(trained.first["n"].max()),
            "embedding_share": float(divide(first["embedding"], first["n"])),
        },
        "interval": interval_protocol(intervals["embedding_share"], n_documents),
    }
    if initial is not None:
        summary["overall_init"] = {
            name: float(divide(sums(initial, key).sum(), sums(initial, "n").sum()))
            for name, key in stats.items()
        }
    return summary
