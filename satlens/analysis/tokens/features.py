"""Token categories from a dictionary of V_1: what each feature fires on, and gates by feature.

The probe of the SATFormer paper, which calls it a coarse tool. A token belongs to the group of its
strongest feature, a feature to the category that most of its activation falls on, or to none
(mixed). Groups are named ``sae <category>``: they are properties of V_1, not of words.

Shapes: B rows, T positions, N tokens, D width of V_1 (heads side by side), F features, k active
ones, C gate cells, G document groups.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from satlens.analysis.engine.accumulators import Accumulator, Arrays, GroupSums
from satlens.analysis.engine.coding import Coding
from satlens.analysis.engine.descriptive import Inputs
from satlens.analysis.engine.inputs import Slice, documents_in, interval_summary
from satlens.analysis.engine.reference import Reference
from satlens.analysis.engine.stream import Observed, Transform, kept_tokens, run
from satlens.analysis.stats import MIN_UNITS, divide, ratio_interval
from satlens.analysis.tokens.sae import Active, SaeSettings, SparseAutoencoder, train_sae
from satlens.analysis.tokens.sums import SiteValues, digest, kept_inputs, one_hot
from satlens.data.tags import Tags
from satlens.data.tokenizers import decode
from satlens.data.windows import Windows
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite

V_FIRST = "hook_v_first"
PREFIX = "sae "
MIXED, SILENT = f"{PREFIX}mixed", f"{PREFIX}silent"
N_TOP_TOKENS = 8
FEATURE_NOTES = (
    "Where the first layer reads the embedding alone, V_1 is settled by the token's id: features "
    "then group ids, whatever their context.",
    "mean is the mean gate, over the heads of the layer, of the tokens whose strongest feature "
    "this is; purity the share of the feature's activation on its main category.",
    "Groups follow from purity in the text the dictionary was trained on, where categories are of "
    "unequal size: the largest is the easiest to be pure in.",
    "A dictionary is one of many that explain V_1 about as well: a coarse tool.",
)


def group_names(categories: Sequence[str]) -> tuple[str, ...]:
    """Groups of features: one a category, mixed ones, and dead ones (fire on nothing)."""
    return (*(f"{PREFIX}{name}" for name in categories), MIXED, SILENT)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dictionary:
    """A dictionary of V_1 with what its features fire on among the tokens it was trained on."""

    sae: SparseAutoencoder
    settings: SaeSettings
    names: tuple[str, ...]
    """Of groups."""
    group: np.ndarray
    """(F,) index into ``names``; dead features, which fired on nothing, are silent."""
    dominant: np.ndarray
    """(F,) index of the category with the most activation."""
    purity: np.ndarray
    """(F,) share of the activation on that category; NaN for dead features."""
    top_tokens: list[str]
    """(F,) the ids with the most activation, most first."""
    n_vectors: int
    pool: Slice | None
    """Where it was trained; None is the measured documents themselves."""
    identity: dict[str, Any]
    """JSON-ready content that decided it, beside the model's weights."""

    @property
    def note(self) -> str:
        """What it was trained on, for a reader."""
        where = "the measured documents themselves" if self.pool is None else "the pool"
        return f"The dictionary of V_1 was trained on {where}."

    def strongest(self, seen: Observed) -> tuple[Active, Tensor]:
        """The active features of a batch, (B T, k), and the strongest of each token, (B, T).

        F stands for none active. Reducers share them.
        """
        return seen.once((Dictionary, id(self)), partial(self._strongest, seen.captured[V_FIRST]))

    def _strongest(self, v_first: Tensor) -> tuple[Active, Tensor]:
        active = self.sae.active(v_first.flatten(2).flatten(0, 1))
        first = active.feature[:, 0].masked_fill(active.activation[:, 0] <= 0, len(self.group))
        return active, first.view(v_first.shape[:2])


# -- making it -------------------------------------------------------------------------------------


class SampledRows:
    """Rows (n, D) that batches fill, each once; the others are zero until then."""

    def __init__(self, n: int, width: int) -> None:
        self.rows = np.zeros((n, width), dtype=np.float32)

    def fill(self, place: np.ndarray, rows: np.ndarray) -> None:
        """Put rows (N, D) in their places (N,)."""
        self.rows[place] = rows

    def arrays(self) -> Arrays:
        return {"rows": self.rows}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.rows[...] = arrays["rows"]

    def merge(self, other: SampledRows) -> None:
        self.rows += other.rows


