"""Controls of what describes routes: sparsity, divergence and effective routes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import stats
from scipy.spatial.distance import jensenshannon

from satlens.analysis.controls.checks import Check, Reader
from satlens.analysis.controls.planted import (
    BRINGS,
    PULL,
    STATE_WEIGHTS,
    counted,
    documents,
    routed,
    token_class,
    weighed,
)
from satlens.analysis.divergence import divergence
from satlens.analysis.routes import routes
from satlens.analysis.sparsity import sparsity

ROUTED = "routes in closed form"
TIED = "two roles with one route"
STATES = "signed weights over states"
UP = 1 / (1 + math.exp(-PULL))
"""Weight of the embedding in the planted value route on class 0."""
PULLED, UNIFORM = np.array([UP, 1 - UP]), np.array([0.5, 0.5])
VALUE_READ = {"layer": 1, "sublayer": "attn", "role": "v"}
EMBEDDING_NORM = math.sqrt(8)


def sparsity_checks(**options: Any) -> Iterator[Check]:
    """Concentration of the planted value route, and of the uniform one beside it."""
    docs = documents()
    share = float(np.mean(token_class(counted(docs)) == 0))

    def mean(of_pulled: float, of_uniform: float) -> float:
        return share * of_pulled + (1 - share) * of_uniform

    entropy = float(stats.entropy(PULLED))
    read = Reader("sparsity", ROUTED, sparsity(routed(), docs, **options))
    at = VALUE_READ
    planted = mean(entropy, math.log(2)) / math.log(2)
    yield read.check("entropy / log n", planted, "normalised_entropy", **at)
    planted = mean(math.exp(entropy), 2.0)
    yield read.check("effective sources", planted, "effective_sources", **at)
    yield read.check("mass of the embedding", mean(UP, 0.5), "mass_embedding", **at)
    variance = 2 * share * (1 - share) * (UP - 0.5) ** 2
    yield read.check("variance over tokens", variance, "token_variance", **at)
    above = float(stats.entropy(share * PULLED + (1 - share) * UNIFORM))
    planted = (above - mean(entropy, math.log(2))) / math.log(2)
    yield read.check("I(token; source) / log n", planted, "content_dependence", **at)
    at = {**VALUE_READ, "role": "qk"}
    yield read.check("entropy / log n, uniform route", 1, "normalised_entropy", **at)
    yield read.check("variance over tokens, uniform route", 0, "token_variance", **at)
    yield read.check("I(token; source), uniform route", 0, "content_dependence", **at)


def divergence_checks(**options: Any) -> Iterator[Check]:
    """Queries and keys against values, in closed form (scipy's distance, squared)."""
    docs = documents()
    share = float(np.mean(token_class(counted(docs)) == 0))
    averaged = share * PULLED + (1 - share) * UNIFORM
    token = share * jensenshannon(UNIFORM, PULLED) ** 2
    found = divergence(routed(), docs, **options)
    read = Reader("divergence", ROUTED, found)
    yield read.check("mean over tokens", token, "js_token", layer=1)
    yield read.check("of mean routes", jensenshannon(UNIFORM, averaged) ** 2, "js_mean", layer=1)
    yield read.check("untrained", 0, "js_token_init", layer=1)
    bits = divergence(routed(), docs, base=2, **options)
    read = Reader("divergence", ROUTED, bits)
    yield read.check("mean over tokens, in bits", token / math.log(2), "js_token", layer=1)
    read = Reader("divergence", TIED, divergence(routed(control="tied"), docs, **options))
    for column, name in (("js_token", "mean over tokens"), ("js_mean", "of mean routes")):
        yield read.check(name, 0, column, layer=1)


def effective_checks(**options: Any) -> Iterator[Check]:
    """What reads have of each sublayer: coefficients and shares by norm, also signed."""
    docs = documents()
    share = float(np.mean(token_class(counted(docs)) == 0))

    def mean(of: Any) -> float:
        return share * of(UP) + (1 - share) * of(0.5)

    def of_embedding(weight: float) -> float:
        kept = weight * EMBEDDING_NORM
        return kept / (kept + (1 - weight) * BRINGS)

    found = routes(routed(), docs, **options)
    read = Reader("routes", ROUTED, found)
    embedding, written = ({**VALUE_READ, "component": name} for name in ("embed", "L0.attn"))
    yield read.check("coefficient of the embedding", mean(lambda w: w), "coefficient", **embedding)
    yield read.check("share of the embedding", mean(of_embedding), "share", **embedding)
    planted = mean(lambda w: 1 - w)
    yield read.check("coefficient of layer 0's attention", planted, "coefficient", **written)
    planted = mean(lambda w: 1 - of_embedding(w))
    yield read.check("share of layer 0's attention", planted, "share", **written)
    yield from _signed(docs, options)


def _signed(docs: Any, options: dict[str, Any]) -> Iterator[Check]:
    """DenseFormer: layer 1 reads a X_0 + b X_1, the end c X_0 + d X_1 + e X_2."""
    (a, b), (c, d, e) = STATE_WEIGHTS
    found = routes(weighed(), docs, **options)
    read = Reader("routes", STATES, found)
    places = {
        "layer 1": ({"layer": 1, "sublayer": "attn"}, a + b, b),
        "the end": ({"layer": 2, "sublayer": "out"}, c + d + e * (a + b), d + e * b),
    }
    for name, (at, embedding, written) in places.items():
        sizes = abs(embedding) * EMBEDDING_NORM, abs(written) * BRINGS
        signed = math.copysign(sizes[1], written) / sum(sizes)
        first, second = ({**at, "component": part} for part in ("embed", "L0.attn"))
        yield read.check(f"embedding at {name}", embedding, "coefficient", **first)
        yield read.check(f"layer 0's attention at {name}", written, "coefficient", **second)
        yield read.check(f"its signed share at {name}", signed, "signed_share", **second)
