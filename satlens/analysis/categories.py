"""Which tokens access earlier depths: gates and routes by token category.

For gates the value of a token is its gate, per layer and KV head; for routes that are distributions
it is the weight that a read puts on the embedding. The contrast compares two categories within
documents, raw and with token frequency and position held fixed, because the three are confounded.
The drivers say how much of the variance of each over tokens such facts predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pandas as pd

from satlens.analysis.engine.coding import (
    BREAKDOWNS,
    coding,
    crossed,
    frequency_bands,
    position_bands,
    require_tags_of,
    subwords,
)
from satlens.analysis.engine.descriptive import Descriptive, Inputs, measure
from satlens.analysis.engine.inputs import Slice, split_notes, window_facts
from satlens.analysis.engine.reference import reference
from satlens.analysis.engine.stream import Progress, Reducer
from satlens.analysis.result import Result
from satlens.analysis.stats import N_RESAMPLES, Adjustment
from satlens.analysis.tokens.drivers import (
    DRIVER_NOTES,
    DriverSums,
    Fits,
    driver_table,
    fit_drivers,
)
from satlens.analysis.tokens.features import (
    FEATURE_NOTES,
    PREFIX,
    Dictionary,
    FeatureLabels,
    FeatureSums,
    feature_table,
    fit_dictionary,
    require_v_first,
)
from satlens.analysis.tokens.sae import SaeSettings
from satlens.analysis.tokens.sums import (
    CategorySums,
    CodedLabels,
    Codings,
    Labels,
    category_sites,
    with_categories,
)
from satlens.analysis.tokens.tables import (
    category_notes,
    category_table,
    cells_of,
    contrast_result,
    token_counts,
)
from satlens.data.categories import Categories
from satlens.data.tags import Tags, tag_documents
from satlens.data.windows import Windows
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder
from satlens.processes import first_alone

CONTRAST = ("semantic", "functional")
SAE = "sae"

__all__ = ["CONTRAST", "SAE", "TokenCategories", "categories", "with_categories"]


def categories(
    model: Decoder,
    data: Any,
    *,
    split: str = "test",
    by: str | Sequence[str] = "category",
    contrast: tuple[str, str] = CONTRAST,
    adjustment: Adjustment = "max_t",
    drivers: bool = True,
    sae: SaeSettings | None = None,
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
        by: one or several of ``category, upos, tag, dep, entity, subword, frequency, position``,
            and ``sae``: groups of features of a dictionary of V_1. All come from one pass.
        contrast: the two names whose difference is tested, first minus second.
        adjustment: of the tests over the cells, ``max_t`` or ``benjamini_hochberg``.
        drivers: how much of each gate's variance over tokens the token, the one before it, its
            category and its position predict; one more pass.
        sae: how the dictionary is made; None is the defaults of ``SaeSettings``.
        tagger: ``auto``, a spaCy pipeline, or ``wordlist``.
        groups: division of universal tags into categories; None is semantic, functional and
            structural.
        tags: tags already made for the same slice of documents, instead of a tagger. A pool, which
            they do not cover, is then not used.
        cache_dir: where tags are kept; None is the user's cache.
        n_resamples, seed: of the bootstrap over documents and of the sign flips.
        resume_dir: where a killed analysis continues from.

    Returns:
        ``categories``: a row a (layer, head, category). Parts: ``categories_contrasts``, a row a
        (layer, head) with the contrast in the first breakdown that has both names;
        ``categories_drivers``, a row a (layer, head, driver) with the share of variance explained
        out of sample (r2); for ``sae`` ``categories_sae``, a row a (layer, feature), and
        ``categories_sae_contrasts``.

    Raises:
        AnalysisError: a model without gates and without such routes; an unknown breakdown; ``sae``
            without V_1, or its settings without it; tags of other documents; a ``contrast`` of
            equal names, or one given whose names no breakdown has.
        DataError: no tagger model, documents without text.
    """
    analysis = TokenCategories(
        by=by,
        contrast=contrast,
        adjustment=adjustment,
        drivers=drivers,
        sae=sae,
        tagger=tagger,
        groups=groups,
        tags=tags,
        cache_dir=cache_dir,
    )
    (result,) = measure(
        model,
        data,
        [analysis],
        label="categories",
        split=split,
        batch_size=batch_size,
        max_documents=max_documents,
        max_tokens_per_document=max_tokens_per_document,
        n_resamples=n_resamples,
        seed=seed,
        progress=progress,
        resume_dir=resume_dir,
    )
    return result


