"""Controls of what describes gates: sparsity, categories and evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from satlens.analysis.categories import categories
from satlens.analysis.controls.checks import ROUNDING, Check, Reader
from satlens.analysis.controls.planted import (
    CATEGORIES,
    FIRST_NORM,
    GATE,
    OWN_NORM,
    bigram,
    counted,
    documents,
    gated,
    tags_of,
    token_class,
)
from satlens.analysis.evaluation import evaluate
from satlens.analysis.result import Result
from satlens.analysis.sparsity import sparsity

GATED = "gate open on one token class"
IDLE = "idle head"
BIGRAM = "bigram table"
HISTOGRAM = 0.024
"""Relative width of the histogram bins that quantiles come from."""
CHANCE = 0.05
"""Share of a variance that something unrelated may explain by chance on 275 tokens."""


def sparsity_checks(**options: Any) -> Iterator[Check]:
    """The planted gate's statistics, and the idle head beside it."""
    docs, model = documents(), gated()
    share = float(np.mean(token_class(counted(docs)) == 0))
    n = len(counted(docs))
    found = sparsity(model, docs, **options)
    at: dict[str, Any] = {"layer": 1, "head": 0}
    read = Reader("sparsity", GATED, found)
    size = GATE * FIRST_NORM
    hoyer = (math.sqrt(n) - math.sqrt(share * n)) / (math.sqrt(n) - 1)
    yield read.check("zero fraction", 1 - share, "zero_fraction", **at)
    yield read.check("fraction below 0.1", 1 - share, "below_0.1", **at)
    yield read.check("mean", GATE * share, "mean", **at)
    yield read.check("mean given open", GATE, "mean_open", **at)
    yield read.check("95th percentile", GATE, "p95", tolerance=HISTOGRAM * GATE, **at)
    yield read.check("Hoyer sparsity", hoyer, "hoyer", **at)
    yield read.check("norm share", share * size / (size + OWN_NORM), "norm_share", **at)
    at = {"layer": 1, "head": 1}
    read = Reader("sparsity", IDLE, found)
    yield read.check("zero fraction", 1, "zero_fraction", **at)
    yield read.check("dead", 1, "dead", **at)
    yield read.check("mean", 0, "mean", **at)
    yield read.check("norm share", 0, "norm_share", **at)


def categories_checks(**options: Any) -> Iterator[Check]:
    """The contrast of the class that opens the gate, and none in the idle head."""
    docs = documents()
    found = categories(gated(), docs, tags=tags_of(docs), **options)
    read = Reader("categories", GATED, found)
    semantic, functional = ({"head": 0, "category": name} for name in CATEGORIES)
    yield read.check("mean of the class that opens it", GATE, "mean", **semantic)
    yield read.check("open fraction of it", 1, "open_fraction", **semantic)
    yield read.check("mean of the other class", 0, "mean", **functional)
    contrasts = found.part("categories_contrasts")
    read = Reader("categories", GATED, contrasts)
    for suffix, name in (("", "raw"), ("_controlled", "controlled")):
        yield read.check(f"difference, {name}", GATE, f"delta{suffix}", head=0)
    # Of all patterns of signs only the observed one and its mirror image are as extreme.
    yield read.check("adjusted p, raw", 2 / 2 ** len(docs), "p_adjusted", head=0)
    yield read.check("Cliff's delta", 1, "cliffs_delta", head=0)
    yield from _drivers(found)
    read = Reader("categories", IDLE, contrasts)
    for suffix, name in (("", "raw"), ("_controlled", "controlled")):
        yield read.check(f"difference, {name}", 0, f"delta{suffix}", head=1)
        yield read.check(f"adjusted p, {name}", 1, f"p{suffix}_adjusted", head=1)
    yield read.check("Cliff's delta", 0, "cliffs_delta", head=1)


def _drivers(found: Result) -> Iterator[Check]:
    """The token, and with it its class, decides the planted gate; the rest says nothing of it."""
    read = Reader("categories", GATED, found.part("categories_drivers"))
    for driver in ("token", "category", "all"):
        quantity = f"variance explained: {driver}"
        yield read.check(quantity, 1, "r2", head=0, driver=driver)
    for driver in ("previous_token", "position"):
        quantity = f"variance explained: {driver}"
        at: dict[str, Any] = {"head": 0, "driver": driver}
        yield read.check(quantity, 0, "r2", rule="at most", tolerance=CHANCE, **at)


def evaluation_checks(**options: Any) -> Iterator[Check]:
    """The loss of a model that is a table of probabilities."""
    docs, (model, log_p) = documents(), bigram()
    each = [-log_p[d.tokens[:-1], d.tokens[1:]] for d in docs]
    nll = float(np.concatenate(each).mean())
    found = evaluate(model, docs, **options)
    counts = {"n_documents": len(docs), "n_tokens": sum(len(part) for part in each)}
    for name, planted in (("nll", nll), ("perplexity", math.exp(nll))):
        cell = found.summary[name]
        yield Check(
            analysis="evaluate",
            control=BIGRAM,
            quantity="nats a token" if name == "nll" else name,
            rule="equal",
            planted=planted,
            recovered=cell["estimate"],
            low=cell["low"],
            high=cell["high"],
            tolerance=ROUNDING * planted,
            **counts,
        )
