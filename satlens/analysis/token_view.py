"""A text token by token: the loss of each, with and without an intervention, and every gate and
route at it.

A picture of single tokens, not an estimate: what holds of a corpus is in the other tables.

Shapes: N tokens shown, B rows, T positions, n channels of a site.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import torch

from satlens import processes
from satlens.analysis.engine.accumulators import Accumulator
from satlens.analysis.engine.inputs import (
    Slice,
    opened,
    provenance_of,
    split_notes,
    tokenizer_of,
)
from satlens.analysis.engine.stream import Observed, Progress, Transform, run
from satlens.analysis.interventions.gates import Intervention, intervene
from satlens.analysis.interventions.spec import interventions_label, parse_interventions
from satlens.analysis.result import Result
from satlens.analysis.tokens.view import channel_table, n_channels, token_table, value_table
from satlens.data.categories import Categories
from satlens.data.dataset import DocumentTokens
from satlens.data.tags import Tags, tag_documents
from satlens.data.tokenizers import special_ids
from satlens.data.windows import IGNORE, Windows, as_documents, split_taken
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite

MAX_TOKENS = 2_000
MAX_VALUES = 1_500_000
"""Gates and routes of a view: what a page of 5 MB holds."""


def token_view(
    model: Decoder,
    data: Any,
    *,
    interventions: str | Intervention | Iterable[str | Intervention] = (),
    split: str = "test",
    layers: Sequence[int] | None = None,
    max_tokens: int = MAX_TOKENS,
    max_documents: int | None = None,
    tagger: str = "auto",
    groups: Categories | None = None,
    cache_dir: str | Path | None = None,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> Result:
    """Every token of a few documents with its loss, its category, and all gates and routes at it.

    Args:
        data: a token tensor, a text, documents, a path or a prepared dataset.
        interventions: applied together for ``nll_intervened``; objects, or texts as
            :func:`satlens.parse_intervention` reads them.
        split: of prepared data.
        layers: whose gates and routes are shown. None is all; where they would be more than
            1,500,000 numbers, every second (third, ...) layer, the last one among them.
        max_tokens: shown at most. Documents are taken in the order of ``max_documents``'s sample
            (by a hash of their names) until they are reached; the last one is cut.
        max_documents: a fixed sample of the documents, of this size.
        tagger, groups, cache_dir: as of :func:`satlens.categories`; data without texts has no
            categories.

    Returns:
        ``token_view``: a row a token, with ``nll`` (nats; NaN where a token is not scored: a
        document's first, special ones) and, under interventions, ``nll_intervened`` and ``dnll``.
        Parts: ``token_channels``, a row for each gate of a head and each source of a route, and
        ``token_values``, their values at each token in the unedited model, a column a channel.

    Raises:
        AnalysisError: an intervention, or a layer of ``layers``, that the model has nothing for;
            several processes.
        ConfigError: a text that is no intervention.
        DataError: bad data, no tagger model.
    """
    edits = parse_interventions(interventions)
    if max_tokens < 2:
        raise AnalysisError(f"token_view: max_tokens: at least 2, got {max_tokens}")
    if processes.world().size > 1:
        raise AnalysisError("token_view: runs in one process, not under torchrun")
    data = opened(data)
    tokenizer = tokenizer_of(model, data)
    windows = _windows(model, data, tokenizer, split, max_tokens, max_documents, batch_size)
    chosen, left_out = _chosen_sites(model, layers, _n_tokens(windows))
    with intervene(model, *edits):
        intervened = _kept(model, windows, [], progress).nll if edits else None
    nll, values = _values(model, windows, chosen, progress)
    tags = None
    if all(document.text for document in windows.documents):
        options: dict[str, Any] = {"tagger": tagger, "categories": groups, "cache_dir": cache_dir}
        tags = tag_documents(windows.documents, tokenizer, progress=progress, **options)
    table = token_table(windows, tokenizer, tags, nll, intervened)
    channels = channel_table(chosen, values, table)
    tagged = {} if tags is None else {"tagger": tags.tagger}
    origin = provenance_of(
        model, windows, seed=0, tokenizer=tokenizer, max_tokens=max_tokens, **tagged
    )
    parts = (
        Result("token_channels", channels, origin, notes=[_CHANNELS]),
        Result(
            "token_values",
            value_table(values, channels, table),
            origin,
            notes=[_VALUES],
            keys=("position",),
        ),
    )
    summary = _summary(windows, table, edits, left_out)
    notes = [*_notes(tags, tokenizer, edits), *split_notes(windows)]
    if len(table) == max_tokens:
        notes.append(f"Cut at {max_tokens} tokens.")
    return Result("token_view", table, origin, summary, notes, keys=("position",), parts=parts)


_CHANNELS = (
    "mean and zero_fraction are over the tokens that have a history and are not special; min and "
    "max over all that are shown."
)
_VALUES = "Values are those of the model as it is, without the intervention, rounded to float32."


def _notes(tags: Tags | None, tokenizer: Any, edits: Sequence[Intervention]) -> list[str]:
    notes = ["Every token but the first of each document is scored once, in nats."]
    if edits:
        notes.append("dnll is the token's loss under the intervention minus its loss without it.")
    if any(not edit.causal for edit in edits):
        notes.append("The intervention is not causal: losses under it use later tokens.")
    if tags is None:
        missing = "tokenizer" if tokenizer is None else "text"
        notes.append(f"No categories: the data has no {missing}.")
    return notes


def _summary(
    windows: Slice, tokens: pd.DataFrame, edits: Sequence[Intervention], left_out: dict[str, str]
) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "intervention": interventions_label(edits) if edits else None,
        "documents": [document.id for document in windows.documents],
        "n_documents": windows.n_documents,
        "n_tokens": len(tokens),
        "n_scored": int(np.sum(tokens["n_tokens"].to_numpy())),
        "n_ctx": windows.n_ctx,
        "nll": _mean(tokens["nll"]),
        "nll_intervened": None,
        "dnll": None,
        "left_out": left_out,
    }
    if edits:
        summary |= {name: _mean(tokens[name]) for name in ("nll_intervened", "dnll")}
    return summary


def _mean(losses: Any) -> float:
    """Over the tokens that are scored."""
    return float(np.nanmean(np.asarray(losses, dtype=np.float64)))


# -- what is shown ---------------------------------------------------------------------------------


def _windows(
    model: Decoder,
    data: Any,
    tokenizer: Any,
    split: str,
    max_tokens: int,
    max_documents: int | None,
    batch_size: int,
) -> Slice:
    """The documents shown, cut to the budget, as the partition that scores them."""
    specials = frozenset() if tokenizer is None else special_ids(tokenizer)
    options: dict[str, Any] = {"d_vocab": model.cfg.d_vocab, "split": split_taken(data, split)}
    documents = as_documents(data, model.tokenizer, split)
    sample = Windows(
        documents, model.cfg.n_ctx, batch_size, specials, max_documents=max_documents, **options
    )
    fitting = _within(sample.documents, max_tokens)
    return Slice(
        fitting, model.cfg.n_ctx, batch_size, specials, max_documents=max_documents, **options
    )


def _within(documents: Sequence[DocumentTokens], max_tokens: int) -> list[DocumentTokens]:
    """Documents of a budget, in their order; one that it cuts keeps its first tokens."""
    sizes = [len(document.tokens) for document in documents]
    if sum(sizes) <= max_tokens:
        return list(documents)

    def rank(index: int) -> tuple[bytes, int]:
        return hashlib.sha256(f"slice:{documents[index].id}".encode()).digest(), index

    kept: dict[int, int] = {}
    left = max_tokens
    for index in sorted(range(len(documents)), key=rank):
        size = min(sizes[index], left)
        if size < 2:
            break
        kept[index] = size
        left -= size
    return [
        document._replace(tokens=document.tokens[: kept[k]])
        for k, document in enumerate(documents)
        if k in kept
    ]


def _n_tokens(windows: Windows) -> int:
    return sum(len(document.tokens) for document in windows.documents)


def _chosen_sites(
    model: Decoder, layers: Sequence[int] | None, n_tokens: int
) -> tuple[list[AccessSite], dict[str, str]]:
    """Sites that are shown, and why others are not, by name."""
    alone = {s.name for s in model.sites if s.kind == "route" and len(s.sources) == 1}
    sites = [site for site in model.sites if site.name not in alone]
    found = {site.layer for site in sites}
    if layers is not None:
        for layer in layers:
            if layer not in found:
                known = ", ".join(map(str, sorted(found))) or "none"
                raise AnalysisError(
                    f"token_view: layers: {layer!r} has no gates and no routes (layers: {known})"
                )
        kept, why = set(layers), "not among the layers asked for"
    else:
        kept, step = found, 1
        while step < len(found) and n_tokens * _width(sites, kept) > MAX_VALUES:
            step += 1
            kept = set(sorted(found, reverse=True)[::step])
        why = f"all layers would be more than {MAX_VALUES} numbers; layers chooses others"
    left_out = {site.name: why for site in sites if site.layer not in kept}
    left_out |= dict.fromkeys(alone, "a route of one source")
    return [site for site in sites if site.layer in kept], left_out


def _width(sites: Iterable[AccessSite], layers: set[int]) -> int:
    """Numbers a token."""
    return sum(n_channels(site) for site in sites if site.layer in layers)


# -- the passes ------------------------------------------------------------------------------------


class TokenValues:
    """Losses and weights of every token, as a reducer that adds nothing up.

    Args:
        windows: that run; tokens count from the first document's first.
        sites: whose weights are kept.
    """

    needs_nll = True
    accumulators: Mapping[str, Accumulator] = MappingProxyType({})

    def __init__(self, windows: Windows, sites: Sequence[AccessSite]) -> None:
        self.hooks: dict[str, Transform | None] = {site.hook: None for site in sites}
        self.identity = {"reducer": "token_values"}
        self.ends = np.cumsum([len(document.tokens) for document in windows.documents])
        """Place after each document's last token."""
        self.starts = np.append(0, self.ends[:-1])
        n_tokens, width = int(self.ends[-1]), sum(n_channels(site) for site in sites)
        self.nll = np.full(n_tokens, np.nan)
        """Of each token (N,) in nats; NaN where it is not scored."""
        self.values = np.full((n_tokens, width), np.nan)
        """(N, n) weights of all sites at each token that is an input; NaN at others."""

    def update(self, seen: Observed) -> None:
        """Keep one batch."""
        assert seen.nll is not None
        batch = seen.batch
        document, start = batch.document.cpu().numpy(), batch.start.cpu().numpy()
        nll, scored = seen.nll.double().cpu().numpy(), (batch.targets != IGNORE).cpu().numpy()
        # No sites are no columns.
        weights = [seen.captured[hook].double() for hook in self.hooks]
        beside = torch.cat(weights, -1).cpu().numpy() if weights else np.zeros((*nll.shape, 0))
        for row, place in enumerate(self.starts[document] + start):
            # A document's last token is a target only, and what follows it is padding.
            n = min(nll.shape[1], self.ends[document[row]] - 1 - place)
            self.values[place : place + n] = beside[row, :n]
            there = np.flatnonzero(scored[row])
            self.nll[place + 1 + there] = nll[row, there]


def _kept(
    model: Decoder, windows: Windows, sites: Sequence[AccessSite], progress: Progress | None
) -> TokenValues:
    kept = TokenValues(windows, sites)
    run(model, windows, [kept], progress=progress, label="token view")
    return kept


def _values(
    model: Decoder, windows: Windows, sites: Sequence[AccessSite], progress: Progress | None
) -> tuple[np.ndarray, np.ndarray]:
    """Losses (N,) and weights (N, n) of each token.

    A document's last token, which nothing follows, is no input of its windows. It is one in a
    second pass, with a successor that is made up: the model is causal.
    """
    kept = _kept(model, windows, sites, progress)
    if sites:
        longer = [d._replace(tokens=np.append(d.tokens, 0)) for d in windows.documents]
        with_last = Windows(longer, windows.n_ctx, windows.batch_size, windows.special_ids)
        again = _kept(model, with_last, sites, progress)
        kept.values[kept.ends - 1] = again.values[again.ends - 2]
    return kept.nll, kept.values