class _Prepared(NamedTuple):
    """What the pass needs to have."""

    tags: Tags
    fits: Fits | None
    dictionary: Dictionary | None


class TokenCategories(Descriptive):
    """:func:`categories` as a part of a pass; what it fits takes passes of its own before."""

    name = "categories"
    has_baseline = False

    def __init__(
        self,
        *,
        by: str | Sequence[str] = "category",
        contrast: tuple[str, str] = CONTRAST,
        adjustment: Adjustment = "max_t",
        drivers: bool = True,
        sae: SaeSettings | None = None,
        tagger: str = "auto",
        groups: Categories | None = None,
        tags: Tags | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        self.by = (by,) if isinstance(by, str) else tuple(dict.fromkeys(by))
        self.contrast = contrast
        self.adjustment: Adjustment = adjustment
        self.drivers, self.sae = drivers, sae or SaeSettings()
        self.sae_given = sae is not None
        self.tagger, self.groups, self.tags, self.cache_dir = tagger, groups, tags, cache_dir

    def check(self, model: Decoder) -> None:
        category_sites(model)
        for by in self.by:
            if by not in (*BREAKDOWNS, SAE):
                known = ", ".join((*BREAKDOWNS, SAE))
                raise AnalysisError(f"categories: by: {by!r} is not one of {known}")
        if not self.by:
            raise AnalysisError("categories: by: names no breakdown")
        if self.adjustment not in get_args(Adjustment):
            known = " or ".join(get_args(Adjustment))
            raise AnalysisError(f"categories: adjustment: {self.adjustment!r} is not {known}")
        if len(self.contrast) != 2 or self.contrast[0] == self.contrast[1]:
            raise AnalysisError(f"categories: contrast: two different names, got {self.contrast}")
        if SAE in self.by:
            require_v_first(model)
        elif self.sae_given:
            raise AnalysisError(f"categories: sae: settings without {SAE!r} in by")

    def prepare(self, inputs: Inputs) -> None:
        """Tag the documents (and a pool), then fit what predictions and features need."""
        tags = self.tags
        if tags is None:
            tags = self._tagged(inputs, inputs.windows, entities="entity" in self.by)
        require_tags_of(tags, inputs.windows, self.name)
        fitted_on, fits, dictionary = None, None, None
        if self.drivers or SAE in self.by:
            own = self.tags is not None
            fitted_on = reference(inputs, tags, None if own else partial(self._tagged, inputs))
        if SAE in self.by:
            pool = fitted_on if fitted_on is not None and fitted_on.is_pool else None
            dictionary = fit_dictionary(inputs, tags, pool, self.sae)
        if self.drivers and fitted_on is not None:
            fits = fit_drivers(inputs, category_sites(inputs.model), fitted_on)
        self._prepared = _Prepared(tags, fits, dictionary)

    def _tagged(self, inputs: Inputs, windows: Windows, *, entities: bool = False) -> Tags:
        if inputs.tokenizer is None:
            raise AnalysisError("categories: tokenizer: needed to align tags with tokens")
        with first_alone():
            return tag_documents(
                windows.documents,
                inputs.tokenizer,
                tagger=self.tagger,
                entities=entities,
                categories=self.groups,
                cache_dir=self.cache_dir,
                progress=inputs.progress,
            )

    def reducers(self, model: Decoder, inputs: Inputs) -> list[Reducer]:
        sites, windows, n_groups = category_sites(model), inputs.windows, inputs.n_groups
        tags, fits, dictionary = self._prepared
        codings = Codings(
            subword=subwords(tags),
            strata=crossed(frequency_bands(windows), position_bands(windows)),
        )
        reducers: list[Reducer] = []
        contrast: tuple[str, str] | None = self.contrast
        for by in self.by:
            if by == SAE and dictionary is not None:
                labels: Labels = FeatureLabels(dictionary)
                pair = (PREFIX + self.contrast[0], PREFIX + self.contrast[1])
                reducers.append(CategorySums(sites, n_groups, by, labels, codings, pair))
                reducers.append(FeatureSums(sites, n_groups, dictionary))
            else:
                labels = CodedLabels(coding(by, windows, tags))
                sums = CategorySums(sites, n_groups, by, labels, codings, contrast)
                contrast = contrast if sums.contrast is None else None
                reducers.append(sums)
        self._uncompared = not any(
            r.pair is not None for r in reducers if isinstance(r, CategorySums)
        )
        if self._uncompared and tuple(self.contrast) != CONTRAST:
            raise AnalysisError(f"categories: {self._no_contrast}")
        if fits is not None:
            reducers.append(DriverSums(sites, n_groups, fits, windows, tags))
        return reducers

    @property
    def _no_contrast(self) -> str:
        first, second = self.contrast
        return f"contrast: no breakdown by {', '.join(self.by)} has both {first} and {second}"

    def result(
        self, inputs: Inputs, trained: Sequence[Reducer], initial: Sequence[Reducer] | None
    ) -> Result:
        sums = {r.by: r for r in trained if isinstance(r, CategorySums)}
        tagger, sites = self._prepared.tags.tagger, category_sites(inputs.model)
        source = inputs.provenance(tagger=tagger)
        parts: list[Result] = []
        summary: dict[str, Any] = {
            "by": self.by[0] if len(self.by) == 1 else list(self.by),
            "tagger": tagger,
            "tokens": token_counts(sums[self.by[0]]),
        }
        for by, reducer in sums.items():
            if reducer.contrast is not None and by != SAE:
                part = contrast_result(
                    "categories_contrasts", reducer, inputs, source, self.adjustment
                )
                summary["contrast"] = part.summary
                parts.append(part)
        notes = category_notes(inputs.model)
        for reducer in trained:
            found: list[Result] = []
            if isinstance(reducer, DriverSums):
                found = [_drivers(reducer, inputs, tagger)]
            elif isinstance(reducer, FeatureSums):
                found = self._features(reducer, sums[SAE], inputs)
            for part in found[:1]:
                summary[part.name.removeprefix("categories_")] = part.summary
                notes.append(part.notes[-1])
            parts += found
        if self.drivers and "drivers" not in summary:
            notes.append("Drivers need a pool or at least two documents; they were left out.")
        tables = [category_table(reducer, cells_of(sites), inputs) for reducer in sums.values()]
        summary["interval"] = tables[0][1]
        table = pd.concat([table for table, _ in tables], ignore_index=True)
        if self._uncompared:
            notes.append(f"No {self._no_contrast}.")
        notes += split_notes(inputs.windows)
        return Result("categories", table, source, summary, notes, parts=tuple(parts))

    def _features(self, reducer: FeatureSums, groups: CategorySums, inputs: Inputs) -> list[Result]:
        """The features, and the contrast of their groups where both sides have tokens."""
        made = reducer.dictionary
        table, facts = feature_table(reducer, inputs.windows.n_documents, inputs.options)
        source = _fitted_on(inputs, self._prepared.tags.tagger, made.pool)
        alone = [] if groups.has_both else ["No contrast: a side of it has no token of its group."]
        notes = [*FEATURE_NOTES, *alone, made.note]
        found = [Result("categories_sae", table, source, facts, notes, ("feature",))]
        if groups.has_both:
            name = "categories_sae_contrasts"
            found.append(contrast_result(name, groups, inputs, source, self.adjustment))
        return found


def _drivers(reducer: DriverSums, inputs: Inputs, tagger: str) -> Result:
    """What predicts the values of each cell."""
    cells, fitted_on = cells_of(category_sites(inputs.model)), reducer.fits.reference
    table, facts = driver_table(reducer, cells, inputs.windows.n_documents, inputs.options)
    source = _fitted_on(inputs, tagger, fitted_on.pool)
    notes = [*DRIVER_NOTES, fitted_on.note]
    return Result("categories_drivers", table, source, facts, notes)


def _fitted_on(inputs: Inputs, tagger: str, pool: Slice | None) -> dict[str, Any]:
    """The provenance of numbers that rest on a fit."""
    more = {} if pool is None else {"pool": window_facts(pool)}
    return inputs.provenance(tagger=tagger, **more)
