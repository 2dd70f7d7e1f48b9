"""What descriptive analyses have in common, and the pass that feeds several of them at once.

A descriptive analysis says which reducers it needs and what table their sums make. The untrained
model's pass, for the columns ``<stat>_init``, is shared in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from satlens.analysis.engine.inputs import (
    Slice,
    initial_model,
    open_windows,
    opened,
    provenance_of,
    tokenizer_of,
    training_seed,
)
from satlens.analysis.engine.stream import Progress, Reducer, n_groups, run, weights_sha256
from satlens.analysis.result import Result
from satlens.analysis.statistics.resampling import check_draws
from satlens.analysis.stats import N_RESAMPLES
from satlens.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """What one call measures, on what, and how intervals are made."""

    model: Decoder
    """The checkpoint."""
    data: Any
    """As given; a path to prepared data is opened."""
    windows: Slice
    """The partition that is run."""
    tokenizer: Any
    """The model's, else that of prepared data, else None."""
    n_resamples: int
    """Of bootstraps and sign flips."""
    seed: int
    """Of bootstraps and sign flips."""
    progress: Progress | None = None
    resume_dir: str | Path | None = None
    baseline: bool = False
    """Whether the untrained model is measured too, for the analyses that have a use for it."""

    @property
    def initial_seed(self) -> int | None:
        """Seed of the untrained model that is measured beside; None without one."""
        return training_seed(self.model.provenance.get("training")) if self.baseline else None

    @property
    def n_groups(self) -> int:
        """Document groups of the pass."""
        return n_groups(self.windows)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the interval functions of :mod:`satlens.analysis.stats`."""
        return {"n_resamples": self.n_resamples, "seed": self.seed}

    @property
    def passes(self) -> dict[str, Any]:
        """Arguments of further passes, such as one over a pool."""
        return {"progress": self.progress, "resume_dir": self.resume_dir}

    @cached_property
    def weights_sha256(self) -> str:
        """Of the checkpoint, hashed once for all its tables."""
        return weights_sha256(self.model)

    def provenance(self, **facts: Any) -> dict[str, Any]:
        """Of a table; ``facts`` are a tagger or further facts about the data."""
        return provenance_of(
            self.model,
            self.windows,
            seed=self.seed,
            tokenizer=self.tokenizer,
            weights=self.weights_sha256,
            **facts,
        )


class Descriptive:
    """One descriptive analysis with its settings."""

    name: ClassVar[str]
    """Of its result."""
    has_baseline: ClassVar[bool] = True
    """Whether the untrained model is measured too."""

    def at_once(self, model: Decoder, batch_size: int, max_tokens: int | None) -> int:
        """Windows in a batch: fewer than ``batch_size`` where it captures much of each."""
        return batch_size

    def check(self, model: Decoder) -> None:
        """Refuse a model that it says nothing about, before any data is read.

        Raises:
            AnalysisError: naming what the model lacks.
        """

    def prepare(self, inputs: Inputs) -> None:
        """Get what it needs before the pass, such as tags or a fit on the pool, and keep it.

        Raises:
            AnalysisError: the data or tokenizer lack what it needs.
            DataError: no tagger, documents without text.
        """

    def reducers(self, model: Decoder, inputs: Inputs) -> list[Reducer]:
        """New reducers for a pass over ``model``: the checkpoint or its untrained self."""
        raise NotImplementedError

    def result(
        self, inputs: Inputs, trained: Sequence[Reducer], initial: Sequence[Reducer] | None
    ) -> Result:
        """The table, from what the reducers of both passes added up."""
        raise NotImplementedError


def inputs_of(
    model: Decoder,
    data: Any,
    analyses: Sequence[Descriptive],
    *,
    split: str = "test",
    batch_size: int = 8,
    max_documents: int | None = None,
    max_tokens_per_document: int | None = None,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    progress: Progress | None = None,
    resume_dir: str | Path | None = None,
    baseline: bool = False,
) -> Inputs:
    """The data opened as windows, in batches that all of the analyses can bear.

    Raises:
        AnalysisError: no resamples, or a seed below 0.
        DataError: bad data, or data of another tokenizer.
    """
    check_draws(n_resamples, seed)
    data = opened(data)
    windows = open_windows(
        model,
        data,
        split=split,
        batch_size=min(a.at_once(model, batch_size, max_tokens_per_document) for a in analyses),
        max_documents=max_documents,
        max_tokens_per_document=max_tokens_per_document,
    )
    return Inputs(
        model=model,
        data=data,
        windows=windows,
        tokenizer=tokenizer_of(model, data),
        n_resamples=n_resamples,
        seed=seed,
        progress=progress,
        resume_dir=resume_dir,
        baseline=baseline,
    )


def measure(
    model: Decoder,
    data: Any,
    analyses: Sequence[Descriptive],
    *,
    label: str,
    baseline: bool = True,
    **options: Any,
) -> list[Result]:
    """Results of several analyses from one pass over the data, and one of the untrained model.

    Args:
        label: names the pass in progress and in ``resume_dir``.
        baseline: run the untrained model too, for the analyses that have a use for it.
        options: as of :func:`inputs_of`.

    Raises:
        AnalysisError: a model without what an analysis measures.
        DataError: bad data, or data of another tokenizer.
    """
    for analysis in analyses:
        analysis.check(model)
    inputs = inputs_of(model, data, analyses, baseline=baseline, **options)
    for analysis in analyses:
        analysis.prepare(inputs)
    return measured(analyses, inputs, label)


def measured(analyses: Sequence[Descriptive], inputs: Inputs, label: str) -> list[Result]:
    """Results of analyses that are checked and prepared; see :func:`measure`."""
    model = inputs.model
    trained = _pass(model, analyses, inputs, label)
    compared = [analysis for analysis in analyses if inputs.baseline and analysis.has_baseline]
    initial: dict[int, list[Reducer]] = {}
    if compared:
        fresh, _ = initial_model(model)
        before = _pass(fresh, compared, inputs, f"{label}-init")
        initial = {id(a): reducers for a, reducers in zip(compared, before, strict=True)}
    return [
        analysis.result(inputs, reducers, initial.get(id(analysis)))
        for analysis, reducers in zip(analyses, trained, strict=True)
    ]


def _pass(
    model: Decoder, analyses: Sequence[Descriptive], inputs: Inputs, label: str
) -> list[list[Reducer]]:
    reducers = [analysis.reducers(model, inputs) for analysis in analyses]
    together = [reducer for own in reducers for reducer in own]
    run(model, inputs.windows, together, label=label, **inputs.passes)
    return reducers