class ValueSample:
    """V_1 of evenly spaced tokens among those that count.

    Args:
        tokens: at most.
        width: D.
    """

    needs_nll = False

    def __init__(self, windows: Windows, tokens: int, width: int) -> None:
        kept = kept_inputs(windows)
        step = max(1, -(-sum(int(mask.sum()) for mask in kept) // tokens))
        codes, before, n = [], 0, 0
        for mask in kept:
            number = before + np.cumsum(mask) - 1
            chosen = mask & (number % step == 0)
            codes.append(np.where(chosen, n + np.cumsum(chosen), 0))  # 0 is not chosen
            before, n = before + int(mask.sum()), n + int(chosen.sum())
        self.chosen = [code > 0 for code in codes]
        self.coding = Coding((V_FIRST,), codes)
        self.sample = SampledRows(n, width)
        self.hooks: dict[str, Transform | None] = {V_FIRST: None}
        self.accumulators: Mapping[str, Accumulator] = {"sample": self.sample}
        self.identity: dict[str, Any] = {"reducer": "values", "codes": digest(self.coding)}

    def update(self, seen: Observed) -> None:
        """Add one batch."""
        code = self.coding.of(seen.batch)
        chosen = kept_tokens(seen.batch) & (code > 0)
        rows = seen.captured[V_FIRST].flatten(2)[chosen].float()
        self.sample.fill((code[chosen] - 1).cpu().numpy(), rows.cpu().numpy())


def require_v_first(model: Decoder) -> None:
    """Refuse a model whose layers read no first values.

    Raises:
        AnalysisError: it is one.
    """
    if V_FIRST not in model.hook_dict:
        raise AnalysisError(
            f"categories: by: 'sae' needs a value residual; this model ({model.cfg.variant}) "
            "has no V_1"
        )


def fit_dictionary(
    inputs: Inputs, tags: Tags, pool: Reference | None, settings: SaeSettings
) -> Dictionary:
    """Train a dictionary on the V_1 of a pool and group its features.

    Args:
        tags: of the measured documents, which serve where there is no pool.

    Raises:
        AnalysisError: V_1 is the same for every token or not finite.
    """
    model, windows = inputs.model, inputs.windows
    if pool is not None:
        windows, tags = pool.windows, pool.tags
    cfg = model.cfg
    reducer = ValueSample(windows, settings.max_vectors, cfg.n_key_value_heads * cfg.d_head)
    run(model, windows, [reducer], label="categories-sae", **inputs.passes)
    vectors = torch.from_numpy(reducer.sample.rows)
    if not vectors.isfinite().all():
        raise AnalysisError("categories: V_1 of this model is not finite")
    sae = train_sae(vectors.to(model.device), settings)
    active = sae.active(vectors.to(model.device))
    ids = np.concatenate(
        [d.tokens[m] for d, m in zip(windows.documents, reducer.chosen, strict=True)]
    )
    kind = np.concatenate(
        [d.category[m] for d, m in zip(tags.documents, reducer.chosen, strict=True)]
    )
    categories = tags.categories.names
    mass = _mass(active, kind.astype(np.int64), settings.n_features, len(categories))
    purity = divide(mass.max(axis=1), mass.sum(axis=1))
    names, dominant = group_names(categories), mass.argmax(axis=1)
    group = np.where(purity >= settings.purity, dominant, names.index(MIXED))
    group = np.where(np.isnan(purity), names.index(SILENT), group)
    return Dictionary(
        sae=sae,
        settings=settings,
        names=names,
        group=group,
        dominant=dominant,
        purity=purity,
        top_tokens=_top_tokens(active, ids, settings.n_features, inputs.tokenizer),
        n_vectors=len(vectors),
        pool=None if pool is None else pool.windows,
        identity={
            "settings": asdict(settings),
            "trained_on": windows.sha256,
            "rows": digest(reducer.coding),
            "categories": digest(Coding(categories, [d.category for d in tags.documents])),
        },
    )


def _mass(active: Active, kind: np.ndarray, n_features: int, n_kinds: int) -> np.ndarray:
    """(F, categories): activation of each feature on the tokens of each category."""
    feature, activation = active.feature.cpu().numpy(), active.activation.cpu().numpy()
    place = feature * n_kinds + kind[:, None]
    size = n_features * n_kinds
    return np.bincount(place.ravel(), activation.ravel(), size).reshape(n_features, n_kinds)


def _top_tokens(active: Active, ids: np.ndarray, n_features: int, tokenizer: Any) -> list[str]:
    """The token ids with the most activation of each feature, spelt where a tokenizer can."""
    vocabulary, number = np.unique(ids, return_inverse=True)
    mass = _mass(active, number, n_features, len(vocabulary))
    listed = []
    for row in mass:
        best = np.argsort(-row, kind="stable")[:N_TOP_TOKENS]
        listed.append(" | ".join(_spelt(int(vocabulary[k]), tokenizer) for k in best if row[k] > 0))
    return listed


def _spelt(token: int, tokenizer: Any) -> str:
    """The text of one token on one line."""
    if tokenizer is None:
        return str(token)
    return json.dumps(decode(tokenizer, [token]), ensure_ascii=False)[1:-1]


# -- using it --------------------------------------------------------------------------------------


class FeatureLabels:
    """The group of each token's strongest feature, as labels of a breakdown."""

    def __init__(self, dictionary: Dictionary) -> None:
        self.dictionary, self.names = dictionary, dictionary.names
        self.hooks: dict[str, Transform | None] = {V_FIRST: None}
        self.identity = dictionary.identity
        self._groups = torch.from_numpy(np.append(dictionary.group, self.names.index(SILENT)))

    def of(self, seen: Observed) -> Tensor:
        """(B, T) int64."""
        _, feature = self.dictionary.strongest(seen)
        return self._groups.to(feature.device)[feature]


class FeatureSums:
    """Gates by strongest feature, and how well the dictionary gives V_1 back."""

    needs_nll = False

    def __init__(self, sites: Sequence[AccessSite], n_groups: int, dictionary: Dictionary) -> None:
        self.gates = [site for site in sites if site.kind == "gate"]
        self.dictionary = dictionary
        self.values = SiteValues(self.gates)
        self.hooks: dict[str, Transform | None] = {**self.values.hooks, V_FIRST: None}
        n_features = len(dictionary.group)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("residual", "spread", "active"), ())
        self.sums = GroupSums(n_groups, {"n": (n_features + 1,), **shapes})
        self.totals = GroupSums(1, {"total": (n_features + 1, self.values.n_cells)})
        self.accumulators: Mapping[str, Accumulator] = {"sums": self.sums, "totals": self.totals}
        self.identity: dict[str, Any] = {
            "reducer": "features",
            "hooks": list(self.hooks),
            "dictionary": dictionary.identity,
            "groups": n_groups,
        }

    def update(self, seen: Observed) -> None:
        """Add one batch.

        Raises:
            AnalysisError: a gate that is not finite.
        """
        v_first = seen.captured[V_FIRST]
        kept = kept_tokens(seen.batch)
        active, feature = self.dictionary.strongest(seen)
        vectors = v_first.flatten(2).flatten(0, 1).float()
        sae = self.dictionary.sae
        error = (vectors - sae.reconstruct(active)).double().square().sum(1).view(kept.shape)
        spread = (vectors - sae.mean).double().square().sum(1).view(kept.shape)
        hot = one_hot(feature, kept, len(self.dictionary.group) + 1)
        self.sums.add(
            seen.groups,
            n=hot.sum(1),
            residual=(error * kept).sum(1),
            spread=(spread * kept).sum(1),
            active=((active.activation > 0).sum(1).view(kept.shape) * kept).sum(1),
        )
        if self.values.n_cells:
            values, _ = self.values.of(seen)
            total = hot.mT @ values
            self.totals.add(np.zeros(len(total), dtype=np.int64), total=total)


def feature_table(
    reducer: FeatureSums, n_documents: int, options: Mapping[str, Any]
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A row a (layer with gates, feature), and how good the dictionary is.

    Models without gates get a row a feature, without a layer.
    """
    dictionary = reducer.dictionary
    n_features = len(dictionary.group)
    n = reducer.sums["n"][:, :-1]
    tokens, documents = n.sum(axis=0), documents_in(n, n_documents)
    features = pd.DataFrame(
        {
            "feature": np.arange(n_features),
            "group": np.array(dictionary.names, dtype=object)[dictionary.group],
            "top_tokens": dictionary.top_tokens,
            "purity": dictionary.purity,
            "n_documents": documents,
            "n_tokens": tokens,
            "flags": np.select(
                [np.isnan(dictionary.purity), documents < MIN_UNITS],
                ["dead", f"units<{MIN_UNITS}"],
                "",
            ),
        }
    )
    total = reducer.totals["total"][0, :-1]
    tables, column = [], 0
    for site in reducer.gates:
        own = total[:, column : column + site.n_heads].mean(axis=1)
        tables.append(features.assign(layer=site.layer, mean=divide(own, tokens)))
        column += site.n_heads
    table = pd.concat(tables, ignore_index=True) if tables else features
    return table, _facts(reducer, n_documents, options)


def _facts(reducer: FeatureSums, n_documents: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings and quality of the dictionary on the measured tokens."""
    dictionary = reducer.dictionary
    sums = {name: reducer.sums[name] for name in ("n", "residual", "spread", "active")}
    explained = ratio_interval(sums["spread"] - sums["residual"], sums["spread"], **options)
    dead = dictionary.group == dictionary.names.index(SILENT)
    groups = np.bincount(dictionary.group, minlength=len(dictionary.names))
    return {
        **asdict(dictionary.settings),
        "n_vectors": dictionary.n_vectors,
        "explained_variance": interval_summary(explained, ()),
        "active_features": float(sums["active"].sum() / sums["n"].sum()),
        "n_dead": int(dead.sum()),
        "features": dict(zip(dictionary.names, groups.tolist(), strict=True)),
        "n_documents": n_documents,
    }
