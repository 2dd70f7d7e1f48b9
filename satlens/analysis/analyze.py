"""Several descriptive analyses from one pass over the data: one forward a batch feeds them all.

Logits are computed only where an analysis scores tokens, and no layer runs above the last one that
an analysis reads. Each table is that of the analysis run alone on the same batches.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from satlens.analysis.engine.descriptive import Descriptive, inputs_of, measured
from satlens.analysis.engine.stream import Progress
from satlens.analysis.result import Result
from satlens.analysis.stats import N_RESAMPLES
from satlens.errors import AnalysisError, DataError
from satlens.models.decoder import Decoder
from satlens.processes import world

_log = logging.getLogger(__name__)

DESCRIPTIVE: dict[str, str] = {
    "sparsity": "satlens.analysis.sparsity:Sparsity",
    "routes": "satlens.analysis.routes:EffectiveRouting",
    "categories": "satlens.analysis.categories:TokenCategories",
    "divergence": "satlens.analysis.divergence:Divergence",
}
"""Analyses that read hook points alone, by name: what is measured unless names are given."""
OTHERS: dict[str, str] = {
    "circuits": "satlens.analysis.circuits:Circuits",
    "evaluation": "satlens.analysis.evaluation:Evaluation",
}
"""Analyses that join the pass when they are named; they need more than hook points."""

Settings = Mapping[str, Mapping[str, Any]]
"""By name of an analysis, arguments of its own: ``{"sparsity": {"thresholds": (0.2,)}}``."""


def analyze(
    model: Decoder,
    data: Any,
    analyses: Sequence[str] | None = None,
    *,
    options: Settings | None = None,
    split: str = "test",
    baseline: bool = True,
    batch_size: int = 8,
    max_documents: int | None = None,
    max_tokens_per_document: int | None = None,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    progress: Progress | None = None,
    resume_dir: str | Path | None = None,
) -> dict[str, Result]:
    """Every descriptive analysis of a model, from one pass (and one of the untrained model).

    Args:
        data: a token tensor, a text, documents, a path or a prepared dataset.
        analyses: names out of :data:`DESCRIPTIVE` and :data:`OTHERS`, such as
            ``("sparsity", "evaluation")``; None is all of :data:`DESCRIPTIVE` that the model has
            sites for and the data can serve (what is left out is logged with its reason).
        options: arguments of single analyses, by name.
        split: of prepared data.
        baseline: repeat the pass on the untrained model, for the columns ``<stat>_init``.
        batch_size: the most windows in a batch; see :func:`satlens.routes`.
        n_resamples, seed: of bootstraps and sign flips.
        resume_dir: where a killed analysis continues from.

    Returns:
        Name -> result, in the order of the names.

    Raises:
        AnalysisError: an unknown name or option; a named analysis that says nothing about this
            model; none that does.
        DataError: bad data, or data of another tokenizer; for a named analysis, no tagger or
            documents without text.
    """
    chosen = _chosen(analyses, options or {})
    optional = analyses is None
    chosen = [a for a in chosen if _willing(optional, partial(a.check, model))]
    inputs = inputs_of(
        model,
        data,
        chosen,
        baseline=baseline,
        split=split,
        batch_size=batch_size,
        max_documents=max_documents,
        max_tokens_per_document=max_tokens_per_document,
        n_resamples=n_resamples,
        seed=seed,
        progress=progress,
        resume_dir=resume_dir,
    )
    chosen = [a for a in chosen if _willing(optional, partial(a.prepare, inputs))]
    results = measured(chosen, inputs, "analyze")
    return {analysis.name: result for analysis, result in zip(chosen, results, strict=True)}


def _chosen(names: Sequence[str] | None, options: Settings) -> list[Descriptive]:
    """New analyses with their options.

    Raises:
        AnalysisError: an unknown or repeated name, an unknown option.
    """
    known = {**DESCRIPTIVE, **OTHERS}
    wanted = list(DESCRIPTIVE) if names is None else list(names)
    for name in (*wanted, *options):
        if name not in known:
            raise AnalysisError(f"analyses: {name!r} is not one of {', '.join(known)}")
    if not wanted or len(set(wanted)) < len(wanted):
        raise AnalysisError(
            f"analyses: {', '.join(wanted) or 'none'}: one or more names, each once"
        )
    unused = [name for name in options if name not in wanted]
    if unused:
        raise AnalysisError(f"options: {unused[0]}: not among the analyses {', '.join(wanted)}")
    return [_made(name, known[name], options.get(name, {})) for name in wanted]


def _made(name: str, home: str, settings: Mapping[str, Any]) -> Descriptive:
    module, _, of = home.partition(":")
    kind = getattr(import_module(module), of)
    accepted = list(inspect.signature(kind).parameters)
    for setting in settings:
        if setting not in accepted:
            has = ", ".join(accepted) or "none"
            raise AnalysisError(f"options: {name}.{setting}: unknown; {name} has {has}")
    return kind(**settings)


def _willing(optional: bool, ask: Callable[[], None]) -> bool:
    """Whether an analysis takes part; one that was named has to."""
    if not optional:
        ask()
        return True
    try:
        ask()
    except (AnalysisError, DataError) as error:
        if world().rank == 0:
            _log.warning("left out: %s", error)
        return False
    return True
